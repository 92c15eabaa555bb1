"""The NumPy backend against the specification: the pass rule, masks, leaks, strides, memory.

Tiles are forced small where the test is about many of them; with its own tiles the backend would
hold these problems in one step.
"""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from rule import assert_within_rule, eps

from flashnumba import reference
from flashnumba.kernels import blas
from flashnumba.kernels.blas import Tiling
from flashnumba.window import UNBOUNDED, interval

NAMES = ("o", "lse", "dq", "dk", "dv")
BF16 = ml_dtypes.bfloat16
DTYPES = [np.float16, BF16, np.float32, np.float64]
SMALL = Tiling(rows=12, keys=7, chunk_bytes=1)  # many tiles, one head a chunk
TILINGS = {
    "small": SMALL,
    "one_row": Tiling(rows=1, keys=5, chunk_bytes=1 << 20),  # all heads in one chunk
    "wide": Tiling(rows=16, keys=64, chunk_bytes=20_000),  # a few heads a chunk
    "own": blas.TILING,
}

# Lengths are for a batch of 3 with Sq = 37, Skv = 53, and include 0 and the whole.
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "upper_left": {"causal": "upper_left"},
    "window": {"window": (9, 3)},
    "left": {"window": (11, None)},
    "causal_window": {"causal": True, "window": (20, 8)},
    "upper_left_window": {"causal": "upper_left", "window": (2, None)},
    "ragged": {"q_lengths": [30, 0, 37], "kv_lengths": [53, 21, 9]},
    "ragged_kv": {"kv_lengths": [1, 0, 50]},
    "ragged_causal": {"q_lengths": [37, 20, 5], "kv_lengths": [11, 53, 30], "causal": True},
    "ragged_window": {"q_lengths": [25, 31, 8], "kv_lengths": [50, 0, 13], "window": (4, 1)},
}


def problem(
    seqlen_q=37, seqlen_kv=53, heads_q=6, heads_kv=2, dim=40, dim_v=None, batch=3, dtype=np.float32
):
    """q, k, v, do, dlse with every length off every tile; float32 numbers, in float64 too."""
    rng = np.random.default_rng(seqlen_q + 1000 * seqlen_kv + dim)
    dim_v = dim if dim_v is None else dim_v
    shapes = [
        (batch, seqlen_q, heads_q, dim),
        (batch, seqlen_kv, heads_kv, dim),
        (batch, seqlen_kv, heads_kv, dim_v),
        (batch, seqlen_q, heads_q, dim_v),
    ]
    arrays = [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]
    dlse = rng.standard_normal((batch, heads_q, seqlen_q), np.float32)
    return *arrays, dlse.astype(blas.compute_type(dtype))


def backend_mask(causal=False, window=None, q_lengths=None, kv_lengths=None):
    """The specification's keywords as those of the backend."""
    left, right = (UNBOUNDED if x is None else x for x in window or (None, None))
    return {
        "left": left,
        "right": min(right, 0) if causal else right,
        "upper_left": causal == "upper_left",
        "q_lengths": None if q_lengths is None else np.array(q_lengths, np.int64),
        "kv_lengths": None if kv_lengths is None else np.array(kv_lengths, np.int64),
    }


