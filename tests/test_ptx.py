"""What every instruction of flashnumba/ptx means, in the simulator, against NumPy and the PTX ISA.

Whether a GPU agrees is tested in test_ptx_conformance.py, by the same kernels (ptx_cases.py). What
happens when a rule of the machine is broken is tested in test_ptx_rules.py.
"""

import math

import ml_dtypes
import numpy as np
import ptx_cases
import pytest
from numba import cuda
from ptx_cases import (
    BOXES,
    DEPTH,
    HALF,
    MMA_FORMS,
    MMA_SIZES,
    MMA_STEPS,
    PART_DEPTH,
    PARTS,
    PARTS_SIZES,
    ROW_PARTS,
    ROW_STEP,
    SIZES,
    STEPS,
    STORES,
    TF32_FORMS,
    cases,
    of_warps,
    random_halves,
    simulate_function,
    tf32_arguments,
    tf32_depth,
    tf32_factors,
)

from flashnumba import simulate
from flashnumba.ptx.barrier import (
    bar_arrive,
    bar_sync,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
)
from flashnumba.ptx.layout import accumulator, swizzle128
from flashnumba.ptx.shared import (
    BASE,
    cvta_to_shared,
    fence_proxy_async,
    ld_shared_u16,
    ld_shared_u32,
    ld_shared_v4_u32,
    st_shared_u32,
    stmatrix_x4,
)
from flashnumba.ptx.thread import cvt_bf16x2, cvt_f16x2, cvt_f16x2_each, ex2, lg2, max_f32, rcp
from flashnumba.ptx.tma import (
    cp_async_bulk_commit_group,
    cp_async_bulk_tensor_load,
    cp_async_bulk_tensor_store,
    cp_async_bulk_wait_group,
)
from flashnumba.tensormap import TensorMap

u32, f32 = np.uint32, np.float32
INF, NAN = f32(np.inf), f32(np.nan)
TINY = f32(2.0**-126)  # the smallest normal number
RNG = np.random.default_rng(0)


def operands(name):
    return cases()[name].operands(np.random.default_rng(1))


def simulated(name, seed=None):
    """A case's arguments after it ran."""
    case, arguments = cases()[name], operands(name)
    simulate.launch(case.kernel, case.grid, arguments, seed)
    return arguments


# --- thread.py ------------------------------------------------------------------------------------


def value(instruction, *operands):
    """The meaning of an instruction of one thread."""
    with np.errstate(all="ignore"):
        return instruction.body(*(f32(x) for x in operands))


def bits(x):
    return f32(x).view(u32)


def test_ex2_is_a_power_of_two():
    """To 2**-22, and exactly 1 at 0."""
    assert value(ex2, 0) == 1
    for x in [*range(-125, 128), *RNG.uniform(-125, 127, 200).astype(f32)]:
        assert value(ex2, x) == pytest.approx(2.0 ** float(x), rel=2.0**-22)


def test_ex2_at_the_ends():
    """Subnormal operands and results are 0; it overflows to infinity, and NaN stays."""
    assert value(ex2, 2.0**-140) == value(ex2, -(2.0**-140)) == value(ex2, -0.0) == 1
    assert value(ex2, -127) == value(ex2, -150) == value(ex2, -INF) == 0
    assert value(ex2, 128) == value(ex2, INF) == INF
    assert np.isnan(value(ex2, NAN))
    assert value(ex2, 3).dtype == np.float32


def test_lg2_is_the_logarithm():
    """Exact at powers of two; everything below the smallest normal number counts as 0."""
    for n in range(-126, 128):
        assert value(lg2, 2.0**n) == n
    for x in RNG.uniform(0.01, 100, 200).astype(f32):
        assert value(lg2, x) == pytest.approx(math.log2(x), rel=2.0**-22, abs=2.0**-22)
    for x in (0.0, -0.0, 2.0**-127, -(2.0**-127)):
        assert value(lg2, x) == -INF
    assert value(lg2, INF) == INF
    for x in (-1, -TINY, -INF, NAN):
        assert np.isnan(value(lg2, x))


