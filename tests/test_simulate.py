"""The simulator itself: what a simulated thread sees, and what a wrong kernel makes it report."""

import math
import traceback

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

import flashnumba as fn
from flashnumba import simulate
from flashnumba.config import Kernel

FULL = 0xFFFFFFFF
VECTOR = types.Array(types.float32, 1, "A")
INTEGERS = types.Array(types.int64, 1, "A")


def run(function, *arrays, threads=32, grid=1, seed=None, kinds=None):
    """Simulate `function` on `arrays`, which it writes to; returns the last of them."""
    kinds = kinds or [types.Array(getattr(types, x.dtype.name), x.ndim, "A") for x in arrays]
    kernel = Kernel(function.__name__, function, types.void(*kinds), threads)
    simulate.launch(kernel, grid, arrays, seed)
    return arrays[-1]


def zeros(size, dtype=np.float32):
    return np.zeros(size, dtype)


# --- coordinates and memory -----------------------------------------------------------------------


def test_threads_and_blocks_have_their_coordinates():
    """Three warps a block, four blocks: every thread runs once and knows where it is."""

    def kernel(out):
        i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
        out[i] += 1000 * cuda.gridDim.x + i

    got = run(kernel, zeros(4 * 96, np.int64), threads=96, grid=4)
    np.testing.assert_array_equal(got, 4000 + np.arange(4 * 96))


def test_shared_arrays_are_shared_and_local_ones_are_not():
    """Two shared arrays keep apart; a local array keeps its own thread's number past a barrier."""

    def kernel(out):
        first = cuda.shared.array(64, np.float32)
        second = cuda.shared.array(64, np.float32, alignment=16)
        mine = cuda.local.array(1, np.float32)
        t = cuda.threadIdx.x
        first[t] = t
        second[t] = 100 + t
        mine[0] = t
        cuda.syncthreads()
        out[t, 0], out[t, 1], out[t, 2] = mine[0], first[63 - t], second[(t + 1) % 64]

    t = np.arange(64)
    got = run(kernel, zeros((64, 3)), threads=64)
    np.testing.assert_array_equal(got.T, [t, 63 - t, 100 + (t + 1) % 64])


@pytest.mark.parametrize("space", ["shared", "local"])
def test_memory_starts_poisoned(space):
    """What nobody wrote reads as NaN, or as the least integer."""

    def kernel(floats, integers):
        memory = cuda.shared if SHARED else cuda.local
        x = memory.array((2, 32), np.float32)
        n = memory.array(32, np.int64)
        t = cuda.threadIdx.x
        if t % 2:
            x[1, t], n[t] = t, t
        floats[t] = x[1, t]
        integers[t] = n[t]

    SHARED = space == "shared"
    floats, integers = zeros(32), zeros(32, np.int64)
    run(kernel, floats, integers)
    np.testing.assert_array_equal(floats[1::2], np.arange(1, 32, 2))
    np.testing.assert_array_equal(integers[1::2], np.arange(1, 32, 2))
    assert np.isnan(floats[::2]).all()
    assert (integers[::2] == np.iinfo(np.int64).min).all()


def test_shared_memory_does_not_survive_its_block():
    """Block 0 fills shared memory; block 1 must not find anything there."""

    def kernel(out):
        x = cuda.shared.array(32, np.float32)
        t = cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            x[t] = 7
        cuda.syncthreads()
        out[32 * cuda.blockIdx.x + t] = x[31 - t]

    got = run(kernel, zeros(64), grid=2)
    assert (got[:32] == 7).all()
    assert np.isnan(got[32:]).all()


# --- waiting for each other -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, *range(5)])
def test_a_barrier_waits_for_every_warp(seed):
    """The slowest thread writes last, and all 96 see it, whatever the order."""

    def kernel(out):
        x = cuda.shared.array(3, np.float32)
        t = cuda.threadIdx.x
        for turn in range(3):
            if t == 95:
                x[turn] = 10 * turn
            cuda.syncthreads()
            out[t] += x[turn]

    assert (run(kernel, zeros(96), threads=96, seed=seed) == 30).all()


@pytest.mark.parametrize("seed", [None, 3])
def test_a_skipped_barrier_is_a_deadlock(seed):
    """One thread of 64 never arrives; the report counts who waits, and where."""

    def kernel(out):
        if cuda.threadIdx.x != 5:
            cuda.syncthreads()

    with pytest.raises(simulate.Deadlock, match="block 0.*63 of 64 threads in syncthreads"):
        run(kernel, zeros(1), threads=64, seed=seed)