def run(q, k, v, do, dlse=None, *, tiling=SMALL, scale=None, **mask):
    """o, lse, dq, dk, dv of the backend."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    how = {"scale": scale, "tiling": tiling, **backend_mask(**mask)}
    o, lse = blas.forward(q, k, v, **how)
    return o, lse, *blas.backward(do, dlse, q, k, v, o, lse, **how)


def specification(q, k, v, do, dlse=None, *, low=False, **how):
    forward = reference.low_precision if low else reference.attention
    backward = reference.low_precision_backward if low else reference.attention_backward
    return *forward(q, k, v, **how), *backward(do, q, k, v, dlse=dlse, **how)


def baseline(arrays, exact, **how):
    """Results of plain attention in the inputs' dtype, whose distance from exact the rule allows.

    The specification is itself float64. There float32 gives the distance, in units of its eps.
    """
    if arrays[0].dtype != np.float64:
        return specification(*arrays, low=True, **how)
    low = specification(*(x.astype(np.float32) for x in arrays), low=True, **how)
    finer = eps(np.float64) / eps(np.float32)
    with np.errstate(invalid="ignore"):  # -inf - -inf
        return [np.where(e == l, e, e + finer * (l - e)) for e, l in zip(exact, low, strict=True)]


def assert_right(arrays, tiling=SMALL, **how):
    dtype = arrays[0].dtype
    got = run(*arrays, tiling=tiling, **how)
    exact = specification(*arrays, **how)
    low = baseline(arrays, exact, **how)
    for name, g, e, l in zip(NAMES, got, exact, low, strict=True):
        assert g.dtype == (blas.compute_type(dtype) if name == "lse" else dtype), name
        assert_within_rule(g, e, l, g.dtype, name)
    return got


def assert_same(got, expected):
    for g, e in zip(got, expected, strict=True):
        np.testing.assert_array_equal(g, e)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 8, 40, 64, 111])
def test_pass_rule(dim, dtype, mask):
    if dim == 1 and dtype in (np.float32, np.float64):
        # Scores of one product have heavy tails: many heads, lest the luck of one row decide.
        assert_right(problem(dim=1, heads_q=48, heads_kv=16, dtype=dtype), scale=0.25, **mask)
    else:
        assert_right(problem(dim=dim, dtype=dtype), **mask)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("tiling", TILINGS.values(), ids=TILINGS)
def test_any_tiling(tiling, mask):
    assert_right(problem(), tiling=tiling, **mask)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 1), (10, 2), (21, 3), (40, 1)])
def test_grouped_heads(heads):
    """Groups that do and do not divide the 12 rows of a tile, and one that exceeds them."""
    arrays = problem(heads_q=heads[0], heads_kv=heads[1], batch=2, dim=8)
    assert_right(arrays, causal=True)


@pytest.mark.parametrize("seqlens", [(1, 1), (1, 53), (37, 1), (53, 37), (7, 14), (129, 3)])
@pytest.mark.parametrize("causal", [False, True, "upper_left"])
def test_lengths(seqlens, causal):
    assert_right(problem(*seqlens, dim=16, dim_v=24), causal=causal)


@pytest.mark.parametrize(
    "sizes", [{"seqlen_q": 0}, {"seqlen_kv": 0}, {"batch": 0}, {"heads_q": 0, "heads_kv": 0}]
)
@pytest.mark.parametrize("tiling", [SMALL, blas.TILING])
def test_empty(sizes, tiling):
    arrays = problem(**sizes)
    o, lse, *grads = run(*arrays, tiling=tiling)
    assert o.shape == arrays[3].shape and lse.shape == arrays[4].shape
    assert (o == 0).all() and (lse == -np.inf).all()
    for grad, x in zip(grads, arrays, strict=False):
        assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_without_keys_is_exactly_zero(dtype):
    """Causal, Sq 53 > Skv 37: the first 16 queries stand before every key."""
    o, lse, dq, *_ = run(*problem(53, 37, dtype=dtype), causal=True)
    assert (o[:, :16] == 0).all() and (dq[:, :16] == 0).all() and (lse[..., :16] == -np.inf).all()
    assert np.isfinite(lse[..., 16:]).all()


def test_window_over_the_whole_past_is_causal_to_the_bit():
    arrays = problem(53, 53)
    assert_same(run(*arrays, causal=True), run(*arrays, window=(52, 0)))


def test_kv_length_is_a_slice_to_the_bit():
    q, k, v, do, dlse = problem(batch=1)
    padded = run(q, k, v, do, dlse, kv_lengths=[29], causal=True)
    sliced = run(q, k[:, :29], v[:, :29], do, dlse, causal=True)
    assert_same(padded[:3], sliced[:3])
    for got, expected in zip(padded[3:], sliced[3:], strict=True):
        np.testing.assert_array_equal(got[:, :29], expected)
        assert (got[:, 29:] == 0).all()


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("tiling", [SMALL, blas.TILING])
def test_hidden_nan_and_infinity_do_not_leak(tiling, mask):
    """Poison in every key no query sees and every query that sees no key changes no bit."""
    q, k, v, do, dlse = problem(batch=3)
    mask = {"q_lengths": [36, 20, 37], "kv_lengths": [53, 40, 50], **mask}
    seen = reference.visible(q, k, **mask)[:, 0]
    clean = run(q, k, v, do, dlse, tiling=tiling, **mask)
    poison = np.resize([np.nan, np.inf, -np.inf], 200)
    idle_queries, idle_keys = ~seen.any(axis=2), ~seen.any(axis=1)
    for x in (q, do):
        x[idle_queries] = poison[: idle_queries.sum(), None, None]
    for x in (k, v):
        x[idle_keys] = poison[: idle_keys.sum(), None, None]
    dlse.swapaxes(1, 2)[idle_queries] = np.nan
    assert_same(run(q, k, v, do, dlse, tiling=tiling, **mask), clean)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_visible_nan_and_infinity_spread_as_specified(mask, which, value):
    """One bad number: what is finite in the specification is finite and right, the rest is not.

    Except dv, where the specification spreads a NaN row of p to keys that the row does not see.
    """
    arrays = problem(dim=5, dim_v=4, batch=1 if "lengths" not in "".join(mask) else 3)
    arrays[which][:, 17, 1, 2] = value
    exact = specification(*arrays, **mask)
    for tiling in (SMALL, blas.TILING):
        got = run(*arrays, tiling=tiling, **mask)
        for name, g, e in zip(NAMES, got, exact, strict=True):
            finite = np.isfinite(e)
            np.testing.assert_allclose(g[finite], e[finite], 1e-3, 1e-4)
            assert not np.isfinite(g[~finite]).any(), name


def views():
    """Ways to see the numbers of an array: other strides, same values."""

    def strided(x):
        big = np.full((*x.shape[:2], 2 * x.shape[2], x.shape[3] + 1), np.nan, x.dtype)
        big[:, :, ::2, 1:] = x
        return big[:, :, ::2, 1:]  # every other head, rows at an odd offset

    return {
        "transposed": lambda x: x.transpose(3, 1, 0, 2).copy().transpose(2, 1, 3, 0),
        "fortran": np.asfortranarray,
        "reversed": lambda x: x[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1],
        "strided": strided,
    }


@pytest.mark.parametrize("view", views().values(), ids=views())
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_strides_change_no_bit(view, dtype):
    *arrays, dlse = problem(dtype=dtype, dim_v=24)
    expected = run(*arrays, dlse, causal=True)
    assert_same(run(*map(view, arrays), dlse.T.copy().T, causal=True), expected)


@pytest.mark.parametrize("axis", range(4))
def test_stride_zero(axis):
    arrays = problem()[:4]
    broadcast = [np.broadcast_to(x.take([0], axis), x.shape) for x in arrays]
    assert_same(run(*broadcast), run(*(x.copy() for x in broadcast)))


def test_inputs_are_only_read():
    arrays = problem(dtype=np.float32)
    copies = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    o, lse, *_ = run(*arrays, causal=True)
    assert_same(arrays, copies)
    assert not any(np.shares_memory(out, x) for out in (o, lse) for x in arrays)


def test_same_bits_again():
    arrays = problem(300, 700, dim=64, batch=1)
    first = run(*arrays, tiling=blas.TILING, causal=True)
    for _ in range(3):
        assert_same(run(*arrays, tiling=blas.TILING, causal=True), first)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_equal_inputs_return_v(dtype):
    q = np.full((1, 5, 2, 16), 1000, dtype)
    o, _ = blas.forward(q, q, q, scale=0.25, tiling=SMALL, **backend_mask())
    assert_same([o], [q])


def test_one_key_of_hugely_negative_score():
    q, k, v, do, _ = problem(1, 1, 1, 1, dim=4, batch=1)
    q[:], k[:] = 512, -256  # q k = -524288
    o, lse, dq, dk, dv = run(q, k, v, do, scale=1.0)
    assert_same([o, lse, dq, dk, dv], [v, [[[-524288]]], 0 * q, 0 * k, do])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("dim", [16, 128])
def test_inputs_times_three(dtype, dim):
    q, k, v, do, dlse = problem(130, 130, 1, 1, dim=dim, batch=1, dtype=dtype)
    assert_right((3 * q, 3 * k, 3 * v, do, dlse), causal=True)


def test_gradient_through_lse_alone():
    q, k, v, do, dlse = problem(dtype=np.float64)
    *_, dq, dk, dv = run(q, k, v, 0 * do, dlse, causal=True)
    exact = reference.attention_backward(0 * do, q, k, v, dlse=dlse, causal=True)
    np.testing.assert_allclose(dq, exact[0], 1e-11, 1e-12)
    np.testing.assert_allclose(dk, exact[1], 1e-11, 1e-12)
    assert (dv == 0).all()


@pytest.mark.parametrize("left, right", [(UNBOUNDED, 0), (9, 3), (0, 0), (UNBOUNDED, UNBOUNDED)])
def test_key_tiles_cover_what_rows_see(left, right):
    """Each visible pair once, nothing else, and no mask where all rows see all keys."""
    q, k, v, *_ = problem(batch=1)
    mask = {**backend_mask(), "left": left, "right": right}
    geometry = blas.Geometry(q.shape, k.shape, v.shape, **mask)
    for queries in geometry.query_tiles(SMALL.rows):
        lo, hi = geometry.visible_keys(slice(0, 1), queries)
        pairs = [interval(i, 53 - 37, left, right, 53) for i in range(queries.start, queries.stop)]
        assert list(zip(lo.ravel(), hi.ravel(), strict=True)) == pairs * 3
        count = np.zeros((lo.size, 53), int)
        for keys, seen in blas.key_tiles(lo, hi, SMALL.keys):
            count[:, keys] += 1 if seen is None else seen[0, 0]
            assert seen is None or not seen.all()
        expected = [[a <= j < b for j in range(53)] for a, b in pairs * 3]
        np.testing.assert_array_equal(count, expected)


def peak_bytes(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_memory_is_a_tenth_of_the_scores(dtype):
    """S 2048, 8 heads: dense scores in float32 take 134 MB; results are not counted."""
    q, k, v, do, _ = problem(2048, 2048, 8, 8, dim=16, batch=1, dtype=dtype)
    how = {"scale": 0.1, **backend_mask(causal=True)}
    results = []
    forward = peak_bytes(lambda: results.extend(blas.forward(q, k, v, **how)))
    backward = peak_bytes(lambda: blas.backward(do, None, q, k, v, *results, **how))
    forward -= sum(x.nbytes for x in results)
    backward -= sum(x.nbytes for x in (q, k, v))
    scores = 8 * 2048 * 2048 * 4
    assert forward < scores / 10 and backward < scores / 10


def test_memory_is_linear_in_length():
    """Four times the keys add their packed copies (and gradients), not a larger score tile."""

    def peak(seqlen):
        q, k, v, do, dlse = problem(64, seqlen, 1, 1, dim=32, batch=1)
        return peak_bytes(lambda: run(q, k, v, do, dlse, tiling=Tiling(64, 256, 1 << 20)))

    packed = 12288 * (32 + 32) * 4
    assert peak(16384) - peak(4096) < 4.5 * packed  # k, v; dk, dv; the results dk, dv; finite flags


@pytest.mark.parametrize("causal", [False, True])
def test_tens_of_thousands_of_tiny_sequences(causal, monkeypatch):
    """Batch 65536, S 16, D 8: chunks hold hundreds of sequences, and the last one is right."""
    steps = []
    forward_tile = blas.forward_tile
    monkeypatch.setattr(blas, "forward_tile", lambda *a: steps.append(1) or forward_tile(*a))
    q, k, v, *_ = problem(16, 16, 1, 1, dim=8, batch=65536)
    o, lse = blas.forward(q, k, v, scale=0.5, **backend_mask(causal=causal))
    assert len(steps) < 200
    exact = reference.attention(q[-3:], k[-3:], v[-3:], scale=0.5, causal=causal)
    np.testing.assert_allclose(o[-3:], exact[0], 1e-4, 1e-5)
    np.testing.assert_allclose(lse[-3:], exact[1], 1e-4, 1e-5)
