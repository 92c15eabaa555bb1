"""Kernels that run every instruction of flashnumba/ptx: the same in the simulator and on a GPU.

A case is a kernel, random operands for it, and how its results must agree: bit for bit, or to the
error that the instruction's documentation states. test_ptx_conformance.py compares machine and
simulator, and checks that no instruction is left out.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType

import ml_dtypes
import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import register_jitable

from flashnumba import ptx, simulate
from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.fragment import (
    descriptor,
    first_columns,
    first_rows,
    pairs,
    pairs_in_order,
)
from flashnumba.device.parts import factors
from flashnumba.device.pipeline import ring
from flashnumba.ptx.barrier import (
    bar_arrive,
    bar_sync,
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
)
from flashnumba.ptx.cp_async import cp_async_commit_group, cp_async_row, cp_async_wait_group
from flashnumba.ptx.layout import (
    ROW,
    accumulator,
    descriptor_constant,
    k_major,
    mn_major,
    swizzle128,
)
from flashnumba.ptx.memory import (
    fence_proxy_async_global,
    ld_global_row,
    ld_global_v4_f32,
    red_global_add_f32,
    red_global_add_f32_each,
    st_global_fragment,
    st_global_row,
    st_release_u32,
    wait_acquire_u32,
)
from flashnumba.ptx.mma import mma_rs, mma_ss
from flashnumba.ptx.mma_tf32 import ORDER, tf32_rs, tf32_ss
from flashnumba.ptx.shared import (
    cvta_to_shared,
    fence_proxy_async,
    ld_shared_f32,
    ld_shared_u16,
    ld_shared_u32,
    ld_shared_v2_f32,
    ld_shared_v4_u32,
    st_shared_f32,
    st_shared_f32_if_negative,
    st_shared_u16,
    st_shared_u32,
    st_shared_v4_f32,
    st_shared_v4_u32,
    stmatrix_x4,
)
from flashnumba.ptx.thread import (
    cvt_bf16x2,
    cvt_f16x2,
    cvt_f16x2_each,
    cvt_f32_f16,
    ex2,
    lg2,
    max_f32,
    nanosleep,
    opaque,
    rcp,
)
from flashnumba.ptx.tma import (
    cp_async_bulk_commit_group,
    cp_async_bulk_load,
    cp_async_bulk_tensor_load,
    cp_async_bulk_tensor_store,
    cp_async_bulk_wait_group,
    cp_async_bulk_wait_group_read,
    cp_reduce_async_bulk_add_f32,
    fence_proxy_tensormap,
)
from flashnumba.ptx.wgmma import (
    wgmma_commit_group,
    wgmma_fence,
    wgmma_fence_of,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait_group,
    zero,
)
from flashnumba.tensormap import TensorMap

register_jitable(swizzle128)
SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]  # for the disk cache
HALF = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
i32, u32, u64, f32 = np.int32, np.uint32, np.uint64, np.float32


# --- which instructions there are, and which a kernel uses ----------------------------------------


def instructions():
    """Names of all instructions of flashnumba/ptx and of the factories that make some."""
    modules = [import_module(f"{ptx.__name__}.{m.name}") for m in iter_modules(ptx.__path__)]
    return {
        f"{module.__name__}.{name}"
        for module in modules
        for name, x in vars(module).items()
        if hasattr(x, "simulated") or hasattr(x, "cache_info")
        if getattr(x, "body", x).__module__ == module.__name__
    }


def used_by(function, seen=None):
    """The instructions that a kernel uses, itself or through functions that it calls."""
    seen = {} if seen is None else seen
    function = getattr(function, "py_func", function)
    if hasattr(function, "simulated"):
        seen[id(function)] = function
    elif isinstance(function, FunctionType) and id(function) not in seen:
        seen[id(function)] = function
        for x in [c.cell_contents for c in function.__closure__ or ()] + named(function):
            used_by(x, seen)
    return [x for x in seen.values() if hasattr(x, "simulated")]


def named(function):
    """What the global names in a function and its inner functions stand for."""
    codes, names = [function.__code__], set()
    for code in codes:
        names.update(code.co_names)
        codes += [c for c in code.co_consts if hasattr(c, "co_names")]
    return [function.__globals__[n] for n in sorted(names) if n in function.__globals__]


def name_of(instruction):
    """As `instructions` names it: by its factory if it has one."""
    body = instruction.body
    return f"{body.__module__}.{body.__qualname__.partition('.')[0]}"


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """`operands(rng)` makes the arguments; `agree`, by argument, compares what a run left there.

    `machine` says how often operations of the machine must at least be in its code for sm_90a;
    HMMA exactly so often.
    """

    kernel: Kernel
    operands: Callable
    agree: dict
    machine: dict
    grid: int = 1

    @property
    def hopper(self):
        return self.kernel.arch == "a"


def simulate_function(function, *arguments, threads=32, shared=1024, grid=1, seed=None):
    """Run a function of arrays, TensorMaps and integers in the simulator."""
    kinds = [
        types.Array(getattr(types, x.dtype.name), x.ndim, "A") if isinstance(x, np.ndarray)
        else types.uint64 if isinstance(x, TensorMap) else types.int32
        for x in arguments
    ]  # fmt: skip
    kernel = Kernel(function.__name__, function, types.void(*kinds), threads, shared)
    simulate.launch(kernel, grid, arguments, seed)


def kernel_of(name, function, kinds, threads, shared_bytes=0, arch=""):
    return Kernel(f"{name} {SOURCE}", function, types.void(*kinds), threads, shared_bytes, arch)


def words(ndim=1):
    return types.Array(types.uint32, ndim, "A")


def floats(ndim=1):
    return types.Array(types.float32, ndim, "A")


def exact(got, expected):
    """The same bits; in float32 any NaN is as good as any other."""
    same = got.view(f"u{got.itemsize}") == expected.view(f"u{got.itemsize}")
    return same | (np.isnan(got) & np.isnan(expected)) if got.dtype == np.float32 else same


TINY = float(np.finfo(np.float32).tiny)


def within(relative, absolute=0.0):
    """An error of at most `relative` or at most `absolute`; infinities and NaN in the same places.

    Within that error of the smallest normal number, results may be flushed to 0.
    """

    def agree(got, expected):
        got, expected = got.astype(np.float64), expected.astype(np.float64)
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        with np.errstate(invalid="ignore"):
            near = np.abs(got - expected) <= np.maximum(relative * np.abs(expected), absolute)
        low, high = (f(np.abs(got), np.abs(expected)) for f in (np.minimum, np.maximum))
        return same | near | ((low == 0) & (high <= TINY * (1 + relative)))

    return agree


# --- thread.py ------------------------------------------------------------------------------------

SPECIAL = np.array(
    [0, 1, 2, 0.5, 3, 127, 128, 126, 149, 150, np.inf, np.nan, 2.0**126, 2.0**127, 3.4028235e38]
    + [2.0**-126, 2.0**-127, 2.0**-133, 2.0**-149, 2.0**-14, 2.0**-24, 2.0**-25, 3 * 2.0**-25]
    + [65504, 65519.996, 65520, 65536, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    + [1 + 2.0**-8, 1 + 3 * 2.0**-8],
    np.float32,
)  # fmt: skip


def make_thread(turing=False):
    """Every pair of special numbers, random bits, and numbers of a softmax.

    Two kernels: `turing` has no more than Turing can do.
    """

    @cuda.jit(device=True, forceinline=True)
    def of_all(i, a, b, exp, log, inverse, larger, wide, each):
        exp[i] = ex2(a[i])
        log[i] = lg2(a[i])
        inverse[i] = rcp(a[i])
        larger[i] = max_f32(a[i], b[i])
        wide[i] = cvt_f32_f16(a[i].view(np.uint32))
        each[i] = cvt_f16x2_each(a[i], b[i])
        nanosleep(u32(20))

    def kernel(a, b, exp, log, inverse, larger, wide, each, half, bhalf):
        i = cuda.blockIdx.x * 128 + cuda.threadIdx.x
        if i < a.shape[0]:
            of_all(i, a, b, exp, log, inverse, larger, wide, each)
            half[i] = cvt_f16x2(a[i], b[i])
            bhalf[i] = opaque(cvt_bf16x2(a[i], b[i]))

    def turing_kernel(a, b, exp, log, inverse, larger, wide, each):
        i = cuda.blockIdx.x * 128 + cuda.threadIdx.x
        if i < a.shape[0]:
            of_all(i, a, b, exp, log, inverse, larger, wide, each)

    packed = 1 if turing else 3

    def operands(rng):
        special = np.concatenate([SPECIAL, -SPECIAL])
        special = np.stack(np.meshgrid(special, special)).reshape(2, -1)
        bits = rng.integers(0, 1 << 32, (2, 500), u32).view(f32)
        near = rng.uniform(-4, 4, (2, 500)).astype(f32)
        a, b = np.concatenate([special, bits, near], axis=1)
        return [a, b, *np.zeros((5, a.size), f32), *np.zeros((packed, a.size), u32)]

    half_ulp = 2.0**-24  # of the body
    agree = {
        2: within(2.0**-22 + half_ulp),
        3: within(2.0**-22 + half_ulp, 2.0**-22 + half_ulp),
        4: within(2.0**-23 + half_ulp),
        **dict.fromkeys(range(5, 7 + packed), exact),
    }
    kinds = [floats()] * 7 + [words()] * packed
    grid = -(-len(operands(np.random.default_rng(0))[0]) // 128)
    if turing:
        kernel = kernel_of("thread of Turing", turing_kernel, kinds, 128)
        return Case(kernel, operands, agree, {"MUFU": 3, "FMNMX": 1}, grid)
    machine = {"MUFU": 3, "FMNMX": 1, "F2FP": 2}
    return Case(kernel_of("thread", kernel, kinds, 128), operands, agree, machine, grid)


# --- shared.py ------------------------------------------------------------------------------------


def make_shared():
    """Words, halves and negative numbers over them, all read back by halves, words, 16 bytes."""

    def kernel(words, at_half, at_16, by_word, by_half, by_16, numbers):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        x = cuda.local.array(4, np.uint32)
        for i in range(8):
            st_shared_u32(smem + u32(4 * t + 512 * i), words[t + 128 * i])
        cuda.syncthreads()
        st_shared_u16(smem + at_half[t], words[t])
        cuda.syncthreads()
        st_shared_f32_if_negative(smem + u32(4 * t), numbers[t])
        cuda.syncthreads()
        for i in range(8):
            by_word[t + 128 * i] = ld_shared_u32(smem + u32(4 * t + 512 * i))
        by_half[t] = ld_shared_u16(smem + at_half[127 - t])
        ld_shared_v4_u32(x, smem + at_16[t])
        for i in range(4):
            by_16[t, i] = x[i]

    def operands(rng):
        words = rng.integers(0, 1 << 32, 1024, u32)
        at_half, at_16 = 2 * rng.permutation(2048)[:128], 16 * rng.permutation(256)[:128]
        out = [np.zeros(1024, u32), np.zeros(128, u32), np.zeros((128, 4), u32)]
        numbers = rng.standard_normal(128).astype(np.float32)
        numbers[:4] = np.nan, -np.inf, 0, -0.0
        return [words, at_half.astype(u32), at_16.astype(u32), *out, numbers]

    kinds = [words()] * 5 + [words(2), types.Array(types.float32, 1, "A")]
    kernel = kernel_of("shared", kernel, kinds, 128, 4096)
    return Case(kernel, operands, dict.fromkeys((3, 4, 5), exact), {"LDS": 3, "STS": 3})


def make_stmatrix():
    """Two warps, each twice, to rows of 16 bytes in random places; the rest must stay."""

    def kernel(x, at, out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        for i in range(16):
            st_shared_u32(smem + u32(4 * t + 256 * i), u32(t + 64 * i))
        cuda.syncthreads()
        for i in range(2):
            stmatrix_x4(smem + at[t, i], x[t, 4 * i], x[t, 4 * i + 1], x[t, 4 * i + 2],
                        x[t, 4 * i + 3])  # fmt: skip
        cuda.syncthreads()
        for i in range(16):
            out[t + 64 * i] = ld_shared_u32(smem + u32(4 * t + 256 * i))

    def operands(rng):
        at = 16 * rng.permutation(256)[:128].reshape(64, 2)
        return [rng.integers(0, 1 << 32, (64, 8), u32), at.astype(u32), np.zeros(1024, u32)]

    kernel = kernel_of("stmatrix", kernel, [words(2), words(2), words()], 64, 4096, "a")
    return Case(kernel, operands, {2: exact}, {"STSM": 2})


# --- memory.py and cp_async.py: rows --------------------------------------------------------------

ROW_PARTS, ROW_STEP = 3, 2048  # 16 bytes of every 128 of a row, and where in shared memory each is
FRAGMENT_COLUMNS = 32
ROWS, COLUMNS = 40, 168  # of halves, of one head of an array; thread t starts at column 8 (t % 8)


@inlined
def number_words(smem, count):
    """Shared memory = 0, 1, 2, ..., so that what is not written over can be seen."""
    for i in range(i32(cuda.threadIdx.x), i32(count), i32(cuda.blockDim.x)):
        st_shared_u32(smem + u32(4 * i), u32(i))


@inlined
def write_down(smem, words):
    for i in range(i32(cuda.threadIdx.x), i32(words.shape[0]), i32(cuda.blockDim.x)):
        words[i] = ld_shared_u32(smem + u32(4 * i))


def random_rows(rng, shape):
    """(row, 16 or 0 if it is past the array, bytes of it), by thread, the last axis.

    Down to no bytes, and up to what the array has from the thread's column on.
    """
    inside = rng.random(shape) < 0.8
    row = rng.integers(0, ROWS, shape) + ROWS * ~inside
    width = np.minimum(16 * rng.integers(-1, 22, shape), 2 * COLUMNS - 16 * (np.arange(64) % 8))
    return row.astype(i32), u32(16) * inside.astype(u32), width.astype(i32)


def random_bits(rng, *shape):
    return rng.integers(0, 1 << 16, shape, np.uint16)


def make_rows():
    """Each thread loads a row, hands it to another through shared memory, and stores what it got.

    Rows of a strided array, cut at a width: what is past that is loaded as zeros and not stored.
    """
    load, store, SIZE = ld_global_row(ROW_PARTS), st_global_row(ROW_PARTS), 4 * ROW_PARTS

    def kernel(x, row, inside, width, at, image, y, to_row, to_width):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        bits = cuda.local.array(SIZE, np.uint32)
        four = cuda.local.array(4, np.uint32)
        number_words(smem, image.shape[0])
        cuda.syncthreads()
        source, target = x[:, 1, 8 * (t % 8) :], y[:, 0, 8 * (t % 8) :]
        load(bits, source, row[t], i32(x.strides[0]), inside[t], width[t])
        for part in range(ROW_PARTS):
            for i in range(4):
                four[i] = bits[4 * part + i]
            st_shared_v4_u32(smem + at[t] + u32(ROW_STEP * part), four)
        cuda.syncthreads()
        write_down(smem, image)
        for part in range(ROW_PARTS):
            ld_shared_v4_u32(four, smem + at[63 - t] + u32(ROW_STEP * part))
            for i in range(4):
                bits[4 * part + i] = four[i]
        store(target, to_row[t], i32(y.strides[0]), to_width[t], bits)

    def operands(rng):
        x, y = random_bits(rng, ROWS, 3, COLUMNS), random_bits(rng, 64, 2, COLUMNS)
        row, inside, width = random_rows(rng, 64)
        at = 16 * rng.permutation(ROW_STEP // 16)[:64].astype(u32)
        image = np.zeros(ROW_PARTS * ROW_STEP // 4, u32)
        to_row = rng.permutation(64).astype(i32)  # all different
        return [x, row, inside, width, at, image, y, to_row, random_rows(rng, 64)[2]]

    x, n = types.Array(types.uint16, 3, "A"), types.Array(types.int32, 1, "A")
    kinds = [x, n, words(), n, words(), words(), x, n, n]
    kernel = kernel_of("rows", kernel, kinds, 64, ROW_PARTS * ROW_STEP)
    machine = {"LDG": ROW_PARTS, "STG": ROW_PARTS, "STS": 1 + ROW_PARTS, "LDS": 1 + ROW_PARTS}
    return Case(kernel, operands, {5: exact, 6: exact}, machine)


def make_fragment():
    """Each warp stores an accumulator to 16 rows of an array, cut at a row and at a width."""
    store, SIZE = st_global_fragment(FRAGMENT_COLUMNS), FRAGMENT_COLUMNS // 2

    def kernel(x, row_end, width, y):
        t = i32(cuda.threadIdx.x)
        acc = cuda.local.array(SIZE, np.float32)
        for i in range(SIZE):
            acc[i] = x[t, i]
        row, column = i32(t // 32 * 16 + t % 32 // 4), i32(t % 4 * 2)
        target = y[:, 1, column:]
        first = i32(4 * column)
        store(target, row, i32(y.strides[0]), row_end[t // 32], i32(width[t // 32] - first), acc)

    def operands(rng):
        x = rng.standard_normal((128, SIZE)).astype(f32)
        width = 4 * np.array([FRAGMENT_COLUMNS, 20, 0, FRAGMENT_COLUMNS], i32)
        y = rng.standard_normal((64, 2, FRAGMENT_COLUMNS)).astype(f32)
        return [x, np.array([16, 27, 48, 60], i32), width, y]

    n = types.Array(types.int32, 1, "A")
    kernel = kernel_of("fragment", kernel, [floats(2), n, n, floats(3)], 128)
    return Case(kernel, operands, {3: exact}, {"STG": FRAGMENT_COLUMNS // 4})


def make_cp_async():
    """Two groups of copies in flight; the older is read when only it has to be there, then both."""
    HALF_BYTES = ROW_PARTS * ROW_STEP
    start = cp_async_row(ROW_PARTS, ROW_STEP)
    wait_older, wait_all = cp_async_wait_group(1), cp_async_wait_group(0)

    def kernel(x, row, inside, width, at, older, both):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        number_words(smem, both.shape[0])
        cuda.syncthreads()
        source, pitch = x[:, 1, 8 * (t % 8) :], i32(x.strides[0])
        for n in range(2):
            place = smem + u32(HALF_BYTES * n) + at[n, t]
            start(place, source, row[n, t], pitch, inside[n, t], width[n, t])
            cp_async_commit_group()
        wait_older()
        cuda.syncthreads()
        write_down(smem, older)
        wait_all()
        cuda.syncthreads()
        write_down(smem, both)

    def operands(rng):
        at = [16 * rng.permutation(ROW_STEP // 16)[:64] for _ in range(2)]
        out = np.zeros(HALF_BYTES // 4, u32), np.zeros(HALF_BYTES // 2, u32)
        x = random_bits(rng, ROWS, 3, COLUMNS)
        return [x, *random_rows(rng, (2, 64)), np.array(at, u32), *out]

    n = types.Array(types.int32, 2, "A")
    kinds = [types.Array(types.uint16, 3, "A"), n, words(2), n, words(2), words(), words()]
    kernel = kernel_of("cp_async", kernel, kinds, 64, 2 * HALF_BYTES)
    machine = {"LDGSTS": ROW_PARTS, "LDGDEPBAR": 1, "DEPBAR": 2}
    return Case(kernel, operands, {5: exact, 6: exact}, machine)


# --- barrier.py -----------------------------------------------------------------------------------


def make_barriers():
    """One warpgroup hands rows through a ring to two, which take turns to write down their order.

    The budget of registers is moved from the first to the others, as in a forward kernel.
    """
    TURNS, SLOTS = 7, 3
    EVENTS_AT, LOG_AT = 512 * SLOTS, 512 * SLOTS + 16 * SLOTS
    FULL, EMPTY = u32(EVENTS_AT), u32(EVENTS_AT + 8 * SLOTS)
    event, wait, wait_before, arrive = ring(SLOTS)
    give_registers, take_registers = setmaxnreg_dec(40), setmaxnreg_inc(232)

    def kernel(x, out, order):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        warpgroup = i32(cuda.threadIdx.x) // i32(128)
        t = i32(cuda.threadIdx.x) % i32(128)
        log = smem + u32(LOG_AT)

        def produce():
            for n in range(TURNS):
                wait_before(smem, EMPTY, u32(n))
                st_shared_u32(smem + u32(512 * (n % SLOTS) + 4 * t), x[n, t])
                arrive(smem, FULL, u32(n))

        def consume():
            if warpgroup == 2:
                bar_arrive(u32(1), u32(256))
            for n in range(TURNS):
                wait(smem, FULL, u32(n))
                at = u32(512 * (n % SLOTS) + 4 * ((5 * t + n) % 128))
                out[warpgroup - 1, n, t] = ld_shared_u32(smem + at)
                arrive(smem, EMPTY, u32(n))
                bar_sync(u32(warpgroup), u32(256))
                if t == 0:
                    count = ld_shared_u32(log)
                    st_shared_u32(log + u32(4) * (count + u32(1)), u32(10 * n + warpgroup))
                    st_shared_u32(log, count + u32(1))
                if warpgroup == 1 or n < TURNS - 1:
                    bar_arrive(u32(3 - warpgroup), u32(256))

        if cuda.threadIdx.x == 0:
            for i in range(SLOTS):
                mbarrier_init(event(smem, FULL, u32(i)), u32(128))
                mbarrier_init(event(smem, EMPTY, u32(i)), u32(256))
            fence_mbarrier_init()
            st_shared_u32(log, u32(0))
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            produce()
        else:
            take_registers()
            consume()
        cuda.syncthreads()
        if cuda.threadIdx.x <= 2 * TURNS:
            order[cuda.threadIdx.x] = ld_shared_u32(log + u32(4) * u32(cuda.threadIdx.x))

    def operands(rng):
        x = rng.integers(0, 1 << 32, (TURNS, 128), u32)
        return [x, np.zeros((2, TURNS, 128), u32), np.zeros(2 * TURNS + 1, u32)]

    kernel = kernel_of("barriers", kernel, [words(2), words(3), words()], 384, 2048, "a")
    machine = {"SYNCS.EXCH": 2 * SLOTS, "SYNCS": 4, "USETMAXREG": 2, "BAR": 4}
    return Case(kernel, operands, {1: exact, 2: exact}, machine)


# --- tma.py ---------------------------------------------------------------------------------------

# (column, row) of boxes of 24 x 64 from arrays of 50 x 72: inside, over every edge, wholly outside.
# Only a load may start before the array.
STORES = [(0, 0), (64, 24), (8, 26), (72, 0), (0, 49), (0, 50), (40, 40), (64, 49), (104, 10)]
STORES += [(8, 60)]
BOXES = [*STORES, (-8, 3), (-64, 0), (0, -5), (0, -24), (-56, -23), (-200, -100)]


def make_tma():
    """Each box is loaded, written down as it lies in shared memory, and stored somewhere else."""
    ROWS = 24
    FULL_AT = 128 * ROWS

    def kernel(x, y, boxes, image):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        full = smem + u32(FULL_AT)
        if t == 0:
            fence_proxy_tensormap(x)
            fence_proxy_tensormap(y)
            mbarrier_init(full, u32(1))
            fence_mbarrier_init()
        cuda.syncthreads()
        for n in range(boxes.shape[0]):
            if t == 0:
                cp_async_bulk_wait_group_read()
                mbarrier_arrive_expect_tx(full, u32(128 * ROWS))
                cp_async_bulk_tensor_load(
                    smem, x, full, boxes[n, 0], boxes[n, 1], boxes[n, 2], boxes[n, 3]
                )
            mbarrier_wait(full, u32(n & 1))
            for i in range(ROWS // 4):
                image[n, t + 128 * i] = ld_shared_u32(smem + u32(4 * t + 512 * i))
            cuda.syncthreads()
            if t == 0:
                cp_async_bulk_tensor_store(
                    y, smem, boxes[n, 4], boxes[n, 5], boxes[n, 6], boxes[n, 7]
                )
                cp_async_bulk_commit_group()
        if t == 0:
            cp_async_bulk_wait_group()

    def operands(rng):
        x, y = (
            rng.integers(0, 1 << 16, (2, 50, heads, 80), np.uint16).view(np.float16).copy()
            for heads in (4, 8)
        )
        n = np.arange(len(BOXES))
        to = [STORES[i % len(STORES)] for i in rng.permutation(n)]  # each in a head of its own
        boxes = np.column_stack([BOXES, n % 3, n % 2, to, n // 2, n % 2]).astype(np.int32)
        maps = [TensorMap(x[:, :, :3, :72], ROWS), TensorMap(y[..., :72], ROWS)]
        return [*maps, boxes, np.zeros((len(BOXES), 32 * ROWS), u32)]

    kinds = [types.uint64, types.uint64, types.Array(types.int32, 2, "A"), words(2)]
    kernel = kernel_of("tma", kernel, kinds, 128, FULL_AT + 1024, "a")
    machine = {"UTMALDG": 1, "UTMASTG": 1, "UTMACMDFLUSH": 1, "DEPBAR": 2}
    return Case(kernel, operands, {1: exact, 3: exact}, machine)


def make_bulk():
    """Rows are loaded in bulk, read in three ways, and added to rows elsewhere in three."""
    ROWS, SIZE = 5, 512  # of numbers
    BYTES, OUT_AT, FULL_AT = 4 * SIZE, 4 * SIZE, 8 * SIZE
    red_global_add = red_global_add_f32(SIZE, 8, 64)

    def kernel(x, to, by_4, by_8, y, z, flags, seen):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        pair, four = cuda.local.array(2, np.float32), cuda.local.array(4, np.float32)
        eight = cuda.local.array(8, np.float32)
        full, out = smem + u32(FULL_AT), smem + u32(OUT_AT)
        if t == 0:
            mbarrier_init(full, u32(1))
            fence_mbarrier_init()
        cuda.syncthreads()
        for n in range(ROWS):
            if t == 0:
                mbarrier_arrive_expect_tx(full, u32(BYTES))
                cp_async_bulk_load(smem, x[n], u32(BYTES), full)
                cp_async_bulk_wait_group_read()
            mbarrier_wait(full, u32(n & 1))
            cuda.syncthreads()
            for i in range(2):
                ld_shared_v2_f32(pair, smem + u32(8 * t + 1024 * i))
                by_8[n, 2 * t + 256 * i], by_8[n, 2 * t + 256 * i + 1] = pair[0], pair[1]
            for i in range(4):
                by_4[n, t + 128 * i] = ld_shared_f32(smem + u32(4 * t + 512 * i))
            ld_global_v4_f32(four, x[n], u32(t))
            st_shared_v4_f32(out + u32(16 * t), four[0], four[1], four[2], four[3])
            fence_proxy_async()
            cuda.syncthreads()
            if t == 0:
                cp_reduce_async_bulk_add_f32(y[to[n]], out, u32(BYTES))
                cp_async_bulk_commit_group()
            if t < 64:
                for i in range(4):
                    eight[i] = four[i]
                ld_global_v4_f32(four, x[n], u32(t + 64))
                for i in range(4):
                    eight[4 + i] = four[i]
                red_global_add(z, u32(to[n]), u32(63 - t), eight)
            cuda.syncthreads()
        if t == 0:
            cp_async_bulk_wait_group()
        # Warp after warp, the last first: each adds to what the one before has left.
        turn = 3 - t // 32
        wait_acquire_u32(flags, u32(2), u32(turn))
        fence_proxy_async_global()
        cuda.syncwarp()
        if t % 32 == 0:
            seen[turn] = u32(seen[(turn + 3) % 4] + u32(turn + 1))
            st_release_u32(flags, u32(2), u32(turn + 1))

    def operands(rng):
        numbers = lambda rows: rng.integers(-99, 100, (rows, SIZE)).astype(f32)
        out = [np.zeros((ROWS, SIZE), f32) for _ in range(2)]
        flags = np.zeros(4, np.uint32), np.zeros(4, np.uint32)
        return [numbers(ROWS), np.array([2, 0, 2, 1, 0]), *out, numbers(3), numbers(3), *flags]

    rows = types.Array(types.float32, 2, "C")
    kinds = [rows, types.Array(types.int64, 1, "A"), *[rows] * 4, words(), words()]
    kernel = kernel_of("bulk", kernel, kinds, 128, FULL_AT + 1024, "a")
    machine = {"UBLKCP": 1, "UBLKRED": 1, "LDG": 1, "RED": 2, "STS": 1, "LDS": 2}
    return Case(kernel, operands, dict.fromkeys(range(2, 8), exact), machine)


def make_red():
    """Three blocks turn numbers around in shared memory and add them to two tiles, one by one."""
    WORDS, SIZE = 256, 4
    add = red_global_add_f32_each(WORDS, SIZE, 64)

    def kernel(x, to, y):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t, block = i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        mine = cuda.local.array(SIZE, np.float32)
        for i in range(SIZE):
            st_shared_f32(smem + u32(4 * (t + 64 * i)), x[block, t + 64 * i])
        cuda.syncthreads()
        for i in range(SIZE):
            mine[i] = ld_shared_f32(smem + u32(4 * (WORDS - 1 - t - 64 * i)))
        add(y, u32(to[block]), u32(t), mine)

    def operands(rng):
        x, y = (rng.integers(-99, 100, (rows, WORDS)).astype(f32) for rows in (3, 3))
        return [x, np.array([2, 0, 2], u32), y]

    rows = types.Array(types.float32, 2, "C")
    kernel = kernel_of("red", kernel, [rows, words(), rows], 64, 4 * WORDS)
    return Case(kernel, operands, {2: exact}, {"RED": SIZE, "STS": 1, "LDS": 1}, 3)


# --- wgmma.py -------------------------------------------------------------------------------------

SIZES = (64, 80, 96, 128, 160, 176, 256)
DEPTH, STEPS = 128, 5  # columns of A for wgmma_ss; steps of 16 for wgmma_rs: more than 64 columns
PRODUCTS = ("ss", "ss b mn", "ss a mn b mn", "ss a mn", "rs b mn", "rs", "ss b mn add")


def make_wgmma(n, dtype, integers):
    """Every form of product, from arrays A (64, DEPTH), B (n, DEPTH) and their transposes.

    With small integers all sums are exact. Otherwise a sum of so many terms may be off by one unit
    of the last place of the sum of their magnitudes (tensor cores truncate) for each.
    """
    SIZE, A_SIZE, SUBTILES, STEPS_SS = n // 2, 4 * STEPS, -(-n // 64), DEPTH // 16
    AT_AT = 128 * DEPTH
    B_AT = AT_AT + 128 * DEPTH
    BT_AT = B_AT + 2 * n * DEPTH
    FULL_AT = BT_AT + 128 * DEPTH * SUBTILES
    K_MAJOR, MN_MAJOR = u64(descriptor_constant()), u64(descriptor_constant(128 * DEPTH))
    mn_steps = tuple(mn_major(k) for k in range(STEPS_SS))
    a_steps, b_steps = (tuple(k_major(rows, k) for k in range(STEPS_SS)) for rows in (64, n))
    ss = wgmma_ss(n, dtype, a_steps, b_steps)
    ss_b = wgmma_ss(n, dtype, a_steps, mn_steps, b_mn_major=True)
    ss_ab = wgmma_ss(n, dtype, mn_steps, mn_steps, True, True)
    ss_a = wgmma_ss(n, dtype, mn_steps, b_steps, a_mn_major=True)
    ss_add = wgmma_ss(n, dtype, a_steps, mn_steps, b_mn_major=True, add=True)
    rs_b = wgmma_rs(n, dtype, mn_steps[:STEPS])
    rs = wgmma_rs(n, dtype, b_steps[:STEPS], b_mn_major=False)
    fence, wait = wgmma_fence_of(SIZE, A_SIZE), wgmma_wait_group(0, SIZE)

    def kernel(a, b, at, bt, a_frag, start, out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        full = smem + u32(FULL_AT)
        d = cuda.local.array(SIZE, np.float32)
        x = cuda.local.array(A_SIZE, np.uint32)
        if t == 0:
            mbarrier_init(full, u32(1))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect_tx(full, u32(FULL_AT))
            for i in range(DEPTH // 64):
                cp_async_bulk_tensor_load(smem + u32(8192 * i), a, full, 64 * i, 0, 0, 0)
                part = smem + u32(B_AT + 128 * n * i)
                cp_async_bulk_tensor_load(part, b, full, 64 * i, 0, 0, 0)
            cp_async_bulk_tensor_load(smem + u32(AT_AT), at, full, 0, 0, 0, 0)
            for i in range(SUBTILES):
                part = smem + u32(BT_AT + 128 * DEPTH * i)
                cp_async_bulk_tensor_load(part, bt, full, 64 * i, 0, 0, 0)
        mbarrier_wait(full, u32(0))
        a_k, a_mn = descriptor(K_MAJOR, smem), descriptor(MN_MAJOR, smem + u32(AT_AT))
        b_k = descriptor(K_MAJOR, smem + u32(B_AT))
        b_mn = descriptor(MN_MAJOR, smem + u32(BT_AT))

        def end():
            wgmma_commit_group()
            wait(d)

        for i in range(SIZE):
            d[i] = start[t, i]
        for i in range(A_SIZE):
            x[i] = a_frag[t, i]
        product = cuda.blockIdx.x
        if product == 0:
            fence(d, x)  # beside the product, or ptxas adds another (C7519)
            ss(d, a_k, b_k)
            end()
        elif product == 1:
            fence(d, x)
            ss_b(d, a_k, b_mn)
            end()
        elif product == 2:
            fence(d, x)
            ss_ab(d, a_mn, b_mn)
            end()
        elif product == 3:
            fence(d, x)
            ss_a(d, a_mn, b_k)
            end()
        elif product == 4:
            fence(d, x)
            rs_b(d, x, b_mn)
            end()
        elif product == 5:
            fence(d, x)
            rs(d, x, b_k)
            end()
        else:
            fence(d, x)
            ss_add(d, a_k, b_mn)
            end()
        for i in range(SIZE):
            out[product, t, i] = d[i]

    def operands(rng):
        a = random_halves(rng, (64, DEPTH), dtype, integers)
        b = random_halves(rng, (n, DEPTH), dtype, integers)
        start = rng.integers(-8, 9, (128, SIZE)).astype(f32)
        maps = [TensorMap(x[None, :, None].view(np.float16), len(x)) for x in (a, b)]
        maps += [TensorMap(x.T.copy()[None, :, None].view(np.float16), DEPTH) for x in (a, b)]
        return [*maps, a_fragment(a[:, : 16 * STEPS]), start, np.zeros((7, 128, SIZE), f32)]

    def agree(got, expected):
        # Standard normal operands: the sum of the magnitudes of DEPTH products is about 0.64 DEPTH.
        bound = 0 if integers else DEPTH * 2.0**-23 * DEPTH
        return np.abs(got - expected) <= bound

    kinds = [types.uint64] * 4 + [words(2), floats(2), floats(3)]
    name = f"wgmma {n} {dtype}"
    kernel = kernel_of(name, kernel, kinds, 128, FULL_AT + 1024, "a")
    machine = {"HGMMA": 5 * STEPS_SS + 2 * STEPS, "WARPGROUP.DEPBAR": 7}
    return Case(kernel, operands, {6: agree}, machine, 7)


# Parts of a number, columns of A that each part has, columns of the product.
PARTS, PART_DEPTH, PARTS_SIZES = 3, 64, (64, 128)


def make_wgmma_parts(n, integers):
    """Products of float32 in parts: every pair of a part of A, from registers, and a part of B.

    Parts are columns of A (64, 192) and B (n, 192). All steps at once; or those of the first half
    of each part, then the others, added: before these are waited for, 4 KB of B of the first are
    cleared. Twice, so that an accumulator that is written over, and not added to, holds something.
    Sums are exact, or as far off, as in `make_wgmma`.
    """
    SIZE, STEPS, K = n // 2, PART_DEPTH // 16, PARTS * PART_DEPTH
    A_SIZE, FULL_AT = 4 * PARTS * STEPS, 2 * n * K
    B_MN, PAIRS = u64(descriptor_constant(128 * K)), factors(PARTS)

    def of(steps, add):
        a_steps = tuple(STEPS * i + k for i, _ in PAIRS for k in steps)
        b_steps = tuple(mn_major(STEPS * j + k) for _, j in PAIRS for k in steps)
        return wgmma_rs(n, "bfloat16", b_steps, a_steps=a_steps, add=add)

    whole = of(range(STEPS), False)
    first, second = of(range(STEPS // 2), False), of(range(STEPS // 2, STEPS), True)
    fence = wgmma_fence_of(0, A_SIZE)
    wait, wait_first = wgmma_wait_group(0, SIZE), wgmma_wait_group(1, 0)

    def kernel(b, a_frag, turns, out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        full = smem + u32(FULL_AT)
        d = cuda.local.array(SIZE, np.float32)
        acc = cuda.local.array(SIZE, np.float32)
        x = cuda.local.array(A_SIZE, np.uint32)
        if t == 0:
            mbarrier_init(full, u32(1))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t == 0:
            mbarrier_arrive_expect_tx(full, u32(FULL_AT))
            for i in range(n // 64):
                part = smem + u32(128 * K * i)
                cp_async_bulk_tensor_load(part, b, full, 64 * i, 0, 0, 0)
        mbarrier_wait(full, u32(0))
        b_mn = descriptor(B_MN, smem)
        for i in range(SIZE):
            acc[i] = f32(0)
        for i in range(A_SIZE):
            x[i] = a_frag[t, i]
        product = cuda.blockIdx.x
        if product == 0:
            for _ in range(turns):
                fence(x)
                whole(d, x, b_mn)
                wgmma_commit_group()
                wait(d)
                for i in range(SIZE):
                    acc[i] += d[i]
        else:
            for _ in range(turns):
                fence(x)
                first(d, x, b_mn)
                wgmma_commit_group()
                second(d, x, b_mn)
                wgmma_commit_group()
                wait_first(d)
                cuda.syncthreads()
                for i in range(8):
                    st_shared_u32(smem + u32(4 * t + 512 * i), u32(0))
                fence_proxy_async()
                wait(d)
                cuda.syncthreads()
                for i in range(SIZE):
                    acc[i] += d[i]
        for i in range(SIZE):
            out[product, t, i] = acc[i]

    def operands(rng):
        a, b = (random_halves(rng, (rows, K), "bfloat16", integers) for rows in (64, n))
        b_map = TensorMap(b.T.copy()[None, :, None].view(np.float16), K)
        return [b_map, a_fragment(a), 2, np.zeros((2, 128, SIZE), f32)]

    def agree(got, expected):
        terms = 2 * PART_DEPTH * len(PAIRS)
        return np.abs(got - expected) <= (0 if integers else terms * 2.0**-23 * terms)

    kinds = [types.uint64, words(2), types.int32, floats(3)]
    kernel = kernel_of(f"wgmma parts {n}", kernel, kinds, 128, FULL_AT + 1024, "a")
    machine = {"HGMMA": 2 * len(PAIRS) * STEPS, "WARPGROUP.DEPBAR": 3, "WARPGROUP.ARRIVE": 2}
    return Case(kernel, operands, {3: agree}, machine, 2)


def random_halves(rng, shape, dtype, integers):
    x = rng.integers(-8, 9, shape) if integers else rng.standard_normal(shape)
    return x.astype(HALF[dtype])


def a_fragment(a):
    """The registers of A (64, 16 k), (128, 4 k): of each step the order of the PTX ISA's figure.

    Thread 4 g + c of warp w has the pairs of columns (2 c, 2 c + 1) and 8 further, of rows
    16 w + g and 8 further; rows change first.
    """
    w, g, column_8, step = 4, 8, 2, a.shape[1] // 16
    parts = a.view(np.uint16).reshape(w, 2, g, step, column_8, 4, 2)  # w row_8 g step col_8 c half
    parts = parts.transpose(0, 2, 5, 3, 4, 1, 6)  # w g c step col_8 row_8 half
    return np.ascontiguousarray(parts).view(u32).reshape(128, 4 * step)


# --- mma.py ---------------------------------------------------------------------------------------

# Columns of the product and of A, by how many tiles of 16 rows a warp has: parts of sub-tiles of 64
# columns in both. `mma_rs` takes the first columns of A, in MMA_STEPS steps of 16.
MMA_SIZES = {1: (144, 160), 2: (80, 96)}
MMA_STEPS = 5
MMA_FORMS = {
    "1-float16": (1, "float16", False),
    "1-bfloat16": (1, "bfloat16", False),
    "2-float16": (2, "float16", False),
    "2-bfloat16": (2, "bfloat16", False),
    "turing": (2, "float16", True),
}


@inlined
def load_image(tile, image):
    """A `tile_image` to shared memory."""
    x = cuda.local.array(4, np.uint32)
    for i in range(i32(cuda.threadIdx.x), i32(image.shape[0]), i32(cuda.blockDim.x)):
        for j in range(4):
            x[j] = image[i, j]
        st_shared_v4_u32(tile + u32(16 * i), x)


def make_mma(tiles, dtype, integers, turing):
    """Every one of PRODUCTS, from arrays A (64, k), B (n, k) and their transposes.

    By as many warps as have 64 rows. Sums are exact, or as far off, as in `make_wgmma`.
    """
    n, k = MMA_SIZES[tiles]
    THREADS, WARP_ROWS = 128 // tiles, 16 * tiles
    SIZE, A_SIZE = tiles * n // 2, 4 * tiles * MMA_STEPS
    tile_bytes = lambda rows, columns: 128 * rows * -(-columns // 64)
    B_AT = max(tile_bytes(64, k), tile_bytes(k, 64))
    SHARED = B_AT + max(tile_bytes(n, k), tile_bytes(k, n))
    of = lambda a_mn, b_mn, add=False: mma_ss(
        tiles, n, k, dtype, k if a_mn else 64, k if b_mn else n, a_mn, b_mn, add, turing
    )
    ss, ss_b, ss_ab, ss_a = of(False, False), of(False, True), of(True, True), of(True, False)
    ss_add = of(False, True, add=True)
    rs_b = mma_rs(tiles, n, 16 * MMA_STEPS, dtype, k, turing=turing)
    rs = mma_rs(tiles, n, 16 * MMA_STEPS, dtype, n, b_mn_major=False, turing=turing)

    def kernel(a, b, at, bt, a_frag, start, out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        d = cuda.local.array(SIZE, np.float32)
        x = cuda.local.array(A_SIZE, np.uint32)
        row0 = u32(t // 32 * WARP_ROWS)
        product = i32(cuda.blockIdx.x)
        if product == 2 or product == 3:
            load_image(smem, at)
        else:
            load_image(smem, a)
        if product == 0 or product == 3 or product == 5:
            load_image(smem + u32(B_AT), b)
        else:
            load_image(smem + u32(B_AT), bt)
        cuda.syncthreads()
        a_k, a_mn = first_rows(smem + u32(128) * row0), first_columns(smem) ^ u32(2) * row0
        b_k, b_mn = first_columns(smem + u32(B_AT)), first_rows(smem + u32(B_AT))
        for i in range(SIZE):
            d[i] = start[t, i]
        for i in range(A_SIZE):
            x[i] = a_frag[t, i]
        if product == 0:
            ss(d, a_k, b_k)
        elif product == 1:
            ss_b(d, a_k, b_mn)
        elif product == 2:
            ss_ab(d, a_mn, b_mn)
        elif product == 3:
            ss_a(d, a_mn, b_k)
        elif product == 4:
            rs_b(d, x, b_mn)
        elif product == 5:
            rs(d, x, b_k)
        else:
            ss_add(d, a_k, b_mn)
        for i in range(SIZE):
            out[product, t, i] = d[i]

    def operands(rng):
        a, b = (random_halves(rng, (rows, k), dtype, integers) for rows in (64, n))
        images = [tile_image(x) for x in (a, b, a.T, b.T)]
        a_frag = of_warps(a_fragment(a[:, : 16 * MMA_STEPS]), tiles)
        start = rng.integers(-8, 9, (THREADS, SIZE)).astype(f32)
        return [*images, a_frag, start, np.zeros((7, THREADS, SIZE), f32)]

    def agree(got, expected):
        bound = 0 if integers else k * 2.0**-23 * k
        return np.abs(got - expected) <= bound

    kinds = [words(2)] * 5 + [floats(2), floats(3)]
    name = f"mma {tiles} {dtype} {turing}"
    kernel = kernel_of(name, kernel, kinds, THREADS, SHARED)
    steps = 5 * k // 16 + 2 * MMA_STEPS
    loads = steps * n // 16 + 5 * k // 16 * tiles
    machine = {"HMMA": steps * n // 8 * tiles * (1 + turing), "LDSM": loads}
    return Case(kernel, operands, {6: agree}, machine, 7)


def tile_image(x):
    """A matrix as it lies in shared memory, by 16 bytes: (-1, 4) words.

    Sub-tiles of 128 bytes a row, swizzled; the last is filled up with NaN.
    """
    (rows, columns), width = x.shape, ROW // x.itemsize
    bits = np.full((rows, -(-columns // width) * width), -1, f"i{x.itemsize}")
    bits[:, :columns] = x.view(bits.dtype)
    tiles = bits.reshape(rows, -1, width).swapaxes(0, 1).reshape(-1, 16 // x.itemsize)
    image = np.empty_like(tiles)
    image[swizzle128(16 * np.arange(len(tiles))) // 16] = tiles
    return image.view(u32)


def of_warps(fragments, tiles):
    """Fragments (128, i) of four tiles of 16 rows, where a warp has `tiles` of them."""
    parts = fragments.reshape(4 // tiles, tiles, 32, -1).swapaxes(1, 2)
    return np.ascontiguousarray(parts.reshape(128 // tiles, -1))


# --- mma_tf32.py ----------------------------------------------------------------------------------

# (tiles of 16 rows of a warp, columns of the product, of A, how many products make one). A and wide
# products have several sub-tiles of 32 columns, the last not full. `tf32_rs` takes A's first ones.
TF32_FORMS = {
    "narrow-1": (1, 32, 72, 3),
    "narrow-2": (2, 16, 40, 1),
    "wide-1": (1, 80, 40, 1),
    "wide-2": (2, 48, 40, 3),
}
TF32_STEPS = 5  # of 8
HUGE, MINUTE = (5, 1e30), (26, 1e-30)  # rows of A and what they are multiplied by


def tf32_factors(form, rng, integers):
    """A (64, k) and B (n, k); with three products not only of numbers near 1."""
    _, n, k, products = TF32_FORMS[form]
    if integers:
        return [rng.integers(-8, 9, (rows, k)).astype(f32) for rows in (64, n)]
    a, b = (rng.standard_normal((rows, k)).astype(f32) for rows in (64, n))
    return [(a * tf32_scale(products)).astype(f32), b]


def tf32_scale(products):
    """How large the numbers of a row are, (64, 1)."""
    scale = np.ones((64, 1))
    for row, x in (HUGE, MINUTE) * (products == 3):
        scale[row] = x
    return scale


def tf32_depth(form):
    """Of each result of the kernels of `make_tf32`: columns of A, and what is missing as factor."""
    _, _, k, _ = TF32_FORMS[form]
    return [k] * 4 + [8 * TF32_STEPS], [4] * 4 + [2]


def tf32_arguments(form, a, b, start):
    """What such a kernel takes: A and B in shared memory, A in registers, results."""
    tiles = TF32_FORMS[form][0]
    in_order = lambda x: x.reshape(len(x), -1, 8)[:, :, ORDER].reshape(x.shape)
    images = [tile_image(x) for x in (a, b, in_order(a), in_order(a.T.copy()), b.T)]
    a_frag = of_warps(a[accumulator(8 * TF32_STEPS)], tiles)
    return [*images, a_frag, start, np.zeros((5, *start.shape), f32)]


def make_tf32(form, integers):
    """Both in the order of their columns; B, then both MN-major; that added; A in registers.

    With small integers all sums are exact. Otherwise as in `make_wgmma`, where a sum has as many
    terms as products are made for it. Rows of huge and of minute numbers do not matter for others.
    """
    tiles, n, k, products = TF32_FORMS[form]
    THREADS, WARP_ROWS, SIZE, A_SIZE = (
        128 // tiles,
        16 * tiles,
        tiles * n // 2,
        4 * tiles * TF32_STEPS,
    )
    tile_bytes = lambda rows, columns: ROW * rows * -(-columns // 32)
    B_AT = max(tile_bytes(64, k), tile_bytes(k, 64))
    SHARED = B_AT + max(tile_bytes(n, k), tile_bytes(k, n))
    ss = tf32_ss(tiles, n, k, products, 64, n)
    ss_b = tf32_ss(tiles, n, k, products, 64, k, b_mn_major=True)
    ss_ab = tf32_ss(tiles, n, k, products, k, k, True, True)
    ss_add = tf32_ss(tiles, n, k, products, 64, k, b_mn_major=True, add=True)
    rs = tf32_rs(tiles, n, 8 * TF32_STEPS, products, k)

    def kernel(a, b, a_in_order, at_in_order, bt, a_frag, start, out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x)
        d = cuda.local.array(SIZE, np.float32)
        x = cuda.local.array(A_SIZE, np.float32)
        row0 = t // 32 * WARP_ROWS
        product = i32(cuda.blockIdx.x)
        if product == 0:
            load_image(smem, a)
            load_image(smem + u32(B_AT), b)
        else:
            load_image(smem + u32(B_AT), bt)
            if product == 2:
                load_image(smem, at_in_order)
            else:
                load_image(smem, a_in_order)
        cuda.syncthreads()
        a_k = first_rows(smem + u32(128 * row0))
        a_mn = pairs_in_order(smem + u32(128 * k * (row0 // 32) + 4 * (row0 % 32)))
        b_k, b_mn = first_columns(smem + u32(B_AT)), pairs(smem + u32(B_AT))
        for i in range(SIZE):
            d[i] = start[t, i]
        for i in range(A_SIZE):
            x[i] = a_frag[t, i]
        if product == 0:
            ss(d, a_k, b_k)
        elif product == 1:
            ss_b(d, a_k, b_mn)
        elif product == 2:
            ss_ab(d, a_mn, b_mn)
        elif product == 3:
            ss_add(d, a_k, b_mn)
        else:
            rs(d, x, b_mn)
        for i in range(SIZE):
            out[product, t, i] = d[i]

    def operands(rng):
        a, b = tf32_factors(form, rng, integers)
        start = rng.integers(-8, 9, (THREADS, SIZE)).astype(f32)
        return tf32_arguments(form, a, b, start)

    depth, missing = (np.array(x)[:, None, None] for x in tf32_depth(form))
    scale = of_warps(np.broadcast_to(tf32_scale(products), (64, n))[accumulator(n)], tiles)

    def agree(got, expected):
        got, expected = got.astype(np.float64), expected.astype(np.float64)
        sums = products * depth * 2.0**-23 * depth / missing * scale
        bound = 0 if integers else sums + 2.0**-23 * np.abs(expected)  # that of `start` + sum
        return np.abs(got - expected) <= bound

    kinds = [words(2)] * 5 + [floats(2), floats(2), floats(3)]
    kernel = kernel_of(f"tf32 {form}", kernel, kinds, THREADS, SHARED)
    steps, rs_steps = k // 8, TF32_STEPS
    machine = {
        "HMMA": (4 * steps + rs_steps) * n // 8 * tiles * products,
        "LDSM": steps * (3 * tiles + n // 16),
        "LDS": 4 * (steps * (3 * n // 16 + tiles) + rs_steps * n // 16),
    }
    return Case(kernel, operands, {7: agree}, machine, 5)


# --- all together ---------------------------------------------------------------------------------

TILES = 5


def make_pipeline(broken=""):
    """o_i = half(a_i b_i^T) b_i for tiles of 64 x 64: TMA, two products in flight, stmatrix, TMA.

    A warp loads through a ring of two slots, a warpgroup multiplies; p_i b_i and a_i+1 b_i+1^T are
    in flight together. `broken` names a step to leave out or to do wrong, for tests of the tests.
    """
    SLOTS, TILE = 2, 64 * 128
    O_AT, EVENTS_AT = 2 * SLOTS * TILE, (2 * SLOTS + 1) * TILE
    FULL, EMPTY = u32(EVENTS_AT), u32(EVENTS_AT + 8 * SLOTS)
    event, wait, wait_before, arrive = ring(SLOTS)
    CONSTANT = descriptor_constant(leading=TILE)
    a_steps, mn_steps = tuple(k_major(64, k) for k in range(4)), tuple(map(mn_major, range(4)))
    b_steps = tuple(16 * k for k in range(4)) if broken == "descriptor step" else a_steps
    gemm_s, gemm_o = wgmma_ss(64, "float16", a_steps, b_steps), wgmma_rs(64, "float16", mn_steps)
    fence, zero_o = wgmma_fence_of(32, 16), zero(32)
    wait_s_alone, wait_s, wait_o = (wgmma_wait_group(n, 32) for n in (0, 1, 0))
    BYTES = {"too many bytes": 3 * TILE, "too few bytes": TILE}.get(broken, 2 * TILE)
    PARITY = u32(broken == "parity")
    keep = lambda step: broken != step
    WAIT_FULL, WAIT_EMPTY, RELEASE = keep("wait full"), keep("wait empty"), keep("release")
    FENCE, COMMIT, WAIT_S, WAIT_O = map(keep, ("wgmma fence", "commit", "wait s", "wait o"))
    WAIT_READ, WAIT_STORE = keep("wait read"), keep("wait store")
    PUBLISH, MEET = keep("proxy fence"), keep("barrier")
    EARLY_RELEASE = broken == "early release"
    SWIZZLE_SHIFT = 4 if broken == "swizzle" else 3

    @cuda.jit(device=True, forceinline=True)
    def descriptor(address):
        return u64(CONSTANT) | u64((address >> u32(4)) & u32(0x3FFF))

    @cuda.jit(device=True, forceinline=True)
    def slot(smem, n):
        return smem + n % u32(SLOTS) * u32(2 * TILE)

    def kernel(a_map, b_map, o_map, tiles):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        t = i32(cuda.threadIdx.x) - i32(128)

        def load():
            for n in range(tiles):
                if WAIT_EMPTY:
                    wait_before(smem, EMPTY, u32(n))
                there, at = event(smem, FULL, u32(n)), slot(smem, u32(n))
                mbarrier_arrive_expect_tx(there, u32(BYTES))
                cp_async_bulk_tensor_load(at, a_map, there, 0, 64 * n, 0, 0)
                cp_async_bulk_tensor_load(at + u32(TILE), b_map, there, 0, 64 * n, 0, 0)

        def consume():
            s = cuda.local.array(32, np.float32)
            o = cuda.local.array(32, np.float32)
            p = cuda.local.array(16, np.uint32)

            def wait_tiles(n):
                if WAIT_FULL:
                    wait(smem, FULL, u32(n) ^ PARITY * u32(SLOTS))

            def issue_s(n):
                at = slot(smem, u32(n))
                gemm_s(s, descriptor(at), descriptor(at + u32(TILE)))
                if COMMIT:
                    wgmma_commit_group()
                if EARLY_RELEASE and t == 0:
                    arrive(smem, EMPTY, u32(n))

            def issue_o(n):
                gemm_o(o, p, descriptor(slot(smem, u32(n)) + u32(TILE)))
                wgmma_commit_group()

            def to_p():
                for i in range(16):
                    p[i] = cvt_f16x2(s[2 * i], s[2 * i + 1])

            def finish(n):
                if WAIT_O:
                    wait_o(o)
                if RELEASE and not EARLY_RELEASE and t == 0:
                    arrive(smem, EMPTY, u32(n))
                if WAIT_READ and t == 0:
                    cp_async_bulk_wait_group_read()
                bar_sync(u32(1), u32(128))
                for i in range(4):
                    at = 128 * (t // 32 * 16 + t % 16) + 32 * i + 16 * (t % 32 // 16)
                    at = at ^ (at >> SWIZZLE_SHIFT & 0x70)
                    stmatrix_x4(
                        smem + u32(O_AT + at),
                        cvt_f16x2(o[8 * i], o[8 * i + 1]),
                        cvt_f16x2(o[8 * i + 2], o[8 * i + 3]),
                        cvt_f16x2(o[8 * i + 4], o[8 * i + 5]),
                        cvt_f16x2(o[8 * i + 6], o[8 * i + 7]),
                    )
                if PUBLISH:
                    fence_proxy_async()
                if MEET:
                    bar_sync(u32(1), u32(128))
                if t == 0:
                    cp_async_bulk_tensor_store(o_map, smem + u32(O_AT), 0, 64 * n, 0, 0)
                    cp_async_bulk_commit_group()
                zero_o(o)

            zero_o(o)
            for i in range(16):
                p[i] = u32(0)
            wait_tiles(0)
            wgmma_fence()
            issue_s(0)
            wait_s_alone(s)
            to_p()
            for n in range(1, tiles):
                wait_tiles(n)
                if FENCE:
                    fence(o, p)
                issue_s(n)
                issue_o(n - 1)
                if WAIT_S:
                    wait_s(s)
                for i in range(32):
                    s[i] = -s[i]
                finish(n - 1)
                to_p()
            fence(o, p)
            issue_o(tiles - 1)
            finish(tiles - 1)
            if WAIT_STORE and t == 0:
                cp_async_bulk_wait_group()

        if cuda.threadIdx.x == 0:
            for i in range(SLOTS):
                mbarrier_init(event(smem, FULL, u32(i)), u32(1))
                mbarrier_init(event(smem, EMPTY, u32(i)), u32(1))
            fence_mbarrier_init()
        cuda.syncthreads()
        if t < 0:
            if cuda.threadIdx.x == 0:
                load()
        else:
            consume()

    def operands(rng):
        a, b = rng.integers(-2, 3, (2, 64 * TILES, 64)).astype(np.float16)
        o = np.zeros_like(a)
        return [*(TensorMap(x[None, :, None], 64) for x in (a, b, o)), TILES]

    kinds = [types.uint64] * 3 + [types.int32]
    kernel = kernel_of("pipeline", kernel, kinds, 256, EVENTS_AT + 1024, "a")
    machine = {"HGMMA": 16, "WARPGROUP.DEPBAR": 4, "WARPGROUP.ARRIVE": 3, "FENCE": 2, "STSM": 8}
    return Case(kernel, operands, {2: exact}, machine)


def pipeline_result(a, b):
    """What the pipeline stores: the first tile's scores as they are, the others' negated."""
    a, b = (x.astype(f32).reshape(TILES, 64, 64) for x in (a, b))
    sign = np.array([1] + [-1] * (TILES - 1), f32)[:, None, None]
    p = (sign * (a @ b.transpose(0, 2, 1))).astype(np.float16).astype(f32)
    return (p @ b).astype(np.float16).reshape(-1, 64)


@cache
def cases():
    """All of them by name."""
    products = {
        f"wgmma-{n}-{dtype}-{kind}": make_wgmma(n, dtype, kind == "integers")
        for n in SIZES
        for dtype in HALF
        for kind in ("integers", "normal")
    }
    for n in PARTS_SIZES:
        for kind in ("integers", "normal"):
            products[f"wgmma-parts-{n}-{kind}"] = make_wgmma_parts(n, kind == "integers")
    for form, (tiles, dtype, turing) in MMA_FORMS.items():
        for kind in ("integers", "normal"):
            products[f"mma-{form}-{kind}"] = make_mma(tiles, dtype, kind == "integers", turing)
    for form in TF32_FORMS:
        for kind in ("integers", "normal"):
            products[f"mma-tf32-{form}-{kind}"] = make_tf32(form, kind == "integers")
    return {
        "thread": make_thread(),
        "thread-turing": make_thread(turing=True),
        "shared": make_shared(),
        "stmatrix": make_stmatrix(),
        "rows": make_rows(),
        "fragment": make_fragment(),
        "cp_async": make_cp_async(),
        "barriers": make_barriers(),
        "tma": make_tma(),
        "bulk": make_bulk(),
        "red": make_red(),
        **products,
        "pipeline": make_pipeline(),
    }