def test_a_divergent_barrier_is_a_deadlock():
    """Half the threads wait at a barrier, half in a shuffle: each kind of waiting is named."""

    def kernel(out):
        t = cuda.threadIdx.x
        if t < 12:
            cuda.syncthreads()
        else:
            cuda.shfl_xor_sync(FULL, t, 4)

    with pytest.raises(simulate.Deadlock) as caught:
        run(kernel, zeros(1))
    assert "12 of 32 threads in syncthreads" in str(caught.value)
    assert "20 of 32 threads in shfl_xor_sync 4" in str(caught.value)


def test_a_barrier_in_an_uneven_loop_is_a_deadlock():
    """In block 1 thread t wants t + 1 barriers: the first is met, the second is not."""

    def kernel(out):
        for turn in range(1 + cuda.blockIdx.x * cuda.threadIdx.x):
            cuda.syncthreads()
            if cuda.threadIdx.x == 31:
                out[cuda.blockIdx.x] = turn + 1

    out = zeros(2)
    with pytest.raises(simulate.Deadlock, match="block 1.*31 of 32 threads"):
        run(kernel, out, grid=2)
    np.testing.assert_array_equal(out, [1, 1])


def test_the_simulator_runs_again_after_a_deadlock():
    """A deadlock leaves nothing behind that the next launch could meet."""

    def stuck(out):
        if cuda.threadIdx.x:
            cuda.syncthreads()

    def fine(out):
        cuda.syncthreads()
        out[cuda.threadIdx.x] = 1

    with pytest.raises(simulate.Deadlock):
        run(stuck, zeros(32))
    assert (run(fine, zeros(32)) == 1).all()


