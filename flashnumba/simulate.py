"""Runs the very same kernels in Python, thread by thread, without a GPU and without compiling.

Every CUDA thread of a block is a greenlet. It runs until it must wait for others (a barrier, a
shuffle) and hands over to the next, so the order is deterministic and a debugger works.
`shuffled(seed)` shuffles the order of the threads at every turn, and lets some of the warps fall
behind until the others cannot move: results that depend on it show a race. Shared and local memory
start as NaN, so that what is read before it is written shows too. When no thread can move, the
deadlock is reported with who waits where.

A kernel needs no preparation: `as_python` rebuilds its function, and those it calls, with `cuda`
and `math` replaced by the versions below, jitted functions by their Python bodies and instructions
(ptx/) by their meanings. `collective` runs a meaning once for a group of lanes.

Families of instructions keep their own state in parts of the block: barriers, copies in flight, and
so on. What is asynchronous arrives as late as the machine allows: a copy when no thread can move
without it, a tensor core's result when a wait asks for it. Until then its destination is NaN.
"""

import contextlib
import math
import random
from collections import Counter
from contextvars import ContextVar
from types import CellType, FunctionType, SimpleNamespace

import numpy as np
from greenlet import getcurrent, greenlet
from numba import cuda
from numba.cuda.dispatcher import CUDADispatcher

from flashnumba.tensormap import TensorMap


class Deadlock(RuntimeError):
    """Some threads of a simulated block wait for others that will never come."""


class SimulatorError(RuntimeError):
    """A simulated kernel broke a rule of the machine."""


_seed = ContextVar("seed of the order of threads", default=None)


@contextlib.contextmanager
def shuffled(seed):
    """Inside this context every simulated launch shuffles its threads, differently for each `seed`.

    A kernel without races gives the same bits for every seed.
    """
    token = _seed.set(seed)
    try:
        yield
    finally:
        _seed.reset(token)


def launch(kernel, grid, args, seed=None):
    """Run `kernel` block after block.

    Parameters
    ----------
    kernel : flashnumba.config.Kernel
    grid : int
        Number of blocks.
    args : sequence
        NumPy arrays, TensorMaps and scalars in the order of the kernel's parameters; None is an
        empty array. bfloat16 arrays are passed as their bits.
    seed : int, optional
        Shuffle the order of threads at every turn; by default as `shuffled` says, or not at all.

    Raises
    ------
    Deadlock
        If no thread of a block can continue.
    """
    args = [as_argument(x, t) for x, t in zip(args, kernel.signature.args, strict=True)]
    python = as_python(kernel.function, {})
    seed = _seed.get() if seed is None else seed
    order = None if seed is None else random.Random(seed)

    def body():
        with np.errstate(all="ignore"):  # each greenlet has a context of its own
            python(*args)

    for index in range(grid):
        Block(index, grid, kernel.threads, order, kernel.shared_bytes).run(body)


def as_argument(x, kind):
    """An argument as the kernel sees it: arrays with bfloat16 as bits, scalars as NumPy scalars."""
    if hasattr(kind, "ndim"):
        if x is None:
            return np.empty((0,) * kind.ndim, kind.dtype.name)
        return x if x.dtype == kind.dtype.name else x.view(kind.dtype.name)
    if isinstance(x, (TensorMap, tuple)) or kind.name == "none":
        return x
    return getattr(np, kind.name)(x)


