"""Kernels that break a rule of the machine: each is stopped, or reads NaN, in the simulator.

Asynchronous instructions act as late as the machine allows, and what they have yet to write is NaN.
The last section plants bugs in a whole pipeline of TMA, wgmma and stmatrix.
"""

import numpy as np
import pytest
from numba import cuda
from ptx_cases import make_pipeline, pipeline_result, simulate_function

from flashnumba import simulate
from flashnumba.ptx.barrier import (
    bar_sync,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
)
from flashnumba.ptx.cp_async import cp_async_commit_group, cp_async_row, cp_async_wait_group
from flashnumba.ptx.layout import descriptor_constant, k_major
from flashnumba.ptx.memory import ld_global_row, st_global_row
from flashnumba.ptx.mma import mma_rs, mma_ss
from flashnumba.ptx.mma_tf32 import tf32_rs, tf32_ss
from flashnumba.ptx.shared import (
    BASE,
    cvta_to_shared,
    fence_proxy_async,
    ld_shared_u16,
    ld_shared_u32,
    ld_shared_v4_u32,
    st_shared_f32,
    st_shared_u16,
    st_shared_u32,
    st_shared_v4_u32,
    stmatrix_x4,
)
from flashnumba.ptx.tma import (
    cp_async_bulk_commit_group,
    cp_async_bulk_tensor_load,
    cp_async_bulk_tensor_store,
    cp_async_bulk_wait_group,
)
from flashnumba.ptx.wgmma import (
    wgmma_commit_group,
    wgmma_fence,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait_group,
)
from flashnumba.simulate import Deadlock, SimulatorError
from flashnumba.tensormap import TensorMap

u32, u64, f32 = np.uint32, np.uint64, np.float32
SEEDS = [None, 0, 1]


def stops(kernel, *arguments, match, error=SimulatorError, **options):
    with pytest.raises(error, match=match):
        simulate_function(kernel, *arguments, **options)


def nothing():
    return np.zeros(1, np.int64)


# --- shared memory --------------------------------------------------------------------------------


ACCESSES = {
    "ld u32": (ld_shared_u32, 4),
    "ld u16": (ld_shared_u16, 2),
    "ld v4": (lambda a: ld_shared_v4_u32(cuda.local.array(4, np.uint32), a), 16),
    "st u32": (lambda a: st_shared_u32(a, u32(0)), 4),
    "st u16": (lambda a: st_shared_u16(a, u32(0)), 2),
    "st f32": (lambda a: st_shared_f32(a, f32(0)), 4),
    "st v4": (lambda a: st_shared_v4_u32(a, cuda.local.array(4, np.uint32)), 16),
    "stmatrix": (lambda a: stmatrix_x4(a, u32(0), u32(0), u32(0), u32(0)), 16),
}