# --- shuffles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane_mask", [1, 2, 4, 8, 16, 5, 31, 0])
def test_shuffle_exchanges_lanes_by_xor(lane_mask):
    """Exact, and within each of three warps only."""

    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = cuda.shfl_xor_sync(FULL, t, lane_mask)

    t = np.arange(96)
    got = run(kernel, zeros(96, np.int64), threads=96)
    np.testing.assert_array_equal(got, t // 32 * 32 + (t % 32 ^ lane_mask))


@pytest.mark.parametrize("seed", [None, *range(8)])
def test_the_same_shuffle_again_and_again(seed):
    """A fast lane must not join a meeting that slower lanes have not left yet."""

    def kernel(out):
        t = cuda.threadIdx.x
        x = t
        for _ in range(6):
            x = 3 * cuda.shfl_xor_sync(FULL, x, 1) + t
        out[t] = x

    t = x = np.arange(64)
    for _ in range(6):
        x = 3 * x[t ^ 1] + t
    np.testing.assert_array_equal(run(kernel, zeros(64, np.int64), threads=64, seed=seed), x)


def test_warps_shuffle_independently():
    """Warp w shuffles w times, without waiting for other warps."""

    def kernel(out):
        t = cuda.threadIdx.x
        x = t
        for _ in range(t // 32):
            x = cuda.shfl_xor_sync(FULL, x, 1) + 1
        out[t] = x

    t = np.arange(96)
    expected = np.where(t < 32, t, np.where(t < 64, (t ^ 1) + 1, t + 2))
    np.testing.assert_array_equal(run(kernel, zeros(96, np.int64), threads=96), expected)


def test_a_shuffle_must_name_the_whole_warp():
    """A partial mask is refused, with the mask in the message."""

    def kernel(out):
        cuda.shfl_xor_sync(0xFFFF, 1, 1)

    with pytest.raises(simulate.SimulatorError, match="0xffff"):
        run(kernel, zeros(1))


# --- races ----------------------------------------------------------------------------------------


def summation(barrier):
    """A tree sum over 64 threads in shared memory; without `barrier` it is a race."""

    def kernel(x, out):
        buffer = cuda.shared.array(64, np.float32)
        t = cuda.threadIdx.x
        buffer[t] = x[t]
        cuda.syncthreads()
        half = 32
        while half:
            if t < half:
                buffer[t] += buffer[t + half]
            if barrier:
                cuda.syncthreads()
            half //= 2
        if t == 0:
            out[0] = buffer[0]

    return kernel


NUMBERS = np.random.default_rng(0).standard_normal(64).astype(np.float32)


def test_without_a_race_every_schedule_gives_the_same_bits():
    """A tree sum with its barriers, under 40 orders of its threads."""
    results = {
        run(summation(True), NUMBERS, zeros(1), threads=64, seed=seed).tobytes()
        for seed in (None, *range(40))
    }
    assert len(results) == 1
    assert np.frombuffer(results.pop(), np.float32)[0] == pytest.approx(NUMBERS.sum(), abs=1e-5)


def test_a_race_shows_in_shuffled_schedules():
    """The same sum without its barriers depends on the order."""
    results = {
        run(summation(False), NUMBERS, zeros(1), threads=64, seed=seed).tobytes()
        for seed in range(10)
    }
    assert len(results) > 1


def test_a_warp_may_fall_behind_in_shuffled_schedules():
    """One warp reads four steps later what another writes in its first: no barrier says so."""

    def kernel(out):
        shared = cuda.shared.array(1, np.float32)
        if cuda.threadIdx.x == 0:
            shared[0] = 7
        for _ in range(4):
            cuda.syncwarp()
        if cuda.threadIdx.x == 32:
            out[0] = shared[0]

    got = [run(kernel, zeros(1), threads=64, seed=seed)[0] for seed in (None, *range(8))]
    assert got[0] == 7 and 7 in got[1:] and np.isnan(got).any()


def test_a_seed_repeats_its_schedule():
    """Threads take tickets: one seed is one order, another seed another; None is by number."""

    def kernel(counter, order):
        for _ in range(2):
            order[counter[0]] = cuda.threadIdx.x
            counter[0] += 1
            cuda.syncthreads()

    orders = [
        tuple(run(kernel, zeros(1, np.int64), zeros(64, np.int64), seed=seed))
        for seed in (1, 1, 2, None, None)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == orders[4]
    assert orders[3][:32] == tuple(range(32))


# --- errors ---------------------------------------------------------------------------------------


def test_an_exception_in_a_thread_reaches_the_caller_with_the_kernels_line():
    """An index past the end, in a function that the kernel calls, in the middle of a block."""

    @cuda.jit(device=True)
    def write(out, i):
        out[i] = 1

    def kernel(out):
        cuda.syncthreads()
        write(out, cuda.threadIdx.x)

    with pytest.raises(IndexError, match="out of bounds for axis 0 with size 20") as caught:
        run(kernel, zeros(20))
    frames = traceback.extract_tb(caught.value.__traceback__)
    names = [frame.name for frame in frames if frame.filename == __file__]
    assert names[-2:] == ["kernel", "write"]
    assert frames[-1].line == "out[i] = 1"
    assert (run(kernel, zeros(32)) == 1).all()


def test_the_number_of_arguments_is_checked():
    """One argument too few for the signature."""

    def kernel(x, out):
        out[0] = x[0]

    with pytest.raises(ValueError, match="zip"):
        run(kernel, zeros(1), kinds=[VECTOR, VECTOR])


# --- arguments ------------------------------------------------------------------------------------


def test_arguments_arrive_as_the_signature_says():
    """Scalars in their NumPy type, None as an empty array of the right axes, bfloat16 as bits."""
    seen = []

    def kernel(out, missing, bits, x, n):
        if cuda.threadIdx.x == 0:
            seen.append((missing.shape, missing.dtype.name, bits.dtype.name, type(x), type(n)))
            out[0] = bits[0]

    bits = np.ones(1, ml_dtypes.bfloat16)
    kinds = (
        INTEGERS,
        types.Array(types.float32, 3, "A"),
        types.Array(types.uint16, 1, "A"),
        types.float64,
        types.int64,
    )
    out = zeros(1, np.int64)
    kernel = Kernel("arguments", kernel, types.void(*kinds), 32)
    simulate.launch(kernel, 1, (out, None, bits, 1, True))
    assert seen == [((0, 0, 0), "float32", "uint16", np.float64, np.int64)]
    assert out[0] == 0x3F80


def test_kernels_write_through_views():
    """Negative and wide strides: what is not part of the view stays as it was."""

    def kernel(out):
        out[cuda.threadIdx.x] = cuda.threadIdx.x + 1

    base = zeros(96)
    run(kernel, base[::-3])
    np.testing.assert_array_equal(base[::-3], np.arange(1, 33))
    assert (np.delete(base, np.arange(95, -1, -3)) == 0).all()


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["exp", "log"])
def test_float32_functions_stay_in_float32(function):
    """Python's math would answer in double precision."""
    apply = {"exp": lambda x: math.exp(x), "log": lambda x: math.log(x)}[function]
    apply = cuda.jit(device=True)(apply)

    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = apply(x[t])  # a float64 array keeps all digits there are

    x = np.linspace(0.1, 3, 32, dtype=np.float32)
    got = run(kernel, x, zeros(32, np.float64))
    single = getattr(np, function)(x)
    assert single.dtype == np.float32
    np.testing.assert_array_equal(got, single.astype(np.float64))
    assert (got != getattr(np, function)(x.astype(np.float64))).any()


def test_infinities_are_data_and_warn_of_nothing():
    """exp overflows to infinity, log of 0 is -inf and inf - inf is NaN, as on a GPU, silently."""

    def kernel(x, out):
        t = cuda.threadIdx.x
        out[t] = math.exp(x[t])
        out[32 + t] = math.log(x[t] - x[t])
        out[64 + t] = out[t] - out[t]

    got = run(kernel, np.full(32, 1000, np.float32), zeros(96))
    assert (got[:32] == np.inf).all()
    assert (got[32:64] == -np.inf).all()
    assert np.isnan(got[64:]).all()


# --- rebinding ------------------------------------------------------------------------------------


@cuda.jit(device=True)
def neighbour(x):
    """The number of the lane beside; on a GPU, an instruction."""
    return cuda.shfl_xor_sync(FULL, x, 1)


@cuda.jit(device=True)
def neighbour_plus(x, y=5):
    return neighbour(x) + y


def test_jitted_functions_that_call_jitted_functions_are_rebound():
    """Global names two calls deep, and a default argument."""

    def kernel(out):
        t = cuda.threadIdx.x
        out[t] = neighbour_plus(t)

    got = run(kernel, zeros(32, np.int64))
    np.testing.assert_array_equal(got, (np.arange(32) ^ 1) + 5)


def test_closures_are_rebound():
    """A kernel's inner function calls a jitted function out of a closure, and that another."""
    FACTOR = 3

    @cuda.jit(device=True)
    def scaled(x):
        return FACTOR * neighbour(x)

    def kernel(out):
        t = cuda.threadIdx.x

        def step(add):
            cuda.syncthreads()
            out[t] += scaled(t) + add

        step(1)
        step(2)

    got = run(kernel, zeros(32, np.int64))
    np.testing.assert_array_equal(got, 6 * (np.arange(32) ^ 1) + 3)


def test_globals_that_only_an_inner_function_uses_are_rebound():
    """The kernel itself does not name `neighbour`; its inner function does."""

    def kernel(out):
        def step(t):
            out[t] = neighbour(t)

        step(cuda.threadIdx.x)

    np.testing.assert_array_equal(run(kernel, zeros(32, np.int64)), np.arange(32) ^ 1)


def test_rebinding_leaves_the_original_function_alone():
    """The kernel that is simulated can still be compiled: its names and cells are its own."""
    before = dict(neighbour_plus.py_func.__globals__)
    rebound = simulate.as_python(neighbour_plus.py_func, {})
    assert rebound is not neighbour_plus.py_func
    body = rebound.__globals__["neighbour"]
    assert body is not neighbour
    assert body.__globals__["cuda"] is simulate.SIMULATED_CUDA
    assert globals()["cuda"] is cuda
    assert dict(neighbour_plus.py_func.__globals__) == before


def test_a_function_is_rebound_once():
    """Two callers share one Python body, so that recursion and repeated calls cost nothing."""
    memo = {}
    first = simulate.as_python(neighbour_plus.py_func, memo)
    assert simulate.as_python(neighbour_plus.py_func, memo) is first
    assert simulate.as_python(neighbour.py_func, memo) is first.__globals__["neighbour"]


def test_public_calls_can_be_shuffled():
    """The context reaches the launches inside of `attention`, and ends with itself."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 9, 2, 5), np.float32)
    expected = fn.attention(q, k, v, causal=True, backend="simulator")
    orders = []
    real = simulate.random.Random
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulate.random, "Random", lambda seed: orders.append(seed) or real(seed))
        for seed in (1, 2):
            with simulate.shuffled(seed):
                got = fn.attention(q, k, v, causal=True, backend="simulator")
            assert got.tobytes() == expected.tobytes()
        fn.attention(q, k, v, causal=True, backend="simulator")
    assert orders == [1, 2]
