"""Shared memory by address: loads, stores, stmatrix, and the fence before asynchronous readers.

In the simulator it is an array of bytes whose addresses start at BASE. It remembers which thread
wrote which 16 bytes by ordinary stores: tensor cores and TMA read through another path (the
"asynchronous proxy"), and reading there what no fence has published is an error. So is reading
what was written between issue and wait: the machine may read at any time between.
"""

from contextlib import contextmanager

import numpy as np

from flashnumba.ptx._asm import address, f32, reads, u32, writes
from flashnumba.ptx._instruction import instruction, warp_instruction
from flashnumba.simulate import SimulatorError, current_block, current_thread

BASE = 1024  # like on Hopper, where the first KB belongs to the system
CHUNK = 16


class SharedMemory:
    """The dynamic shared memory of a simulated block."""

    def __init__(self, block):
        self.bytes = block.dynamic
        chunks = -(-len(self.bytes) // CHUNK)
        self.unfenced = np.full(chunks, -1)  # thread that wrote, by chunk
        self.written, self.writes = np.zeros(chunks, int), 0  # which write was a chunk's last
        self.issued = None  # how many writes there were when the reader that runs now was issued

    def span(self, start, size):
        start = int(start) - BASE
        if start < 0 or start + size > len(self.bytes):
            raise SimulatorError(
                f"bytes {start} to {start + size} of {len(self.bytes)} bytes of shared memory"
            )
        if start % size:
            raise SimulatorError(f"{size} bytes of shared memory at byte {start}: not aligned")
        return slice(start, start + size)

    def load(self, start, dtype, count=1):
        return self.bytes[self.span(start, count * np.dtype(dtype).itemsize)].view(dtype).copy()

    def store(self, start, values):
        """An ordinary store of the current thread."""
        span = self.span(start, values.nbytes)
        self.bytes[span] = values.view(np.uint8)
        self.wrote(slice(span.start // CHUNK, -(-span.stop // CHUNK)), current_thread())

    def wrote(self, chunks, thread):
        """Remember an ordinary store of a thread; -1 is a write that needs no fence."""
        self.writes += 1
        self.written[chunks], self.unfenced[chunks] = self.writes, thread

    def reader(self):
        """A context for what is issued now and reads later."""
        writes = self.writes

        @contextmanager
        def reading():
            self.issued = writes
            try:
                yield
            finally:
                self.issued = None

        return reading()

    def gather(self, addresses, dtype=np.uint16):
        """What tensor cores and TMA read; an array of byte addresses of `dtype` numbers."""
        at = np.asarray(addresses) - BASE
        if at.size and (at.min() < 0 or at.max() >= len(self.bytes)):
            raise SimulatorError(f"address {at.max() + BASE} is outside of shared memory")
        writers = self.unfenced[at // CHUNK]
        if (writers >= 0).any():
            raise SimulatorError(
                f"thread {writers.max()} wrote shared memory that is read asynchronously without "
                "fence_proxy_async"
            )
        if self.issued is not None and (self.written[at // CHUNK] > self.issued).any():
            raise SimulatorError("shared memory was written while a reader of it was in flight")
        return self.bytes.view(dtype)[at // np.dtype(dtype).itemsize]

    def rows(self, addresses):
        """What ordinary loads of 16 bytes read; addresses (...) to halves (..., 8)."""
        at = np.asarray(addresses, np.int64) - BASE
        if at.min() < 0 or at.max() + CHUNK > len(self.bytes) or (at % CHUNK).any():
            raise SimulatorError(f"16 bytes at {at.max()} of {len(self.bytes)}, or not aligned")
        return self.bytes.reshape(-1, CHUNK)[at // CHUNK].view(np.uint16)

    def words(self, addresses):
        """What ordinary loads of a float32 read, by address."""
        at = np.asarray(addresses, np.int64) - BASE
        if at.min() < 0 or at.max() + 4 > len(self.bytes) or (at % 4).any():
            raise SimulatorError(f"4 bytes at {at.min()} to {at.max()} of {len(self.bytes)}")
        return self.bytes.view(np.float32)[at // 4]

    def scatter(self, addresses, values):
        """An asynchronous write of numbers to byte addresses."""
        at = np.asarray(addresses) - BASE
        if at.min() < 0 or at.max() >= len(self.bytes):
            raise SimulatorError(f"address {at.max() + BASE} is outside of shared memory")
        self.bytes.view(values.dtype)[at // values.itemsize] = values
        self.wrote(at // CHUNK, -1)

    def publish(self, thread):
        self.unfenced[self.unfenced == thread] = -1


def memory():
    """Shared memory of the block that runs."""
    return current_block().part(SharedMemory)


@instruction(
    "{{ .reg .u64 generic; cvta.to.shared.u64 generic, {array}; cvt.u32.u64 {d}, generic; }}",
    pure=True,
)
def cvta_to_shared(array: address) -> u32:
    """The address in shared memory of a shared array (dynamic: of size 0)."""
    return np.uint32(BASE)


@instruction("ld.shared.u32 {d}, [{a}];")
def ld_shared_u32(a: u32) -> u32:
    """Four bytes at address a, a multiple of 4."""
    return memory().load(a, np.uint32)[0]


@instruction(
    "{{ .reg .b16 low; ld.shared.u16 low, [{a}]; cvt.u32.u16 {d}, low; }}",
)
def ld_shared_u16(a: u32) -> u32:
    """Two bytes at address a, a multiple of 2."""
    return np.uint32(memory().load(a, np.uint16)[0])


@instruction("ld.shared.v4.u32 {x}, [{a}];")
def ld_shared_v4_u32(x: writes(u32, 4), a: u32):
    """Sixteen bytes at address a, a multiple of 16, to x (4,)."""
    x[:4] = memory().load(a, np.uint32, 4)


@instruction("ld.shared.f32 {d}, [{a}];")
def ld_shared_f32(a: u32) -> f32:
    """A number at address a, a multiple of 4."""
    return memory().load(a, np.float32)[0]


@instruction("ld.shared.v2.f32 {x}, [{a}];")
def ld_shared_v2_f32(x: writes(f32, 2), a: u32):
    """x = two numbers at a, a multiple of 8."""
    x[:2] = memory().load(a, np.float32, 2)


@instruction("st.shared.v4.f32 [{a}], {{{x0}, {x1}, {x2}, {x3}}};")
def st_shared_v4_f32(a: u32, x0: f32, x1: f32, x2: f32, x3: f32):
    """Four numbers to address a, a multiple of 16."""
    memory().store(a, np.array([x0, x1, x2, x3], np.float32))


@instruction("st.shared.f32 [{a}], {x};")
def st_shared_f32(a: u32, x: f32):
    """A number to address a, a multiple of 4."""
    memory().store(a, np.array([x], np.float32))


@instruction("st.shared.v4.u32 [{a}], {x};")
def st_shared_v4_u32(a: u32, x: reads(u32, 4)):
    """Sixteen bytes of x (4,) to address a, a multiple of 16."""
    memory().store(a, x[:4])


@instruction("st.shared.u32 [{a}], {x};")
def st_shared_u32(a: u32, x: u32):
    """Four bytes to address a, a multiple of 4."""
    memory().store(a, np.array([x], np.uint32))


@instruction(
    "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {x}; st.shared.b16 [{a}], low; }}",
)
def st_shared_u16(a: u32, x: u32):
    """The lower two bytes of x to address a, a multiple of 2."""
    memory().store(a, np.array([int(x) & 0xFFFF], np.uint16))


@instruction(
    "{{ .reg .pred negative; setp.lt.f32 negative, {x}, 0f00000000; "
    "@negative st.shared.f32 [{a}], {x}; }}"
)
def st_shared_f32_if_negative(a: u32, x: f32):
    """Four bytes to address a, a multiple of 4, if x is below 0.

    With an x that never is, it keeps its place in the order of instructions: what computes x cannot
    move behind what follows it.
    """
    if x < 0:
        memory().store(a, np.array([x], np.float32))


@warp_instruction("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{a}], {{{x0}, {x1}, {x2}, {x3}}};")
def stmatrix_x4(a: u32, x0: u32, x1: u32, x2: u32, x3: u32):
    """Store four 8 x 8 matrices of halves: lane 8 i + r gives the address of row r of matrix i.

    Lane l holds row l // 4, columns 2 (l % 4) and + 1, of matrix i in register i: the order in
    which mma and wgmma leave their accumulators.
    """
    smem = memory()
    for i, x in enumerate((x0, x1, x2, x3)):
        for row in range(8):
            smem.store(a[8 * i + row], x[4 * row : 4 * row + 4].astype(np.uint32))
            at = smem.span(a[8 * i + row], CHUNK).start // CHUNK
            smem.wrote(at, current_thread() // 32 * 32 + 8 * i + row)


@instruction("fence.proxy.async.shared::cta;")
def fence_proxy_async():
    """Publish this thread's ordinary stores to tensor cores and TMA; a barrier has to follow."""
    memory().publish(current_thread())