def test_rcp_is_the_reciprocal():
    """To one unit in the last place; zeros and infinities keep their sign, subnormals are zeros."""
    for x in RNG.uniform(-100, 100, 200).astype(f32):
        assert value(rcp, x) == pytest.approx(1 / float(x), rel=2.0**-23)
    for sign in (1, -1):
        for x in (0.0, 2.0**-127, 2.0**-149):
            assert value(rcp, sign * x) == sign * INF
        for x in (INF, 2.0**127, 3.4e38):
            assert bits(value(rcp, sign * x)) == bits(sign * 0.0)
        assert value(rcp, sign * 2.0**126) == sign * TINY
    assert np.isnan(value(rcp, NAN))


def test_max_prefers_numbers_and_positive_zero():
    """NaN only if both are; +0 counts as larger than -0; subnormal numbers stay."""
    for a, b in RNG.standard_normal((100, 2)).astype(f32):
        assert value(max_f32, a, b) == max(a, b)
    assert value(max_f32, NAN, -3) == value(max_f32, -3, NAN) == -3
    assert value(max_f32, NAN, -INF) == value(max_f32, -INF, -INF) == -INF
    assert np.isnan(value(max_f32, NAN, NAN))
    assert bits(value(max_f32, -0.0, 0.0)) == bits(value(max_f32, 0.0, -0.0)) == 0
    assert bits(value(max_f32, -0.0, -0.0)) == 0x80000000
    assert bits(value(max_f32, 0, 2.0**-149)) == 1


def test_cvt_f16x2_rounds_to_nearest_even():
    """The first operand in the lower half; ties, overflow, subnormal numbers, NaN."""
    check_cvt_f16x2(cvt_f16x2)
    check_cvt_f16x2(cvt_f16x2_each)


def check_cvt_f16x2(instruction):
    pair = lambda low, high: int(value(instruction, low, high))
    assert pair(1, -2) == 0xC000_3C00
    assert pair(1 + 2.0**-11, 1 + 3 * 2.0**-11) == 0x3C02_3C00  # both are halfway
    assert pair(65519.996, 65520) == 0x7C00_7BFF
    assert pair(-(2.0**-24), 2.0**-25) == 0x0000_8001
    assert pair(3 * 2.0**-25, -0.0) == 0x8000_0002
    assert pair(INF, -INF) == 0xFC00_7C00
    assert pair(NAN, -NAN) == 0x7FFF_7FFF


def test_cvt_bf16x2_rounds_to_nearest_even():
    """Against ml_dtypes on random bits; NaN becomes 0x7fff whatever it was."""
    pair = lambda low, high: int(value(cvt_bf16x2, low, high))
    assert pair(1, -2) == 0xC000_3F80
    assert pair(1 + 2.0**-8, 1 + 3 * 2.0**-8) == 0x3F82_3F80
    assert pair(3.4028235e38, -INF) == 0xFF80_7F80
    assert pair(2.0**-133, -0.0) == 0x8000_0001
    assert pair(NAN, -NAN) == 0x7FFF_7FFF
    x = RNG.integers(0, 1 << 32, 400, u32).view(f32)
    x = x[~np.isnan(x)]
    for low, high in zip(x[::2], x[1::2], strict=False):
        expected = np.array([low, high]).astype(ml_dtypes.bfloat16).view(u32)[0]
        assert pair(low, high) == expected


# --- shared.py ------------------------------------------------------------------------------------