class Block:
    """One thread block: its shared memory, its meetings, and the scheduler of its threads."""

    def __init__(self, index, grid, threads, order, shared_bytes=0):
        self.index, self.grid, self.size, self.order = index, grid, threads, order
        self.shared = []  # arrays in the order in which a thread asks for them
        self.dynamic = np.full(shared_bytes, 0xFF, np.uint8)  # NaN in every floating-point type
        self.meetings = {}  # (what, group) -> Meeting
        self.parts = {}  # class -> what a family of instructions keeps about this block

    def part(self, kind):
        """The block's own `kind`, made at its first use.

        A part may have `deliver()`, which lets one pending effect happen and says whether there was
        one, and `finish()`, which raises if the block must not end like this.
        """
        if kind not in self.parts:
            self.parts[kind] = kind(self)
        return self.parts[kind]

    def deliver(self):
        return any(part.deliver() for part in self.parts.values() if hasattr(part, "deliver"))

    def run(self, body):
        """Run `body` once per thread, each until it has to wait, until all are done."""
        threads = []
        for tid in range(self.size):
            thread = greenlet(body)
            thread.block, thread.tid, thread.shared_count, thread.waits = self, tid, 0, ""
            threads.append(thread)
        behind = self.stragglers(threads)  # they stand still until nothing else moves
        while threads:
            self.progress = False
            if self.order:
                self.order.shuffle(threads)
            for thread in threads:
                if thread.tid // 32 not in behind:
                    thread.switch()
            alive = [t for t in threads if not t.dead]
            moved = self.progress or len(alive) < len(threads)
            if moved and not behind:
                behind = self.stragglers(alive)
            elif not moved and behind:
                behind = set()
            elif not moved and not self.deliver():
                where = Counter(t.waits for t in threads)
                who = "; ".join(f"{n} of {self.size} threads in {w}" for w, n in where.items())
                raise Deadlock(f"block {self.index}: nothing moves: {who}")
            threads = alive
        for part in self.parts.values():
            if hasattr(part, "finish"):
                part.finish()

    def stragglers(self, threads):
        """Some of the warps, at most half; none where nothing is shuffled."""
        warps = sorted({t.tid // 32 for t in threads})
        if not self.order or len(warps) < 2:
            return set()
        return set(self.order.sample(warps, self.order.randint(1, len(warps) // 2)))


class Meeting:
    """A group of lanes that meet, exchange operands and leave with results."""

    def __init__(self, size):
        self.size, self.operands, self.results, self.left = size, {}, None, 0


def current_block():
    """The block of the thread that runs now."""
    return getcurrent().block


def current_thread():
    """The number in its block of the thread that runs now."""
    return getcurrent().tid


def wait_until(condition, what):
    """Suspend the current thread until `condition()` holds."""
    me = getcurrent()
    me.waits = what
    while not condition():
        me.parent.switch()
    me.waits = ""
    me.block.progress = True


def collective(what, size, operand, meaning):
    """Meet the `size` neighbouring lanes of this thread; return this lane's part of the result.

    `meaning` maps the list of the lanes' operands to the list of their results and runs once, in
    the last lane to arrive: an instruction of a warp is one event, not 32.
    """
    me = getcurrent()
    lane, group = me.tid % size, me.tid // size
    key = (what, group)
    meetings = me.block.meetings
    wait_until(lambda: key not in meetings or meetings[key].results is None, f"{what} (leaving)")
    meeting = meetings.setdefault(key, Meeting(min(size, me.block.size - group * size)))
    meeting.operands[lane] = operand
    if len(meeting.operands) == meeting.size:
        meeting.results = meaning([meeting.operands[i] for i in range(meeting.size)])
    wait_until(lambda: meeting.results is not None, what)
    meeting.left += 1
    if meeting.left == meeting.size:
        del meetings[key]
    return meeting.results[lane]


def nothing(operands):
    """The meaning of a barrier."""
    return operands


def poisoned(shape, dtype):
    """Memory that nobody has written: NaN, or the least integer."""
    dtype = np.dtype(getattr(dtype, "name", dtype))
    return np.full(shape, np.nan if dtype.kind == "f" else np.iinfo(dtype).min, dtype)


def shared_array(shape, dtype, alignment=None):
    """The n-th array that a thread asks for is the n-th of its block; size 0 is dynamic memory."""
    me = getcurrent()
    if shape == 0:
        return me.block.dynamic
    if me.shared_count == len(me.block.shared):
        me.block.shared.append(poisoned(shape, dtype))
    me.shared_count += 1
    return me.block.shared[me.shared_count - 1]


def local_array(shape, dtype, alignment=None):
    return poisoned(shape, dtype)


def syncthreads():
    me = getcurrent()
    collective("syncthreads", me.block.size, None, nothing)


def warp_wide(name, mask, value, exchange):
    """Meet the other lanes of the warp; all 32 must take part."""
    if mask != 0xFFFFFFFF:
        raise SimulatorError(f"{name}: {mask=:#x} must name all 32 lanes")
    return collective(name, 32, value, exchange)


def shfl_xor_sync(mask, value, lane_mask):
    """Lane i receives the value of lane i ^ lane_mask."""
    exchange = lambda v: [v[i ^ lane_mask] for i in range(len(v))]
    return warp_wide(f"shfl_xor_sync {lane_mask}", mask, value, exchange)


def shfl_sync(mask, value, lane):
    """Every lane receives the value of one."""
    return warp_wide("shfl_sync", mask, value, lambda v: [v[lane]] * len(v))


def any_sync(mask, predicate):
    """Whether the predicate holds in any of the 32 lanes."""
    return warp_wide("any_sync", mask, bool(predicate), lambda v: [any(v)] * len(v))


def syncwarp(mask=0xFFFFFFFF):
    warp_wide("syncwarp", mask, None, nothing)


def atomic_add(array, index, value):
    """Returns the old value; no other thread runs in between."""
    old = array[index]
    array[index] += value
    return old


class SimulatedCuda:
    """What a kernel finds under the name `cuda`."""

    shared = SimpleNamespace(array=shared_array)
    local = SimpleNamespace(array=local_array)
    syncthreads = staticmethod(syncthreads)
    shfl_xor_sync = staticmethod(shfl_xor_sync)
    shfl_sync = staticmethod(shfl_sync)
    any_sync = staticmethod(any_sync)
    syncwarp = staticmethod(syncwarp)
    atomic = SimpleNamespace(add=atomic_add)
    threadIdx = property(lambda self: SimpleNamespace(x=getcurrent().tid))
    blockIdx = property(lambda self: SimpleNamespace(x=getcurrent().block.index))
    blockDim = property(lambda self: SimpleNamespace(x=getcurrent().block.size))
    gridDim = property(lambda self: SimpleNamespace(x=getcurrent().block.grid))


# Python's math overflows with an exception and answers in double precision; a GPU does neither.
SIMULATED_MATH = SimpleNamespace(exp=np.exp, log=np.log, inf=math.inf)
SIMULATED_CUDA = SimulatedCuda()


def as_python(fn, memo):
    """`fn` and every jitted function it calls, with their names rebound to the simulator's."""

    def rebind(x):
        if isinstance(x, CUDADispatcher):
            return as_python(x.py_func, memo)
        if x is cuda:
            return SIMULATED_CUDA
        if hasattr(x, "simulated"):  # an instruction of ptx/
            return x.simulated
        return SIMULATED_MATH if x is math else x

    if fn not in memo:
        names = dict(fn.__globals__)
        cells = tuple(CellType(rebind(c.cell_contents)) for c in fn.__closure__ or ())
        memo[fn] = FunctionType(fn.__code__, names, fn.__name__, fn.__defaults__, cells or None)
        names.update({n: rebind(names[n]) for n in names_in(fn.__code__) if n in names})
    return memo[fn]


def names_in(code):
    """The global names that a function or its inner functions use."""
    inner = (names_in(c) for c in code.co_consts if hasattr(c, "co_names"))
    return set(code.co_names).union(*inner)