@pytest.mark.parametrize("access, size", ACCESSES.values(), ids=ACCESSES)
def test_addresses_must_be_inside_and_aligned(access, size):
    """The first and the last place are right; those beside them, and between, are not."""

    def kernel(at):
        access(u32(at))

    access = access if hasattr(access, "simulated") else cuda.jit(device=True)(access)
    for at in (BASE, BASE + 1024 - size):
        simulate_function(kernel, at, shared=1024)
    for at in (0, BASE - size, BASE + 1024, BASE + 4096):
        stops(kernel, at, shared=1024, match="of 1024 bytes of shared memory")
    for at in (BASE + size // 2, BASE + 1024 - size // 2):
        stops(kernel, at, shared=2048, match="not aligned")


def storing(fence, writer=0, fencer=0):
    """Thread `writer` stores to a tile that TMA stores then; thread `fencer` fences it."""

    def kernel(x):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        t = cuda.threadIdx.x
        if fence == "before" and t == fencer:
            fence_proxy_async()
        if t == writer:
            st_shared_u32(smem + u32(512), u32(7))
        cuda.syncthreads()
        if fence == "after" and t == fencer:
            fence_proxy_async()
        cuda.syncthreads()
        if t == 0:
            cp_async_bulk_tensor_store(x, smem, 0, 0, 0, 0)
            cp_async_bulk_commit_group()
            cp_async_bulk_wait_group()

    return kernel


def test_stores_need_a_fence_of_their_own_thread_before_tma_reads():
    """No fence, one before the store, or one of another thread does not do."""
    x = ones()
    simulate_function(storing("after"), x)
    simulate_function(storing("after", 5, 5), x)
    message = "thread {} wrote shared memory that is read asynchronously without fence_proxy_async"
    stops(storing(""), x, match=message.format(0))
    stops(storing("before"), x, match=message.format(0))
    stops(storing("after", 5, 0), x, match=message.format(5))


# --- rows of global memory ------------------------------------------------------------------------

WAIT_COPIES, WAIT_OLDER = cp_async_wait_group(0), cp_async_wait_group(1)


def moving(how, target=BASE):
    """One thread moves the first 16 bytes, and those from 128 on, of a row of a 2-D array."""
    start, load, store = cp_async_row(2, 16), ld_global_row(2), st_global_row(2)

    def kernel(x, row, pitch, inside, width):
        bits = cuda.local.array(8, np.uint32)
        if how == "cp_async":
            start(u32(target), x, row, pitch, u32(inside), width)
            cp_async_commit_group()
            WAIT_COPIES()
        elif how == "ld":
            load(bits, x, row, pitch, u32(inside), width)
        else:
            store(x, row, pitch, width, bits)

    return kernel


@pytest.mark.parametrize("how", ["cp_async", "ld", "st"])
def test_rows_must_be_in_their_array_and_aligned(how):
    """Each 16 bytes that are moved; those past the width are not, nor all if it says so."""
    x = np.zeros((8, 96), np.uint16)
    odd = np.zeros((8, 81), np.uint16)
    kernel = moving(how)

    def right(x, row, inside, width):
        simulate_function(kernel, x, row, x.strides[0], inside, width, threads=1)

    def wrong(x, row, match, pitch=None):
        stops(kernel, x, row, pitch or x.strides[0], 16, 144, match=match, threads=1)

    for row in (0, 7):
        right(x[:, :72], row, 16, 144)
    for row in (-1, 8):
        wrong(x, row, f"row {row}, 16 bytes from 0, are not in x.shape")
        right(x, row, 16, 0)
        if how != "st":
            right(x, row, 0, 144)
    right(x[:, :71], 0, 16, 128)
    wrong(x[:, :71], 0, "16 bytes from 128, are not in x.shape")
    wrong(x, 1, "rows 144 bytes apart", pitch=144)
    right(odd, 0, 16, 144)
    for misplaced, row in [(odd, 1), (x[:, 4:], 0), (np.zeros((8, 192), np.uint16)[:, ::2], 0)]:
        wrong(misplaced, row, "not 16 neighbouring bytes at a multiple of 16")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_is_nan_until_its_own_thread_waits(seed):
    """Whatever was there before; a barrier does not help, nor does another thread's wait."""
    start = cp_async_row(1, 16)

    def kernel(x, out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        t = cuda.threadIdx.x
        mine, other = smem + u32(16 * t), smem + u32(16 * (63 - t))
        st_shared_u32(mine, u32(7))
        start(mine, x, t, 16, u32(16), 16)
        cp_async_commit_group()
        out[0, t] = ld_shared_u32(mine)
        if t < 32:
            WAIT_COPIES()
        cuda.syncthreads()
        out[1, t] = ld_shared_u32(other)
        cuda.syncthreads()
        WAIT_COPIES()
        cuda.syncthreads()
        out[2, t] = ld_shared_u32(other)

    x, out = np.arange(512).astype(np.uint16).reshape(64, 8), np.zeros((3, 64), u32)
    simulate_function(kernel, x, out, threads=64, seed=seed)
    there, poison = x.view(u32)[::-1, 0], u32(0xFFFFFFFF)
    assert (out[0] == poison).all()
    np.testing.assert_array_equal(out[1], np.where(np.arange(64) < 32, poison, there))
    np.testing.assert_array_equal(out[2], there)


def test_a_block_must_not_end_with_copies_of_threads_in_flight():
    """Not committed, not waited for, or among the newest groups that a wait leaves."""
    start = cp_async_row(1, 16)

    def kernel(x, commits, wait):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        start(smem, x, 0, 16, u32(16), 16)
        for _ in range(commits):
            cp_async_commit_group()
        if wait == 0:
            WAIT_COPIES()
        if wait == 1:
            WAIT_OLDER()

    x, never = np.zeros((1, 8), np.uint16), 2
    for commits, wait in [(0, never), (0, 0), (1, never), (1, 1), (2, never)]:
        text = "ended with 1 copies by cp_async in flight"
        stops(kernel, x, commits, wait, match=text, threads=1)
    for commits, wait in [(1, 0), (2, 1), (3, 0)]:  # an empty group counts
        simulate_function(kernel, x, commits, wait, threads=1)


@pytest.mark.parametrize(
    "target, text",
    [
        (BASE + 8, "not aligned"),
        (BASE - 16, "of 1024 bytes of shared memory"),
        (BASE + 1008, "of 1024 bytes of shared memory"),  # its second part
    ],
)
def test_copies_must_go_to_their_place(target, text):
    """In shared memory at multiples of 16 bytes, also for zeros."""
    x = np.zeros((1, 72), np.uint16)
    for inside in (0, 16):
        stops(moving("cp_async", target), x, 0, 144, inside, 144, match=text, threads=1)


# --- barriers -------------------------------------------------------------------------------------


def test_a_barrier_must_have_been_made():
    """To wait, to arrive, to announce bytes, or to be told of a load."""
    x = ones()

    def kernel(x, use):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        mbarrier_init(smem + u32(8) * u32(1 + cuda.threadIdx.x), u32(1))
        if use == 0:
            mbarrier_wait(smem, u32(0))
        if use == 1:
            mbarrier_arrive(smem)
        if use == 2:
            mbarrier_arrive_expect_tx(smem, u32(64))
        if use == 3:
            cp_async_bulk_tensor_load(smem, x, smem, 0, 0, 0, 0)

    for use in range(4):
        stops(kernel, x, use, match="there is no mbarrier at 1024: no mbarrier_init")


@pytest.mark.parametrize("at", [4, 8])
def test_a_barrier_is_made_once_and_aligned(at):
    """At a multiple of 8, where none is."""

    def kernel(at):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        mbarrier_init(smem + u32(8), u32(1))
        mbarrier_init(smem + u32(at), u32(1))

    stops(kernel, at, match="an mbarrier cannot be made at", threads=1)


def test_one_arrival_too_many():
    """The phase has all its arrivals and waits for bytes."""

    def kernel(out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        mbarrier_init(smem, u32(1))
        mbarrier_arrive_expect_tx(smem, u32(1024))
        mbarrier_arrive(smem)

    stops(kernel, nothing(), match="one arrival too many at the mbarrier 1024", threads=1)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_arrival_too_few(seed):
    """31 of 32 arrive, and all wait: the report names the barrier and the parity."""

    def kernel(out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        if cuda.threadIdx.x == 0:
            mbarrier_init(smem, u32(32))
        cuda.syncthreads()
        if cuda.threadIdx.x != 7:
            mbarrier_arrive(smem)
        mbarrier_wait(smem, u32(0))

    where = r"32 of 32 threads in mbarrier_wait\(1024, 0\)"
    stops(kernel, nothing(), match=where, error=Deadlock, seed=seed)


@pytest.mark.parametrize("announced", [1023, 1025, 2048])
def test_bytes_announced_must_be_the_bytes_that_come(announced):
    """A box of 8 rows is 1024 bytes."""

    def kernel(x, announced):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        full = smem + u32(1024)
        mbarrier_init(full, u32(1))
        mbarrier_arrive_expect_tx(full, u32(announced))
        cp_async_bulk_tensor_load(smem, x, full, 0, 0, 0, 0)
        mbarrier_wait(full, u32(0))

    x = ones()
    options = dict(error=Deadlock, threads=1, shared=2048)
    stops(kernel, x, announced, match="mbarrier_wait", **options)
    simulate_function(kernel, x, 1024, threads=1, shared=2048)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_numbered_barrier_counts_threads(seed):
    """64 are expected and 32 come."""

    def kernel(out):
        if cuda.threadIdx.x < 32:
            bar_sync(u32(3), u32(64))

    where = r"32 of 64 threads in bar_sync\(3\)"
    # The other warp ends first, so the 32 are all that is left.
    stops(kernel, nothing(), match=where, error=Deadlock, threads=64, seed=seed)


def registers(first, others):
    """384 threads with 168 registers each; the first warpgroup does `first`, two do `others`."""

    def kernel(out):
        if cuda.threadIdx.x < 128:
            first()
        else:
            others()

    return kernel


@pytest.mark.parametrize("seed", SEEDS)
def test_registers_that_nobody_gave_back_are_waited_for_in_vain(seed):
    """A block of 384 threads has 3 * 168 = 504: 40 + 2 * 240 is more, and so is 64 + 2 * 224.

    That the latter is no more than 65536 / 128 does not help: the difference is out of reach.
    """
    options = dict(threads=384, seed=seed)
    stops(registers(setmaxnreg_dec(64), setmaxnreg_inc(224)), nothing(), error=Deadlock,
          match=r"128 of .* in setmaxnreg_inc\(224\)", **options)  # fmt: skip
    dec, inc = setmaxnreg_dec(40), setmaxnreg_inc(240)
    stops(registers(dec, inc), nothing(), match=r"128 of .* in setmaxnreg_inc\(240\)",
          error=Deadlock, **options)  # fmt: skip
    simulate_function(registers(setmaxnreg_dec(24), inc), nothing(), **options)


def test_registers_are_given_back_downwards_and_taken_upwards():
    """And in multiples of 8."""
    dec, inc = setmaxnreg_dec(40), setmaxnreg_inc(168)
    for wrong, text in [
        (setmaxnreg_dec(176), "setmaxnreg_dec.176. from 168"),
        (setmaxnreg_inc(160), "setmaxnreg_inc.160. from 168"),
        (setmaxnreg_dec(44), "setmaxnreg_dec.44. from 168"),
        (setmaxnreg_inc(172), "setmaxnreg_inc.172. from 168"),
    ]:
        stops(registers(dec, wrong), nothing(), match=text, threads=384)
    simulate_function(registers(dec, inc), nothing(), threads=384)


# --- TMA ------------------------------------------------------------------------------------------


def loading(wait=True, target=BASE, head=0, batch=0):
    """Load a box of ones; out = a word of it, read with or without waiting."""

    def kernel(x, out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        full = smem + u32(4096)
        if cuda.threadIdx.x == 0:
            mbarrier_init(full, u32(1))
            mbarrier_arrive_expect_tx(full, u32(1024))
            cp_async_bulk_tensor_load(u32(target), x, full, 0, 0, head, batch)
        cuda.syncthreads()
        if wait:
            mbarrier_wait(full, u32(0))
        out[cuda.threadIdx.x] = ld_shared_u32(u32(target + 4 * cuda.threadIdx.x))
        mbarrier_wait(full, u32(0))

    return kernel


def ones(rows=8):
    return TensorMap(np.ones((1, rows, 1, 64), np.float16), rows)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_is_nan_until_it_is_waited_for(seed):
    """Every half of it, whatever was there before."""
    out = np.zeros(32, u32)
    simulate_function(loading(), ones(), out, shared=5120, seed=seed)
    assert (out.view(np.float16) == 1).all()
    simulate_function(loading(wait=False), ones(), out, shared=5120, seed=seed)
    assert np.isnan(out.view(np.float16)).all()


@pytest.mark.parametrize(
    "wrong, text",
    [
        (dict(target=BASE + 512), r"starts at 1536, not at k \* 1024"),
        (dict(target=BASE + 5120), "is outside of shared memory"),
        (dict(target=BASE + 4096, rows=16), "is outside of shared memory"),
        (dict(target=0), "is outside of shared memory"),
        (dict(head=1), "a box at head=1 batch=0 of an array"),
        (dict(head=-1), "a box at head=-1 batch=0 of an array"),
        (dict(batch=1), "a box at head=0 batch=1 of an array"),
    ],
)
def test_boxes_must_be_in_their_place(wrong, text):
    """In shared memory at multiples of 1024 bytes, in the array in a head that is there."""
    x = ones(wrong.pop("rows", 8))
    stops(loading(**wrong), x, np.zeros(32, u32), shared=5120, match=text)


def copying(direction):
    """One thread loads or stores the box of 8 rows at (column, row)."""

    def kernel(x, column, row):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        full = smem + u32(1024)
        if direction == "load":
            mbarrier_init(full, u32(1))
            mbarrier_arrive_expect_tx(full, u32(1024))
            cp_async_bulk_tensor_load(smem, x, full, column, row, 0, 0)
            mbarrier_wait(full, u32(0))
        else:
            cp_async_bulk_tensor_store(x, smem, column, row, 0, 0)
            cp_async_bulk_commit_group()
            cp_async_bulk_wait_group()

    return kernel


def of_50_by_72():
    return TensorMap(np.ones((1, 50, 1, 72), np.float16), 8)


ONE_THREAD = dict(threads=1, shared=2048)


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("column, row", [(0, 0), (8, 26), (64, 49), (72, 0), (0, 50), (104, 60)])
def test_boxes_may_reach_past_the_array(direction, column, row):
    """Or lie beyond it; rows are arbitrary."""
    simulate_function(copying(direction), of_50_by_72(), column, row, **ONE_THREAD)


@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize(
    "column, row", [(1, 0), (4, 0), (71, 49), (100, 10), (-1, 0), (-4, 0), (-63, -23)]
)
def test_boxes_start_at_multiples_of_16_bytes(direction, column, row):
    """Also where they begin outside the array."""
    text = f"a box at column={column}, not at a multiple of 8"
    stops(copying(direction), of_50_by_72(), column, row, match=text, **ONE_THREAD)


@pytest.mark.parametrize(
    "column, row, wrong",
    [
        (-8, 3, "column=-8"),
        (-64, 0, "column=-64"),
        (-200, -100, "column=-200"),
        (0, -5, "row=-5"),
        (0, -24, "row=-24"),
        (72, -1, "row=-1"),
    ],
)
def test_only_loads_start_before_the_array(column, row, wrong):
    """By rows or by columns, with a part in the array or without."""
    simulate_function(copying("load"), of_50_by_72(), column, row, **ONE_THREAD)
    text = f"a store to a box at {wrong}, before the array"
    stops(copying("store"), of_50_by_72(), column, row, match=text, **ONE_THREAD)


def test_a_block_must_not_end_with_copies_in_flight():
    """A load, a store that was not committed, one that was not waited for."""

    def kernel(x, what):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        if what == 0:
            mbarrier_init(smem, u32(1))
            cp_async_bulk_tensor_load(smem, x, smem, 0, 0, 0, 0)
        if what > 0:
            cp_async_bulk_tensor_store(x, smem, 0, 0, 0, 0)
        if what > 1:
            cp_async_bulk_commit_group()
        if what == 1 or what == 3:
            cp_async_bulk_wait_group()

    for what in range(3):
        stops(kernel, ones(), what, match="ended with copies in flight", threads=1)
    simulate_function(kernel, ones(), 3, threads=1)


@pytest.mark.parametrize("published", [False, True])
def test_the_source_of_a_store_must_stay_until_it_is_read(published):
    """Also if what is written over it is published."""

    def kernel(x, published):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        cp_async_bulk_tensor_store(x, smem, 0, 0, 0, 0)
        cp_async_bulk_commit_group()
        st_shared_u32(smem, u32(0))
        if published:
            fence_proxy_async()
        cp_async_bulk_wait_group()

    text = "written while a reader of it was in flight" if published else "fence_proxy_async"
    stops(kernel, ones(), published, match=text, threads=1)


# --- wgmma ----------------------------------------------------------------------------------------

FENCE, COMMIT, WAIT = wgmma_fence, wgmma_commit_group, wgmma_wait_group(0, 32)
STEPS = tuple(k_major(64, k) for k in range(2))
SS, RS = wgmma_ss(64, "float16", STEPS, STEPS), wgmma_rs(64, "float16", STEPS, b_mn_major=False)
ALL_ONES, TWOS = 0x3C003C00, 0x40004000  # two halves
B_AT = 64 * 128
SHARED = 2 * B_AT
START = descriptor_constant() | BASE >> 4


def product(*steps, threads=128, seed=None, a=START, b=START + (B_AT >> 4)):
    """A = B = 1 in shared memory and a register, then `steps`; the accumulators (threads, 2, 32).

    A step is an instruction, or a function of (thread, the accumulators d and e, the registers of
    A, the descriptors, shared memory).
    """
    issue_ss = lambda t, d, e, x, a, b, smem: SS(d, a, b)
    issue_rs = lambda t, d, e, x, a, b, smem: RS(d, x, b)
    wait_d = lambda t, d, e, x, a, b, smem: WAIT(d)
    steps = [{SS: issue_ss, RS: issue_rs, WAIT: wait_d}.get(step, step) for step in steps]
    steps = [s if hasattr(s, "simulated") else cuda.jit(device=True)(s) for s in steps]
    steps = [s.simulated if hasattr(s, "simulated") else simulate.as_python(s.py_func, {})
             for s in steps]  # fmt: skip
    instructions = {s.simulated for s in (FENCE, COMMIT, fence_proxy_async)}

    def kernel(out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        t = int(cuda.threadIdx.x)
        d, e = cuda.local.array(32, np.float32), cuda.local.array(32, np.float32)
        x = cuda.local.array(8, np.uint32)
        x[:], d[:], e[:] = ALL_ONES, 0, 0
        for i in range(SHARED // 4 // threads):
            st_shared_u32(smem + u32(4 * (t + threads * i)), u32(ALL_ONES))
        fence_proxy_async()
        cuda.syncthreads()
        for step in steps:
            if step in instructions:
                step()
            else:
                step(t, d, e, x, u64(a), u64(b), smem)
        out[t, 0], out[t, 1] = d, e

    out = np.zeros((threads, 2, 32), f32)
    simulate_function(kernel, out, threads=threads, shared=SHARED, seed=seed)
    return out


def breaks(*steps, match, error=SimulatorError, **options):
    with pytest.raises(error, match=match):
        product(*steps, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_products_as_they_should_be(seed):
    """32 columns of ones; wgmma_rs adds to what is there; two warpgroups do not meet."""
    assert (product(FENCE, SS, COMMIT, WAIT, seed=seed)[:, 0] == 32).all()
    assert (product(FENCE, RS, COMMIT, WAIT, seed=seed)[:, 0] == 32).all()
    both = product(FENCE, SS, COMMIT, WAIT, FENCE, RS, COMMIT, WAIT, seed=seed, threads=256)
    assert (both[:, 0] == 64).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_products_on_one_accumulator_follow_each_other(seed):
    """In one group or in two; a fence does not have to come between them."""
    assert (product(FENCE, SS, RS, RS, COMMIT, WAIT, seed=seed)[:, 0] == 96).all()
    assert (product(FENCE, RS, COMMIT, RS, COMMIT, WAIT, seed=seed)[:, 0] == 64).all()


def test_a_wait_leaves_the_newest_groups():
    """Of two groups the older is there after wait_group 1, the newer is NaN."""
    wait_1 = wgmma_wait_group(1, 32)
    early = lambda t, d, e, x, a, b, smem: wait_1(d)
    other = lambda t, d, e, x, a, b, smem: SS(e, a, b)
    seen = []
    look = lambda t, d, e, x, a, b, smem: seen.append((d.copy(), e.copy()))
    out = product(FENCE, SS, COMMIT, other, COMMIT, early, look, WAIT)
    assert (out == 32).all()
    assert all((d == 32).all() and np.isnan(e).all() for d, e in seen)


def test_an_accumulator_is_nan_until_it_is_waited_for():
    """After issue and after commit."""
    seen = []
    look = lambda t, d, e, x, a, b, smem: seen.append(np.isnan(d).all())
    product(FENCE, SS, look, COMMIT, look, WAIT)
    assert len(seen) == 256 and all(seen)


def write_d(t, d, e, x, a, b, smem):
    d[5] = 0


def write_x(t, d, e, x, a, b, smem):
    x[3] = TWOS


def write_b(t, d, e, x, a, b, smem):
    st_shared_u32(smem + u32(B_AT + 4 * t), u32(TWOS))


def write_unread(t, d, e, x, a, b, smem):
    """Columns that two steps do not multiply: the last 16 bytes of a row, before the swizzle."""
    st_shared_u32(smem + u32(B_AT + 112), u32(TWOS))


def test_a_missing_step():
    """No fence, no fence again after a wait, no commit, no wait."""
    breaks(SS, COMMIT, WAIT, match="wgmma_ss without wgmma_fence")
    breaks(FENCE, SS, COMMIT, WAIT, RS, COMMIT, WAIT, match="wgmma_rs without wgmma_fence")
    breaks(FENCE, SS, WAIT, match="warpgroup 0 ended with wgmma_ss in flight")
    breaks(FENCE, SS, COMMIT, match="warpgroup 0 ended with wgmma_ss in flight")


def test_registers_must_not_be_written_in_flight():
    """Accumulators and registers of A; before the product and after the wait they may."""
    in_flight = "was written while wgmma_.s was in flight"
    breaks(FENCE, SS, COMMIT, write_d, WAIT, match=f"an accumulator {in_flight}")
    breaks(FENCE, RS, COMMIT, write_x, WAIT, match=f"an operand {in_flight}")
    out = product(write_x, FENCE, RS, COMMIT, WAIT, write_d)
    assert (out[:, 0, 5] == 0).all() and out[:, 0].max() > 32


def test_shared_operands_must_be_published_and_stay():
    """Written unpublished, written in flight; what is not read may change."""
    breaks(write_b, FENCE, SS, COMMIT, WAIT, match="without fence_proxy_async")
    breaks(FENCE, SS, COMMIT, write_b, WAIT, match="without fence_proxy_async")
    in_flight = "written while a reader of it was in flight"
    breaks(FENCE, SS, COMMIT, write_b, fence_proxy_async, WAIT, match=in_flight)
    out = product(write_b, fence_proxy_async, FENCE, SS, COMMIT, WAIT)
    assert out[:, 0].max() > 32
    assert (product(write_unread, FENCE, SS, COMMIT, write_unread, WAIT)[:, 0] == 32).all()


def test_what_another_warpgroup_writes_later_is_in_flight_too():
    """Warpgroup 1 stores and publishes while warpgroup 0 multiplies: a barrier is missing."""

    def write_there(t, d, e, x, a, b, smem):
        if t >= 128:
            st_shared_u32(smem + u32(B_AT + 4 * (t - 128)), u32(TWOS))
            fence_proxy_async()

    sync = lambda t, d, e, x, a, b, smem: cuda.syncthreads()
    assert product(write_there, sync, FENCE, SS, COMMIT, WAIT, threads=256)[:, 0].max() > 32

    def multiply_0(t, d, e, x, a, b, smem):
        if t < 128:
            FENCE()
            SS(d, a, b)
            COMMIT()

    def rest(t, d, e, x, a, b, smem):
        """Some turns, so that warpgroup 0 comes first."""
        for _ in range(8):
            cuda.syncwarp()

    def wait_0(t, d, e, x, a, b, smem):
        if t < 128:
            WAIT(d)

    steps = multiply_0, rest, write_there, sync, wait_0
    breaks(*steps, threads=256, match="written while a reader of it was in flight")


def test_lanes_must_agree_in_descriptors():
    """One of 128 has another address."""
    wrong = lambda t, d, e, x, a, b, smem: SS(d, a + u64(8 * (t == 77)), b)
    breaks(FENCE, wrong, COMMIT, WAIT, match="wgmma_ss: lanes disagree in an operand")


@pytest.mark.parametrize(
    "b, text",
    [
        (START ^ 3 << 62, "does not describe 8 rows of the 128-byte swizzle"),  # another swizzle
        (START + (128 >> 4), "does not describe 8 rows of the 128-byte swizzle"),
        (START + (B_AT + 1024 >> 4), "is outside of shared memory"),
        (START - (BASE >> 4), "is outside of shared memory"),
    ],
)
def test_descriptors_must_describe_a_tile(b, text):
    """The swizzle that the layout has, from a multiple of 1024 bytes, inside of shared memory."""
    breaks(FENCE, SS, COMMIT, WAIT, b=b, match=text)


def test_a_product_takes_a_whole_warpgroup():
    """Half of it waits in vain."""
    half = lambda t, d, e, x, a, b, smem: SS(d, a, b) if t < 64 else None
    where = "64 of 128 threads in wgmma_ss"
    breaks(FENCE, half, COMMIT, match=where, error=Deadlock)


# --- mma ------------------------------------------------------------------------------------------


def multiply(a=BASE, b=BASE + 2048, lanes=32, shared=6144, tf32=False):
    """Products of zeros: A (16, 16), B (16, 80) in two sub-tiles; `a` and `b` of lane 13 alone.

    The others take the first 16 bytes of each factor. Of TF32 numbers B is (8, 48).
    """
    ss = mma_ss(1, 80, 16, "float16", 16, 16, b_mn_major=True)
    rs = mma_rs(1, 80, 16, "float16", 16)
    if tf32:
        ss, rs = tf32_ss(1, 48, 8, 3, 16, 8, b_mn_major=True), tf32_rs(1, 48, 8, 3, 8)
    type_ = np.float32 if tf32 else np.uint32

    def kernel(out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        t = cuda.threadIdx.x
        for i in range(t, shared // 4, 32):
            st_shared_u32(smem + u32(4 * i), u32(0))
        cuda.syncthreads()
        d, x = cuda.local.array(40, np.float32), cuda.local.array(4, type_)
        d[:], x[:] = 0, 0
        a_at, b_at = (a, b) if t == 13 else (BASE, BASE + 2048)
        if t < lanes:
            ss(d, u32(a_at), u32(b_at))
            rs(d, x, u32(b_at))
        out[t] = d.max()

    out = np.ones(32, f32)
    simulate_function(kernel, out, shared=shared)
    return out


def test_factors_must_be_in_shared_memory_and_aligned():
    """The 16 bytes of each lane, at each step."""
    assert (multiply() == 0).all()
    assert (multiply(a=BASE + 6128, b=BASE + 4080) == 0).all()  # the last of each
    for wrong in (BASE - 16, BASE + 6144, 0, BASE + 8, BASE + 2):
        with pytest.raises(SimulatorError, match="16 bytes at"):
            multiply(a=wrong)
    for wrong in (BASE - 16, BASE + 4096, 0, BASE + 2048 + 8):  # + 2048 is B's second sub-tile
        with pytest.raises(SimulatorError, match="16 bytes at"):
            multiply(b=wrong)


def test_factors_of_tf32_must_be_in_shared_memory_and_aligned():
    """16 bytes of A, single numbers of B: from two rows, of two sub-tiles."""
    assert (multiply(tf32=True) == 0).all()
    last = BASE + 6144 - 1024 - 128 - 128  # of the second sub-tile the last rows but one, two
    assert (multiply(a=BASE + 6128, b=last, tf32=True) == 0).all()
    for wrong in (BASE - 16, BASE + 6144, 0, BASE + 8):
        with pytest.raises(SimulatorError, match="16 bytes at"):
            multiply(a=wrong, tf32=True)
    for wrong in (BASE - 128, last + 128, 0, BASE + 2048 + 2):
        with pytest.raises(SimulatorError, match="4 bytes at"):
            multiply(b=wrong, tf32=True)


@pytest.mark.parametrize("tf32", [False, True])
def test_a_product_takes_a_whole_warp(tf32):
    """Half of it waits in vain."""
    with pytest.raises(Deadlock, match="16 of 32 threads in (mma|tf32)_ss"):
        multiply(lanes=16, tf32=tf32)


# --- planted bugs ---------------------------------------------------------------------------------

IN_FLIGHT = "written while a reader of it was in flight"

# What becomes of a pipeline of TMA load, wgmma, stmatrix and TMA store when one step is left out or
# wrong: an error, or a wrong result.
PLANTED = {
    "wait full": (SimulatorError, "one arrival too many"),  # a slot is released before it is full
    "wait empty": (SimulatorError, "one arrival too many"),
    "release": (Deadlock, r"1 of 256 threads in mbarrier_wait\(42000, 0\)"),
    "early release": (SimulatorError, IN_FLIGHT),
    "parity": (SimulatorError, "one arrival too many"),
    "too many bytes": (Deadlock, r"128 of 256 threads in mbarrier_wait\(41984, 0\)"),
    "too few bytes": (SimulatorError, "copies in flight"),
    "wgmma fence": (SimulatorError, "wgmma_ss without wgmma_fence"),
    "commit": "wrong",  # NaN: groups are older than the waits think
    "wait s": "wrong",  # what is done to NaN is lost when the scores arrive
    "wait o": (SimulatorError, "an accumulator was written while wgmma_rs was in flight"),
    "proxy fence": (SimulatorError, "without fence_proxy_async"),
    "barrier": (SimulatorError, f"without fence_proxy_async|{IN_FLIGHT}"),
    "wait read": (SimulatorError, IN_FLIGHT),
    "wait store": (SimulatorError, "copies in flight"),
    "swizzle": "wrong",  # its shift is one off
    "descriptor step": "wrong",  # 16 bytes for 32
}


def run_pipeline(broken, seed):
    """Whether the result is right."""
    case = make_pipeline(broken)
    arguments = case.operands(np.random.default_rng(0))
    simulate.launch(case.kernel, case.grid, arguments, seed)
    a, b, o = (x.array[0, :, 0] for x in arguments[:3])
    return np.array_equal(o, pipeline_result(a, b))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_pipeline_without_a_planted_bug(seed):
    assert run_pipeline("", seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("broken", PLANTED)
def test_planted_bugs_are_found(broken, seed):
    """In the usual order of threads and in two others."""
    if PLANTED[broken] == "wrong":
        assert not run_pipeline(broken, seed)
    else:
        error, match = PLANTED[broken]
        with pytest.raises(error, match=match):
            run_pipeline(broken, seed)