def test_loads_and_stores():
    """Little-endian; a half is the lower half of its register, and its neighbour stays."""
    words, at_half, at_16, by_word, by_half, by_16, numbers = simulated("shared")
    memory = words.copy()
    memory.view(np.uint16)[at_half // 2] = words[:128] & 0xFFFF
    memory[:128] = np.where(numbers < 0, numbers.view(u32), memory[:128])
    np.testing.assert_array_equal(by_word, memory)
    np.testing.assert_array_equal(by_half, memory.view(np.uint16)[at_half[::-1] // 2])
    np.testing.assert_array_equal(by_16, memory.reshape(-1, 4)[at_16 // 16])


def test_stmatrix_stores_rows_where_its_lanes_say():
    """Lane 8 i + r names row r of matrix i; lane 4 r + c holds its columns 2 c and 2 c + 1."""
    x, at, out = simulated("stmatrix")
    memory = np.arange(1024, dtype=u32)
    for warp in range(2):
        for turn in range(2):
            for i in range(4):
                for r in range(8):
                    row = at[32 * warp + 8 * i + r, turn] // 4
                    lanes = 32 * warp + 4 * r + np.arange(4)
                    memory[row : row + 4] = x[lanes, 4 * turn + i]
    np.testing.assert_array_equal(out, memory)


def test_stmatrix_stores_an_accumulator_as_a_matrix():
    """An accumulator (64, 16), packed, lands in row-major order, as kernels' epilogues use it."""
    accumulators = RNG.standard_normal((128, 8)).astype(f32)
    rows, columns = accumulator(16)
    expected = np.empty((64, 16), np.float16)
    expected[rows, columns] = accumulators

    def kernel(x, out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        t = cuda.threadIdx.x
        row, lane = t // 32 * 16, t % 32
        at = smem + u32(32 * (row + lane % 16) + 16 * (lane // 16))
        pack = lambda i: cvt_f16x2(x[t, i], x[t, i + 1])
        stmatrix_x4(at, pack(0), pack(2), pack(4), pack(6))
        cuda.syncthreads()
        for i in range(4):
            out[t + 128 * i] = ld_shared_u32(smem + u32(4 * (t + 128 * i)))

    out = np.zeros(512, u32)
    simulate_function(kernel, accumulators, out, threads=128, shared=2048)
    np.testing.assert_array_equal(out.view(np.float16).reshape(64, 16), expected)


def test_shared_memory_starts_as_nan_and_does_not_survive_its_block():
    """Of every type: all bits are set."""

    def kernel(out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        block, t = cuda.blockIdx.x, cuda.threadIdx.x
        x = cuda.local.array(4, np.uint32)
        ld_shared_v4_u32(x, smem + u32(16 * t))
        out[block, t] = x[3]
        out[block, t + 32] = ld_shared_u16(smem + u32(2 * t))
        cuda.syncthreads()
        st_shared_u32(smem + u32(4 * t), u32(t))

    out = np.zeros((2, 64), u32)
    simulate_function(kernel, out, grid=2, shared=512)
    assert (out[:, :32] == 0xFFFFFFFF).all()
    assert (out[:, 32:] == 0xFFFF).all()
    assert np.isnan(out[:, :32].view(f32)).all()


# --- memory.py and cp_async.py --------------------------------------------------------------------


def parts_of(x, row, inside, width):
    """What threads have to get of rows of x (rows, columns): (threads, ROW_PARTS, 8)."""
    parts = np.zeros((len(row), ROW_PARTS, 8), np.uint16)
    for t, i in np.ndindex(parts.shape[:2]):
        column = t % 8 * 8 + 64 * i
        if inside[t] and width[t] > 128 * i:
            parts[t, i] = x[row[t], column : column + 8]
    return parts


def put(memory, at, parts):
    """Parts to their places in shared memory."""
    for t, i in np.ndindex(parts.shape[:2]):
        word = (at[t] + ROW_STEP * i) // 4
        memory[word : word + 4] = parts[t, i].view(u32)


def test_rows():
    """Zeros past the width or the array; only what is within the width is stored."""
    x, row, inside, width, at, image, after, to_row, to_width = simulated("rows")
    y = operands("rows")[6]
    parts = parts_of(x[:, 1], row, inside, width)
    memory = np.arange(len(image), dtype=u32)
    put(memory, at, parts)
    np.testing.assert_array_equal(image, memory)
    for t, i in np.ndindex(parts.shape[:2]):
        column = t % 8 * 8 + 64 * i
        if to_width[t] > 128 * i:
            y[to_row[t], 0, column : column + 8] = parts[63 - t, i]
    np.testing.assert_array_equal(after, y)
    assert {0, 16} == set(inside) and row.max() >= len(x)
    for w in (width, to_width):
        assert set(np.clip(-(-w // 128), 0, ROW_PARTS)) == set(range(ROW_PARTS + 1))


def test_fragment():
    """An accumulator's rows and columns, without those past a row and a width."""
    x, row_end, width, after = simulated("fragment")
    y = operands("fragment")[3]
    rows, columns = accumulator(2 * x.shape[1])
    tile = np.empty((64, 2 * x.shape[1]), f32)
    tile[rows, columns] = x
    for warp in range(4):
        inside = slice(16 * warp, row_end[warp]), slice(width[warp] // 4)
        y[:, 1][inside] = tile[inside]
    np.testing.assert_array_equal(after, y)


def test_copies_in_groups():
    """After a wait for the older group it is there; after the next all is, and the rest stayed."""
    x, row, inside, width, at, older, both = simulated("cp_async")
    memory = np.arange(len(both), dtype=u32)
    halves = memory[: len(older)], memory[len(older) :]
    for half, *group in zip(halves, at, row, inside, width, strict=True):
        put(half, group[0], parts_of(x[:, 1], *group[1:]))
    np.testing.assert_array_equal(older, halves[0])
    np.testing.assert_array_equal(both, memory)


def test_numbers_are_added_one_by_one():
    """What several blocks add to one tile adds up."""
    x, to, after = simulated("red")
    y = operands("red")[2]
    for numbers, tile in zip(x, to, strict=True):
        y[tile] += numbers[::-1]
    np.testing.assert_array_equal(after, y)


# --- barrier.py -----------------------------------------------------------------------------------

SEEDS = [None, 0, 1, 2]


@pytest.mark.parametrize("seed", SEEDS)
def test_rings_and_turns(seed):
    """A ring of mbarriers hands on every row whole, and numbered barriers alternate two groups."""
    x, out, order = simulated("barriers", seed)
    for warpgroup in range(2):
        for n in range(len(x)):
            expected = x[n, (5 * np.arange(128) + n) % 128]
            np.testing.assert_array_equal(out[warpgroup, n], expected)
    turns = [10 * n + warpgroup for n in range(len(x)) for warpgroup in (1, 2)]
    np.testing.assert_array_equal(order, [len(turns), *turns])


@pytest.mark.parametrize("seed", SEEDS)
def test_mbarrier_phases_and_parities(seed):
    """A phase ends with its last arrival. At a new barrier, a wait for parity 1 returns at once."""

    def kernel(out):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(smem, u32(31))
        cuda.syncthreads()
        mbarrier_wait(smem, u32(1))
        for turn in range(3):
            if t == 0:
                mbarrier_wait(smem, u32(turn & 1))
                out[turn] = out[3]  # how many have arrived
            else:
                out[3] += 1
                mbarrier_arrive(smem)
            cuda.syncthreads()

    out = np.zeros(4, np.int64)
    simulate_function(kernel, out, seed=seed)
    np.testing.assert_array_equal(out, [31, 62, 93, 93])


def test_mbarrier_waits_for_bytes_and_arrivals():
    """Two copies and two arrivals, one of which announces both; any order of announcement."""
    x = RNG.standard_normal((1, 16, 1, 64)).astype(np.float16)

    def kernel(x, out, late):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        t = cuda.threadIdx.x
        full = smem + u32(4096)
        if t == 0:
            mbarrier_init(full, u32(2))
            if not late:
                mbarrier_arrive_expect_tx(full, u32(2 * 8 * 128))
            cp_async_bulk_tensor_load(smem, x, full, 0, 0, 0, 0)
            cp_async_bulk_tensor_load(smem + u32(1024), x, full, 0, 8, 0, 0)
            if late:
                mbarrier_arrive_expect_tx(full, u32(2 * 8 * 128))
        cuda.syncthreads()
        if t == 1:
            mbarrier_arrive(full)
        mbarrier_wait(full, u32(0))
        for i in range(16):
            out[t + 32 * i] = ld_shared_u32(smem + swizzle128(u32(4 * (t + 32 * i))))

    for late in (0, 1):
        out = np.zeros(512, u32)
        simulate_function(kernel, TensorMap(x, 8), out, late, shared=5120)
        np.testing.assert_array_equal(out, x.view(u32).ravel())


@pytest.mark.parametrize("seed", SEEDS)
def test_bar_arrive_does_not_wait(seed):
    """Warp 1 announces, does more, and waits; warp 0 waits first. Nobody has waited before."""

    def kernel(out):
        t = cuda.threadIdx.x
        if t < 32:
            bar_sync(u32(1), u32(64))
            out[t] = out[32 + t]
            bar_arrive(u32(2), u32(64))
        else:
            out[t] = t
            bar_arrive(u32(1), u32(64))
            bar_sync(u32(2), u32(64))
            out[t] = -out[t - 32]

    out = np.zeros(64, np.int64)
    simulate_function(kernel, out, threads=64, seed=seed)
    np.testing.assert_array_equal(out, np.concatenate([np.arange(32, 64), -np.arange(32, 64)]))


@pytest.mark.parametrize("seed", SEEDS)
def test_registers_wait_for_those_who_give_them_back(seed):
    """Of 384 threads with 168 registers each, two warpgroups take 232 once the first has 40."""
    dec, inc = setmaxnreg_dec(40), setmaxnreg_inc(232)

    def kernel(out):
        t = cuda.threadIdx.x
        if t < 128:
            out[t] = 1
            dec()
        else:
            inc()
            out[t] = out[t % 128]

    out = np.zeros(384, np.int64)
    simulate_function(kernel, out, threads=384, seed=seed)
    assert (out == 1).all()


# --- tma.py ---------------------------------------------------------------------------------------


def padded(array, column, row, head, batch, rows):
    """A box of `rows` x 64 with zeros outside of the array, one number at a time."""
    box = np.zeros((rows, 64), np.uint16)
    for r in range(max(0, -row), rows):
        for c in range(max(0, -column), 64):
            if row + r < array.shape[1] and column + c < array.shape[3]:
                box[r, c] = array[batch, row + r, head, column + c].view(np.uint16)
    return box


def test_boxes():
    """Inside, across every edge, outside; of strided arrays; swizzled; outside is not written."""
    y = operands("tma")[1].array  # as it was before
    x, after, boxes, image = simulated("tma")
    x, rows = x.array, x.rows
    order = swizzle128(2 * np.arange(64 * rows)) // 2
    for at, to, lies in zip(boxes[:, :4], boxes[:, 4:], image, strict=True):
        box = padded(x, *at, rows)
        np.testing.assert_array_equal(lies.view(np.uint16)[order].reshape(rows, 64), box)
        column, row, head, batch = to
        for r in range(max(0, -row), min(rows, y.shape[1] - row)):
            for c in range(max(0, -column), min(64, y.shape[3] - column)):
                y[batch, row + r, head, column + c] = box[r, c].view(np.float16)
    np.testing.assert_array_equal(after.array.view(np.uint16), y.view(np.uint16))
    assert {tuple(at) for at in boxes[:, :2].tolist()} == set(BOXES)
    assert {tuple(to) for to in boxes[:, 4:6].tolist()} == set(STORES)
    heads = {tuple(to) for to in boxes[:, 6:].tolist()}
    assert len(heads) == len(boxes) == len(BOXES)  # no store over another


def test_a_store_takes_what_its_group_holds():
    """Two stores in one group, one in the next, one wait for all."""
    x = np.zeros((1, 24, 1, 64), np.uint16)

    def kernel(x):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8))
        t = cuda.threadIdx.x
        for i in range(24):
            st_shared_u32(smem + u32(4 * t + 128 * i), u32(i * 0x10001))
        fence_proxy_async()
        cuda.syncthreads()
        if t == 0:
            cp_async_bulk_tensor_store(x, smem, 0, 16, 0, 0)
            cp_async_bulk_tensor_store(x, smem + u32(1024), 0, 8, 0, 0)
            cp_async_bulk_commit_group()
            cp_async_bulk_tensor_store(x, smem + u32(2048), 0, 0, 0, 0)
            cp_async_bulk_commit_group()
            cp_async_bulk_wait_group()

    simulate_function(kernel, TensorMap(x, 8), shared=3072)
    rows = np.concatenate([np.arange(16, 24), np.arange(8, 16), np.arange(8)])
    np.testing.assert_array_equal(x[0, :, 0, :], rows[:, None].repeat(64, 1))


# --- wgmma.py -------------------------------------------------------------------------------------


def matrices(arguments, dtype):
    """a (64, DEPTH), b (n, DEPTH) as float32, of the maps of a wgmma case."""
    return [m.array[0, :, 0].view(HALF[dtype]).astype(f32) for m in arguments[:2]]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("n", SIZES)
def test_products(n, dtype):
    """Every form is A B^T as NumPy has it, exactly for integers; three add to what is there."""
    rows, columns = accumulator(n)
    for kind in ("integers", "normal"):
        arguments = simulated(f"wgmma-{n}-{dtype}-{kind}")
        (a, b), start, out = matrices(arguments, dtype), arguments[5], arguments[6]
        full = (a @ b.T)[rows, columns]
        part = (a[:, : 16 * STEPS] @ b[:, : 16 * STEPS].T)[rows, columns] + start
        bound = 0 if kind == "integers" else DEPTH * 2.0**-23 * DEPTH
        results = [full] * 4 + [part] * 2 + [full + start]
        for product, expected in zip(out, results, strict=True):
            np.testing.assert_allclose(product, expected, rtol=0, atol=bound)
        assert np.abs(full).min() < np.abs(full).max()  # not all zeros


@pytest.mark.parametrize("n", PARTS_SIZES)
def test_products_of_parts(n):
    """The sum over pairs of parts but for the smallest, twice, exactly for integers.

    In two pieces B is another the second time: half of its first part, in 64 columns, is 0.
    """
    rows, columns = accumulator(n)
    for kind in ("integers", "normal"):
        b, _, _, out = simulated(f"wgmma-parts-{n}-{kind}")
        b = b.array[0, :, 0].view(HALF["bfloat16"]).astype(f32)
        rng = np.random.default_rng(1)  # as in the operands of the case, which has a fragment of A
        a = random_halves(rng, (64, PARTS * PART_DEPTH), "bfloat16", kind == "integers").astype(f32)
        left, right = (x.reshape(PARTS, PART_DEPTH, -1) for x in (a.T, b))
        cleared = right.copy()
        cleared[0, : PART_DEPTH // 2, :64] = 0
        pairs = [(i, j) for i in range(PARTS) for j in range(PARTS - i)]
        once, again = (
            sum(left[i].T @ x[j] for i, j in pairs)[rows, columns] for x in (right, cleared)
        )
        terms = 2 * PART_DEPTH * len(pairs)
        bound = 0 if kind == "integers" else terms * 2.0**-23 * terms
        np.testing.assert_allclose(out[0], 2 * once, rtol=0, atol=bound)
        np.testing.assert_allclose(out[1], once + again, rtol=0, atol=bound)
        assert np.abs(once - again).max() > 1


def test_a_fragment_of_scores_is_a_fragment_of_a():
    """Pairs of an accumulator's registers, packed, are the registers of A of the next product."""
    a = RNG.standard_normal((64, 80)).astype(np.float16)
    rows, columns = accumulator(80)
    packed = np.ascontiguousarray(a[rows, columns]).view(u32)
    np.testing.assert_array_equal(packed, ptx_cases.a_fragment(a))


# --- mma.py ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", MMA_FORMS)
def test_products_of_a_warp(form):
    """Every form is A B^T as NumPy has it, exactly for integers; three add to what is there."""
    tiles, dtype, _ = MMA_FORMS[form]
    n, k = MMA_SIZES[tiles]
    rows, columns = accumulator(n)
    for kind in ("integers", "normal"):
        start, out = simulated(f"mma-{form}-{kind}")[5:]
        rng = np.random.default_rng(1)  # as in the operands of the case, which are made into tiles
        a, b = (random_halves(rng, (m, k), dtype, kind == "integers").astype(f32) for m in (64, n))
        full = of_warps((a @ b.T)[rows, columns], tiles)
        a, b = a[:, : 16 * MMA_STEPS], b[:, : 16 * MMA_STEPS]
        part = of_warps((a @ b.T)[rows, columns], tiles) + start
        bound = 0 if kind == "integers" else k * 2.0**-23 * k
        results = [full] * 4 + [part] * 2 + [full + start]
        for product, expected in zip(out, results, strict=True):
            np.testing.assert_allclose(product, expected, rtol=0, atol=bound)
        assert np.abs(full).min() < np.abs(full).max()  # not all zeros


# --- mma_tf32.py ----------------------------------------------------------------------------------

EPS = 2.0**-23
LARGEST = np.finfo(f32).max


def multiplied(form, a, b):
    """Of each result of a TF32 case's kernel for these factors: it, A B^T and |A| |B|^T.

    In double precision, times what is missing; what adds to fragments adds to zeros.
    """
    case, (tiles, n, _, _) = cases()[f"mma-tf32-{form}-normal"], TF32_FORMS[form]
    arguments = tf32_arguments(form, a, b, np.zeros((128 // tiles, tiles * n // 2), f32))
    simulate.launch(case.kernel, case.grid, arguments)
    with np.errstate(invalid="ignore"):
        a, b, place = a.astype(np.float64), b.astype(np.float64), accumulator(n)
    for out, depth, missing in zip(arguments[-1], *tf32_depth(form), strict=True):
        x, y = a[:, :depth], b[:, :depth]
        with np.errstate(invalid="ignore"):
            exact, size = x @ y.T, np.abs(x) @ np.abs(y.T)
        yield missing * out.astype(np.float64), *(of_warps(z[place], tiles) for z in (exact, size))


@pytest.mark.parametrize("form", TF32_FORMS)
def test_products_of_small_integers_in_tf32_are_exact(form):
    """Every form is A B^T by its factor, and the fourth and the fifth add to what is there."""
    a, b = tf32_factors(form, np.random.default_rng(1), integers=True)
    start, out = simulated(f"mma-tf32-{form}-integers")[6:]
    tiles, n, _, _ = TF32_FORMS[form]
    for i, (depth, missing) in enumerate(zip(*tf32_depth(form), strict=True)):
        product = a[:, :depth] @ b[:, :depth].T / missing
        expected = of_warps(product[accumulator(n)], tiles) + (start if i >= 3 else 0)
        np.testing.assert_array_equal(out[i], expected)
    assert len(np.unique(out)) > 100


@pytest.mark.parametrize("form", TF32_FORMS)
def test_three_products_are_as_good_as_float32_and_one_is_tf32(form):
    """Of numbers near 1, of huge and of minute ones, against double precision.

    One product is also no better than TF32, or it would be three.
    """
    a, b = tf32_factors(form, np.random.default_rng(1), integers=False)
    products = TF32_FORMS[form][3]
    for got, exact, size in multiplied(form, a, b):
        error = np.abs(got - exact) / size
        assert error.max() < (4 * EPS if products == 3 else 2.0**-11)
        assert products == 3 or error.max() > 2.0**-14


FINITE = ["narrow-1", "wide-1"]  # with three products and with one


def with_one(form, x, a=None):
    """Factors whose B has `x` in row 2, which is 0 elsewhere; A is positive, `a` or at most 1."""
    _, n, k, _ = TF32_FORMS[form]
    a = np.broadcast_to(RNG.uniform(0.25, 1, (64, k)) if a is None else a, (64, k)).astype(f32)
    b = RNG.standard_normal((n, k)).astype(f32)
    b[2], b[2, 11] = 0, x
    return a, b


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("form", FINITE)
def test_the_largest_numbers_stay_finite_in_tf32(form, sign):
    """Rounded to 11 bits they would be infinite; halved they are not."""
    for got, exact, size in multiplied(form, *with_one(form, sign * LARGEST)):
        assert np.isfinite(got).all()
        assert (np.abs(got - exact) / size).max() < (4 * EPS if form == "narrow-1" else 2.0**-10)


@pytest.mark.parametrize("form, a", [("wide-1", None)])
@pytest.mark.parametrize("x", [INF, -INF])
def test_infinity_times_positive_numbers_is_infinity_in_tf32(form, a, x):
    """In its column, as in float32; others do not see it. With one product: of three, one is what
    A leaves of its 11 bits times infinity, which may be NaN; kernels keep infinities away."""
    for got, exact, _ in multiplied(form, *with_one(form, x, a)):
        there = np.isinf(exact)
        assert there.any() and (got[there] == x).all() and np.isfinite(got[~there]).all()


@pytest.mark.parametrize("form", FINITE)
@pytest.mark.parametrize(
    "pattern",
    [
        0x7FC00000,
        0xFFC00000,
        0x7FFFFFFF,  # a GPU's own NaN
        0xFFFFFFFF,  # of shared memory that nobody wrote
    ],
)
def test_nan_stays_nan_in_tf32(form, pattern):
    """Whatever its bits are, of A and of B; other rows and columns do not see it."""
    nan = u32(pattern).view(f32)
    a, b = with_one(form, nan)
    a[9, 13] = nan
    for got, exact, _ in multiplied(form, a, b):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(exact))
        assert np.isnan(exact).any() and not np.isnan(exact).all()


# --- all together ---------------------------------------------------------------------------------


def test_pipeline():
    """Loads, two products in flight, stmatrix and stores together, exactly."""
    a, b, o, _ = simulated("pipeline")
    a, b, o = (m.array[0, :, 0] for m in (a, b, o))
    np.testing.assert_array_equal(o, ptx_cases.pipeline_result(a, b))


# --- schedules ------------------------------------------------------------------------------------

RACE_FREE = ["shared", "stmatrix", "barriers", "tma", "bulk", "pipeline"]
RACE_FREE += ["wgmma-64-float16-normal", "wgmma-176-bfloat16-normal", "wgmma-parts-64-normal"]
RACE_FREE += ["rows", "cp_async", "red", "mma-2-bfloat16-normal", "mma-tf32-narrow-2-normal"]


@pytest.mark.parametrize("name", RACE_FREE)
def test_every_schedule_gives_the_same_bits(name):
    """Six orders of the threads and of the arrival of copies."""
    results = set()
    for seed in (None, *range(5)):
        arguments = simulated(name, seed)
        results.add(b"".join(
            (x.array if isinstance(x, TensorMap) else x).tobytes()
            for x in arguments if not isinstance(x, int)
        ))  # fmt: skip
    assert len(results) == 1


def test_base_is_not_zero():
    """An address that forgets the start of dynamic shared memory is out of range."""
    assert BASE == 1024
