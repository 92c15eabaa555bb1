"""What a stream keeps in GPU memory: descriptions of arrays for TMA, and a counter of zeros."""

import threading
from functools import cache

import numpy as np

from flashnumba.config import Kernel

SLOTS = 1024
LEGACY_STREAMS, PER_THREAD_STREAM = (0, 1), 2
DESCRIPTION_WORDS = 16  # of 8 bytes
ROWS = 4  # descriptions that one kernel writes

_workspaces = {}  # (device, stream) -> Workspace
_captured = []  # Workspaces of graphs


class OfThread(threading.local):
    """The workspaces of a thread's own default streams."""

    def __init__(self):
        self.workspaces = {}


_of_thread = OfThread()


class Workspace:
    """Descriptions of arrays for TMA, in slots of 128 bytes, and a counter of zeros.

    A kernel on the stream writes a description to its slot, so whatever comes later on the stream
    finds it there, whatever came earlier is done with the slot's last content, and nobody waits.
    Slots are taken in turn. A description is known by address and form of its array: it stays
    right when the memory is freed and used again.

    That a kernel sees what an earlier one has written is the usual rule. It is the TMA unit that
    reads here, and its cache is its own: test_few_slots_are_reused_on_a_gpu watches that.
    """

    def __init__(self, slots, launch):
        import cupy

        self.launch = launch
        self.lock = threading.Lock()
        self.memory = cupy.zeros((slots + 1, DESCRIPTION_WORDS), np.uint64)
        self.counter = self._address(slots)
        self.addresses = {}  # (address of an array, encoder) -> address of its description
        self.keys = [None] * slots  # what is in which slot
        self.next = 0

    def find(self, keys):
        """Addresses of these descriptions, all valid for the next kernel on the stream."""
        found = [self.addresses.get(key) for key in keys]
        if None in found:
            self._add(keys)
            found = [self.addresses[key] for key in keys]
        return found

    def _add(self, keys):
        missing = [key for key in dict.fromkeys(keys) if key not in self.addresses]
        descriptions = [encode(address) for address, encode in missing]
        slots = []
        for _ in missing:
            while self.keys[self.next] in keys:  # needed by the same launch
                self.next = (self.next + 1) % len(self.keys)
            slots.append(self.next)
            self.addresses.pop(self.keys[self.next], None)
            self.keys[self.next] = None
            self.next = (self.next + 1) % len(self.keys)
        self._write(slots, descriptions)
        for slot, key in zip(slots, missing, strict=True):
            self.keys[slot] = key
            self.addresses[key] = self._address(slot)

    def _write(self, slots, descriptions):
        for i in range(0, len(slots), ROWS):
            rows, words = slots[i : i + ROWS], sum(descriptions[i : i + ROWS], ())
            args = self.memory, _padded(rows, ROWS), _padded(words, ROWS * DESCRIPTION_WORDS)
            self.launch(writer(), len(rows), args)

    def _address(self, slot):
        return self.memory.data.ptr + 8 * DESCRIPTION_WORDS * slot


def of_stream(cuda, device, stream, maps, launch):
    """The workspace of a stream; in a graph that is being captured, a new one for each launch.

    `launch` is `runtime.launch`, which writes what is missing.

    A graph writes its own descriptions and zeros whenever it runs, to memory that nothing else
    uses: it may run at any time, on any stream. That memory, about 1 KB a launch, is never freed,
    since nothing tells when the graph is gone.

    The handle of a stream that was destroyed can return for a new one. CUDA keeps what belongs to a
    stream until its work is done, so whatever the old one wrote is there.
    """
    if stream not in LEGACY_STREAMS and cuda.runtime.streamIsCapturing(stream):
        _captured.append(Workspace(maps, launch))
        return _captured[-1]
    known = _of_thread.workspaces if stream == PER_THREAD_STREAM else _workspaces
    found = known.get((device, stream))
    if found is None:
        found = known[device, stream] = Workspace(SLOTS, launch)
    return found


def _padded(values, size):
    return [*values, *[0] * (size - len(values))]


@cache
def writer():
    """The kernel that writes up to ROWS descriptions: a block each, a thread a word."""
    from numba import cuda
    from numba.cuda import types

    def write(memory, slots, words):
        row, i = cuda.blockIdx.x, cuda.threadIdx.x
        memory[slots[row], i] = words[DESCRIPTION_WORDS * row + i]

    signature = types.void(
        types.Array(types.uint64, 2, "C"),
        types.UniTuple(types.int64, ROWS),
        types.UniTuple(types.uint64, ROWS * DESCRIPTION_WORDS),
    )
    return Kernel(f"write {ROWS} descriptions", write, signature, DESCRIPTION_WORDS)
