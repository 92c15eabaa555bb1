"""Cases that hurt users of other attention libraries, each with its one right answer.

A docstring names the issue that the case comes from: FA is Dao-AILab/flash-attention, FI
FlashInfer, PT PyTorch, XF xFormers; cuDNN-FE and transformers speak for themselves. A number is
missing where the feature is. The simulator runs the same cases on smaller sizes, off every tile.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from calls import (
    DTYPES,
    MASKS,
    RESULTS,
    assert_right,
    assert_same_bits,
    check,
    masks,
    named,
    of_blocks,
    on_gpu,
    problem,
    run,
    taken,
    tensor_cores,
    to_gpu,
)
from conftest import GPU
from rule import assert_within_rule

import flashnumba as fn
from flashnumba import arrays, reference, runtime, simulate
from flashnumba.kernels import blas

INF, NAN = float("inf"), float("nan")
# For what only the backward or the checks of arguments decide, which are not tensor cores' own.
NO_TENSOR_CORES = pytest.mark.parametrize("backend", ["numpy", "simulator", GPU])
GRADIENTS = ("dq", "dk", "dv")


def size(backend, full, simulated):
    """`full`, or what the simulator can do in a second or two."""
    return simulated if backend.startswith("simulator") else full


def enough(backend, representative):
    """Simulated tensor cores, 2 s a call, run one case of several that are the same to them."""
    if of_blocks(backend) and not representative:
        pytest.skip("another of these cases runs in this simulator")


def assert_copied(backend, got, values):
    """The weight 1 copies a value: to the bit, but for float32 on tensor cores to 2^-22."""
    limit = 2.0**-22 if tensor_cores(backend) and got.dtype == np.float32 else 0
    assert np.array_equal(got, values) or np.allclose(got, values, rtol=limit, atol=0)


def run_problem(backend, p, **options):
    return run(backend, p.q, p.k, p.v, p.do, p.dlse, **options)


def hidden(p, **mask):
    """Queries that see no key, (B, Sq), and keys that no query sees, (B, Skv)."""
    seen = reference.visible(p.q, p.k, **mask)[:, 0]
    return ~seen.any(axis=2), ~seen.any(axis=1)


def assert_finite(got, names=("o", *GRADIENTS)):
    for name in names:
        assert np.isfinite(getattr(got, name).astype(np.float32)).all(), name


# --- empty rows, infinities -----------------------------------------------------------------------


def test_case_01_causal_with_more_queries_than_keys(backend):
    """FA 978: the first rows have no key: output 0, lse -inf, gradient 0; all else is right."""
    got = check(backend, problem(5, 2, dtype=taken(backend)), causal=True)
    assert not got.o[:, :3].any() and not got.dq[:, :3].any()
    assert (got.lse[:, :, :3] == -INF).all()
    assert np.isfinite(got.lse[:, :, 3:]).all()


def test_case_02_merging_parts_some_of_them_empty(backend):
    """FI 4051: (0, -inf) is neutral to the bit; two parts with keys give the whole."""
    heads = 1 if of_blocks(backend) else 2
    p = problem(5, 37, batch=4, heads=heads, dtype=taken(backend))
    halves = slice(0, 20), slice(20, None)
    lengths = [0, 20, 20, 0], [17, 0, 17, 0]
    first, second = (
        run(backend, p.q, p.k[:, keys], p.v[:, keys], kv_lengths=n)
        for keys, n in zip(halves, lengths, strict=True)
    )
    o, lse = reference.merge(first.o, first.lse, second.o, second.lse)
    for entry, part in ((0, second), (1, first)):
        assert o[entry].astype(p.q.dtype).tobytes() == part.o[entry].tobytes()
        assert lse[entry].tobytes() == part.lse[entry].tobytes()
    whole = [x[2:3] for x in (p.q, p.k, p.v)]
    for got, exact, low in zip(
        (o, lse), reference.attention(*whole), reference.low_precision(*whole), strict=True
    ):
        assert_within_rule(got[2:3], exact, low, p.q.dtype)
    assert not o[3].any() and (lse[3] == -INF).all()


@pytest.mark.parametrize("mask", MASKS)
def test_case_03_lse_is_minus_infinity_exactly_where_no_key_is_seen(backend, mask):
    """FI 4484: and there, and only there, the output is 0."""
    p = problem(21, 19, batch=2, dtype=taken(backend))
    options = masks(21, 19)[mask]
    got = run(backend, p.q, p.k, p.v, **options)
    empty = hidden(p, **options)[0][:, :, None]  # (B, Sq, 1)
    assert np.array_equal(got.lse == -INF, empty.swapaxes(1, 2))
    assert np.array_equal((got.o == 0).all(axis=3), empty)
    assert np.isfinite(got.lse[got.lse != -INF]).all()


def test_case_04_one_key_with_a_huge_negative_score(backend):
    """FI 4451: q.k = -524288 before scaling: the one key is copied, and so is do to dv."""
    p = problem(3, 1, dtype=taken(backend))
    p.q[...], p.k[...] = -32768, 1
    got = run_problem(backend, p)
    assert_copied(backend, got.o, np.broadcast_to(p.v, got.o.shape))
    assert (got.lse == -524288 / 4).all()
    alone = run(backend, p.q[:, :1], p.k, p.v, p.do[:, :1])
    assert_copied(backend, alone.dv, p.do[:, :1])


def test_case_05_one_row_without_a_key(backend):
    """PT 103963: that row is 0; the others are as if it were not there."""
    p = problem(36, 35, dtype=taken(backend))
    got = check(backend, p, causal=True)
    assert not got.o[:, 0].any() and not got.dq[:, 0].any() and (got.lse[:, :, 0] == -INF).all()
    rest = run(backend, p.q[:, 1:], p.k, p.v, p.do[:, 1:], p.dlse[:, :, 1:], causal=True)
    got.o, got.dq, got.lse = got.o[:, 1:], got.dq[:, 1:], got.lse[:, :, 1:]
    # BLAS may sum in another order for another number of rows; the 32 rows that a warp of mma has
    # raise their maxima together, and are other rows here.
    if backend not in ("numpy", "simulator-mma", "gpu-mma"):
        assert_same_bits(got, rest, ("o", "lse", "dq"))  # dk and dv sum over other tiles of queries
    assert_right(got, p.q[:, 1:], p.k, p.v, p.do[:, 1:], p.dlse[:, :, 1:], causal=True)


def test_case_06_visible_scores_of_finfo_min(backend):
    """PT 110213: a row of equal scores, however low, has uniform weights; here made by q k^T."""
    if taken(backend, "float32") != "float32":
        pytest.skip("finfo.min of float32, which halves do not hold")
    p = problem(3, 32, dim=8)
    p.q[...], p.k[...], p.v[...] = 0, 0, np.rint(8 * p.v)
    p.q[..., 0], p.k[..., 0] = np.finfo(np.float32).min, 1
    got = run(backend, p.q, p.k, p.v, scale=1.0)
    assert np.array_equal(got.o, np.broadcast_to(p.v.mean(axis=1, keepdims=True), got.o.shape))
    assert (got.lse == np.finfo(np.float32).min).all()


HIDING = {
    "upper_left": (20, 37, "float16", {"causal": "upper_left"}),
    "causal": (37, 20, "float32", {"causal": True}),
    "window": (5, 40, "bfloat16", {"window": (3, None)}),
    "window_ahead": (40, 18, "float64", {"window": (None, 2)}),
    "padding": (20, 35, "float32", {"q_lengths": [17, 3], "kv_lengths": [33, 0]}),
    "padding_causal_window": (
        20, 35, "float16",
        {"q_lengths": [20, 11], "kv_lengths": [18, 34], "causal": True, "window": (6, None)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HIDING)
def test_case_07_what_is_hidden_may_be_anything(backend, case):
    """PT 101967: NaN and Inf that nobody sees, padding too, change no bit of any result."""
    seqlen_q, seqlen_kv, dtype, options = HIDING[case]
    dtype, heads = taken(backend, dtype), 1 if of_blocks(backend) else 2
    p = problem(seqlen_q, seqlen_kv, batch=2, heads=heads, heads_kv=1, dtype=dtype)
    queries, keys = hidden(p, **options)
    assert queries.any() or keys.any()
    results = []
    for fill in ([0, 0, 0], [NAN, INF, -INF]):
        for x, where in ((p.q, queries), (p.do, queries), (p.k, keys), (p.v, keys)):
            x[where] = np.resize(fill, x[where].shape)
        p.dlse[np.broadcast_to(queries[:, None], p.dlse.shape)] = fill[0]
        results.append(run_problem(backend, p, **options))
    clean, poisoned = results
    assert_finite(poisoned)
    visible = np.broadcast_to(~queries[:, None], poisoned.lse.shape)
    assert np.array_equal(np.isfinite(poisoned.lse), visible)
    assert_same_bits(poisoned, clean)


def test_case_07_a_nan_reaches_only_the_rows_that_see_it(backend):
    """PT 101967: a key in the middle of a masked tile: causal rows before it change no bit."""
    p = problem(37, 37, heads=2, heads_kv=1, dtype=taken(backend))
    clean = run_problem(backend, p, causal=True)
    for x in (p.k, p.v):
        x[:, 18] = NAN
    poisoned = run_problem(backend, p, causal=True)
    assert np.isnan(poisoned.o[:, 18:]).all() and np.isnan(poisoned.dq[:, 18:]).all()
    for name, x in (("o", 1), ("dq", 1), ("lse", 2)):
        before = [np.split(getattr(y, name), [18], axis=x)[0] for y in (clean, poisoned)]
        assert before[0].tobytes() == before[1].tobytes(), name


@pytest.mark.parametrize("value", [0, 1e30, NAN, INF])
def test_case_08_a_masked_row_leaves_the_gradients_of_others(backend, value):
    """PT 41508: whatever stands in it, all other gradients stay as they were, to the bit."""
    enough(backend, value != 0)
    if value == 1e30 and taken(backend) != "float32":
        pytest.skip("no number of float16")
    p = problem(21, 20, heads=2, heads_kv=1, dtype=taken(backend))
    expected = check(backend, p, causal=True)
    p.q[:, 0], p.do[:, 0], p.dlse[:, :, 0] = value, value, value
    got = run_problem(backend, p, causal=True)
    assert_same_bits(got, expected)


NOTHING = {
    "no_keys": ((5, 0), {}),
    "no_keys_causal": ((5, 0), {"causal": True}),
    "no_real_keys": ((5, 3), {"kv_lengths": [0]}),
    "no_queries": ((0, 5), {}),
    "no_queries_window": ((0, 5), {"window": (1, 1)}),
    "no_real_queries": ((3, 5), {"q_lengths": [0]}),
    "neither": ((0, 0), {}),
}


@pytest.mark.parametrize("case", NOTHING)
def test_case_09_no_keys_or_no_queries(backend, case):
    """FA 2470, FA 2515: lengths of 0 give zeros and -inf, or empty arrays, never an error."""
    lengths, options = NOTHING[case]
    got = check(backend, problem(*lengths, heads=2, dtype=taken(backend)), **options)
    assert not any(getattr(got, name).any() for name in ("o", *GRADIENTS))
    assert (got.lse == -INF).all()


def test_case_09_an_empty_batch(backend):
    """FA 2515: a batch of 0 gives empty arrays."""
    got = check(backend, problem(5, 7, batch=0, dtype=taken(backend)))
    assert [getattr(got, n).size for n in RESULTS] == [0] * 5


def test_case_10_lse_of_padded_rows(backend):
    """PT 134650: -inf, not 0, for padded queries and for queries whose keys are all padding."""
    p = problem(4, 4, batch=3, dtype=taken(backend))
    got = run(backend, *arrays_of(p), q_lengths=[4, 2, 4], kv_lengths=[4, 4, 0])
    assert np.array_equal(np.isfinite(got.lse[:, 0]).sum(axis=1), [4, 2, 0])
    assert (got.lse[1, 0, 2:] == -INF).all() and (got.lse[2] == -INF).all()


def arrays_of(p):
    return p.q, p.k, p.v


# --- alignment, windows ---------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, "upper_left"])
@pytest.mark.parametrize("few_queries", [True, False])
def test_case_12_both_corners(backend, causal, few_queries):
    """FA 282: 3 queries to 799 keys and the reverse: lower right by default, upper left by name."""
    many = size(backend, 799, 83)
    lengths = (3, many) if few_queries else (many, 3)
    p = problem(*lengths, dtype=taken(backend))
    got = check(backend, p, causal=causal)
    first, last = got.o[0, 0, 0], got.o[0, -1, 0]
    if causal == "upper_left":
        assert_copied(backend, first, p.v[0, 0, 0])  # one key
    elif not few_queries:
        assert not first.any() and last.any()


def test_case_13_half_of_the_rows_see_nothing(backend):
    """FA 1778: causal, twice as many queries as keys."""
    many = size(backend, 1024, 35)
    got = check(backend, problem(2 * many, many, dtype=taken(backend)), causal=True)
    assert not got.o[:, :many].any() and (got.lse[:, :, :many] == -INF).all()
    assert got.o[:, many:].any(axis=3).all()


@pytest.mark.parametrize("lengths", [(37, 37), (20, 37), (37, 20)])
def test_case_14_a_window_as_long_as_the_keys_is_causal(backend, lengths):
    """FA 1133: window (S - 1, 0) equals causal bit for bit."""
    p = problem(*lengths, dtype=taken(backend))
    windowed = run_problem(backend, p, window=(max(lengths) - 1, 0))
    assert_same_bits(windowed, run_problem(backend, p, causal=True))


def test_case_15_a_bound_of_zero_on_the_right_is_kept(backend):
    """FA 2574: window (None, 0) is causal, not unbounded."""
    p = problem(20, 37, dtype=taken(backend))
    windowed = run_problem(backend, p, window=(None, 0))
    assert_same_bits(windowed, run_problem(backend, p, causal=True))
    assert not np.array_equal(windowed.o, run(backend, *arrays_of(p)).o)


def test_case_16_a_window_of_three_sees_four_keys(backend):
    """transformers 39408: the query's own position and 3 before it, each with a quarter."""
    p = problem(21, 21, dim=21, dtype=taken(backend))
    p.q[...], p.v[...] = 0, np.eye(21)[None, :, None]
    got = run(backend, *arrays_of(p), window=(3, 0))
    expected = np.tri(21) - np.tri(21, k=-4)
    assert np.array_equal(expected[4:].sum(axis=1), np.full(17, 4))
    assert np.array_equal(got.o[0, 3:, 0], expected[3:] / 4)
    assert_same_bits(got, run(backend, *arrays_of(p), causal=True, window=(3, 9)), ("o", "lse"))


def test_case_17_decoding_with_a_window(backend):
    """Sq 1, left 128: of 1000 keys only the last 129 count, and both ends of them do."""
    keys, left = size(backend, (1000, 128), (90, 20))
    p = problem(1, keys, heads=2, heads_kv=1, dtype=taken(backend))
    options = {"window": (left, 0)}
    got = check(backend, p, **options)
    first = keys - left - 1
    for x in (p.k, p.v):
        x[:, :first] = NAN
    assert_same_bits(run_problem(backend, p, **options), got)
    assert not got.dk[:, :first].any() and not got.dv[:, :first].any()
    assert got.dv[:, first:].any(axis=3).all()


# --- size -----------------------------------------------------------------------------------------


def check_repeated(backend, p, batch, **options):
    """`check` for a batch that repeats the entries of `p`, which then have to repeat to the bit."""
    period = len(p.q)
    repeated = np.arange(batch) % period
    inputs = [x[repeated] for x in (p.q, p.k, p.v, p.do, p.dlse)]
    got = run(backend, *inputs, **options)
    for name in RESULTS:
        x = getattr(got, name)
        assert x[period:].tobytes() == x[:-period].tobytes(), name
        setattr(got, name, x[:period])
    assert_right(got, *(x[:period] for x in inputs), **options)


def test_case_19_a_batch_beyond_65535(backend):
    """XF 845: batch 65536, 16 tokens, head_dim 80 (16 on the CPU): more than a grid's y and z."""
    dim = size(backend, 80 if on_gpu(backend) else 16, 40)
    p = problem(16, 16, batch=2, dim=dim, dtype=taken(backend, "float16"))
    check_repeated(backend, p, size(backend, 65536, 3))


def test_case_20_backward_of_a_large_batch(backend):
    """FA 1500: batch 15,000, causal, backward."""
    enough(backend, False)  # but case 19
    seqlen, dim = (37, 64) if on_gpu(backend) else size(backend, (19, 16), (5, 8))
    p = problem(seqlen, seqlen, batch=7, heads=2, heads_kv=1, dim=dim, dtype=taken(backend))
    check_repeated(backend, p, size(backend, 15000, 9), causal=True)


@pytest.mark.gpu
@pytest.mark.slow
def test_case_21_more_than_2_to_the_31_numbers():
    """FA 767: the first and the last rows of a q of more than 2**31 elements, with gradients."""
    import cupy

    seqlen, heads, dim, edge = 8200, 4096, 64, 5
    shape = (1, seqlen, heads, dim)
    assert (seqlen - edge) * heads * dim > 2**31
    if cupy.cuda.Device().mem_info[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    p = problem(2 * edge, 9, heads=heads, dim=dim, dtype="float16")
    q, do = (cupy.zeros(shape, np.float16) for _ in range(2))
    for x, rows in ((q, p.q), (do, p.do)):
        x[:, :edge], x[:, -edge:] = cupy.asarray(rows[:, :edge]), cupy.asarray(rows[:, edge:])
    k, v = cupy.asarray(p.k), cupy.asarray(p.v)
    (o, lse), pullback = fn.attention_vjp(q, k, v, return_lse=True)
    dq, dk, dv = pullback(do)
    o, dq = (cupy.concatenate((x[:, :edge], x[:, -edge:]), axis=1) for x in (o, dq))
    lse = cupy.concatenate((lse[..., :edge], lse[..., -edge:]), axis=2)
    found = zip(RESULTS, (o, lse, dq, dk, dv), strict=True)
    got = SimpleNamespace(**{name: x.get() for name, x in found})
    assert_right(got, p.q, p.k, p.v, p.do)


# --- backward -------------------------------------------------------------------------------------


def test_case_22_one_key_gives_no_gradient_to_q(backend):
    """FA 334: softmax over one key is constant: dq and dk are exactly 0, o is v, dv is do.

    Tensor cores add in another order than delta is added in: there dp - delta is rounding alone.
    """
    p = problem(1, 1, dtype=taken(backend, "float16"), factor=3)
    got = run(backend, p.q, p.k, p.v, p.do)
    limit = (
        2.0**-20 * np.abs(p.do.astype(float)).sum() * np.abs(p.v).max()
        if tensor_cores(backend)
        else 0
    )
    assert np.abs(got.dq).max() <= limit and np.abs(got.dk).max() <= limit
    assert np.array_equal(got.o, p.v) and np.array_equal(got.dv, p.do)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_case_23_large_inputs(backend, dtype):
    """FA 1052: S 1024, D 128, inputs times 3, causal: softmax is sharp, gradients are large."""
    seqlen, dim = size(backend, (1024, 128), (21, 33))
    enough(backend, taken(backend, dtype) == dtype)
    p = problem(seqlen, seqlen, dim=dim, dtype=taken(backend, dtype), factor=3)
    assert_finite(check(backend, p, dlse=False, causal=True))


def test_case_24_one_key_for_many_queries(backend):
    """FA 443: sequences of 76, 34 and 146 queries and one key each, causal: the last sees it."""
    lengths = size(backend, [76, 34, 146], [19, 9, 37])
    p = problem(max(lengths), 1, batch=3, heads=2, dim=32, dtype=taken(backend))
    options = {"q_lengths": lengths, "kv_lengths": [1, 1, 1], "causal": True}
    got = check(backend, p, **options)
    assert_finite(got)
    assert np.array_equal(np.isfinite(got.lse).sum(axis=2), np.ones((3, 2)))


def test_case_25_a_sequence_without_queries(backend):
    """FA 1713: its dk and dv are 0, those of its neighbours are right."""
    queries, keys = size(backend, (150, 100), (37, 25))
    p = problem(queries, keys, batch=3, dtype=taken(backend))
    options = {"q_lengths": [queries, 0, queries], "kv_lengths": [keys] * 3}
    got = check(backend, p, **options)
    assert not got.dk[1].any() and not got.dv[1].any() and not got.o[1].any()
    assert got.dk[2].any()


def test_case_26_every_input_is_1000(backend):
    """FA 41: scores past float16's largest number: o is v, dq and dk 0; the baseline overflows."""
    p = problem(21, 19, dtype="float16", factor=0)
    for x in (p.q, p.k, p.v, p.do):
        x += 1000
    assert np.isnan(reference.low_precision(p.q, p.k, p.v)[0]).all()
    got = run(backend, p.q, p.k, p.v, p.do)
    assert (got.o == 1000).all()
    assert not got.dq.any() and not got.dk.any()
    assert_finite(got)


@pytest.mark.parametrize("causal", [False, True])
def test_case_29_lengths_off_every_tile(backend, causal):
    """cuDNN-FE 160: 333 queries, 517 keys."""
    dtype = taken(backend, "float16")
    p = problem(*size(backend, (333, 517), (33, 53)), heads=2, heads_kv=1, dtype=dtype)
    check(backend, p, causal=causal)


@NO_TENSOR_CORES
@pytest.mark.parametrize("causal", [False, True])
def test_case_30_gradient_through_lse(backend, causal):
    """FA 141: the loss is sum(lse): dq = scale * P K, dv = 0."""
    p = problem(21, 35, heads=2, heads_kv=1)
    p.do[...], p.dlse[...] = 0, 1
    got = check(backend, p, causal=causal)
    assert not got.dv.any()
    weights, _ = reference.attention(p.q, p.k, np.eye(35)[None, :, None], causal=causal)
    expected = 0.25 * np.einsum("bihj,bjd->bihd", weights, p.k[:, :, 0].astype(float))
    low = reference.low_precision_backward(p.do, p.q, p.k, p.v, dlse=p.dlse, causal=causal)[0]
    assert_within_rule(got.dq, expected, low, np.float32, "dq")


# --- strides --------------------------------------------------------------------------------------


def every_other(axis):
    """The same values as every other entry of an array of twice the length along `axis`."""
    pick = (slice(None),) * axis + (slice(None, None, 2),)
    return lambda x: np.repeat(x, 2, axis=axis)[pick]


def odd_offset(x):
    """The same values, one number behind the start of their memory."""
    buffer = np.zeros(x.size + 1, x.dtype)
    buffer[1:] = x.ravel()
    return buffer[1:].reshape(x.shape)


def stored_as(*order):
    """The same values, with the axes in memory in another order."""
    back = np.argsort(order)
    return lambda x: np.ascontiguousarray(x.transpose(order)).transpose(back)


def constant_along(*axes):
    """A view of stride 0 along `axes`: its first entry everywhere."""
    return lambda x: np.broadcast_to(
        x[tuple(slice(1) if i in axes else slice(None) for i in range(4))], x.shape
    )


def reversed_rows(x):
    return x[:, ::-1].copy()[:, ::-1]


VIEWS = {
    31: {
        "do_every_other_column": {"do": every_other(3)},
        "do_heads_outside": {"do": stored_as(0, 2, 1, 3)},
        "do_constant": {"do": constant_along(0, 1, 2, 3)},
        "do_constant_over_rows": {"do": constant_along(1)},
        "k_transposed": {"k": stored_as(0, 2, 3, 1)},
    },
    32: {
        "one_key_head": {"k": constant_along(2), "v": constant_along(2)},
        "one_batch": {"k": constant_along(0), "v": constant_along(0)},
        "one_of_both": {"k": constant_along(0, 2), "v": constant_along(0, 2)},
    },
    33: {
        "every_other_head": dict.fromkeys(("q", "k", "v", "do"), every_other(2)),
        "reversed": dict.fromkeys(("q", "k", "v", "do"), reversed_rows),
        "odd_offset": dict.fromkeys(("q", "k", "v", "do"), odd_offset),
        "columns_outside": dict.fromkeys(("q", "k", "v", "do"), stored_as(3, 0, 1, 2)),
    },
}


def check_views(backend, views):
    """Views give the results of contiguous copies to the bit, which are right."""
    dtype = taken(backend, "float16")
    p = problem(*size(backend, (75, 101), (5, 19)), batch=2, heads=2, dtype=dtype)
    for name, view in views.items():
        x = view(getattr(p, name))
        assert x.strides != getattr(p, name).strides or x.ctypes.data % 16  # no plain copy
        setattr(p, name, x)
    got = run_problem(backend, p, causal=True)
    for name in views:
        setattr(p, name, getattr(p, name).copy(order="C"))
    assert_same_bits(got, check(backend, p, causal=True))


@NO_TENSOR_CORES
@pytest.mark.parametrize("views", VIEWS[31].values(), ids=VIEWS[31])
def test_case_31_strided_and_broadcast_gradients(backend, views):
    """FA 355, FA 325, FA 818: do in any strides, 0 included; q contiguous beside a transposed k."""
    check_views(backend, views)


@pytest.mark.parametrize("views", VIEWS[32].values(), ids=VIEWS[32])
def test_case_32_broadcast_keys_and_values(backend, views):
    """K and V of stride 0 over heads, batch or both; their gradients are full arrays."""
    enough(backend, views is VIEWS[32]["one_of_both"])
    check_views(backend, views)


@pytest.mark.parametrize("views", VIEWS[33].values(), ids=VIEWS[33])
def test_case_33_slices(backend, views):
    """Every other head, a negative stride, an odd offset that breaks 16-byte loads."""
    enough(backend, views in (VIEWS[33]["every_other_head"], VIEWS[33]["reversed"]))
    check_views(backend, views)


# --- values and groups ----------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("heads", "heads_kv"), [(3, 1), (10, 2), (7, 1), (8, 1)])
def test_case_34_groups_that_are_no_power_of_two(backend, heads, heads_kv, dim):
    """FI 258: 3, 5, 7 and 8 query heads a key head."""
    seqlens = size(backend, (75, 101), (5, 7))
    dim = size(backend, dim, {64: 8, 128: 33}[dim])
    dtype = "float32" if backend == "simulator" else taken(backend, "float16")
    enough(backend, (heads, dim) == (3, 8))
    check(backend, problem(*seqlens, heads=heads, heads_kv=heads_kv, dim=dim, dtype=dtype))


@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(d, d) for d in (1, 8, 40, 80, 96, 111, 160, 192, 256)] + [(64, 128), (128, 64)],
)
def test_case_35_head_dimensions(backend, dim, dim_v):
    """PT 133321: any head_dim, and a head_dim_v of its own; causal, off every tile."""
    if dim != dim_v and tensor_cores(backend):
        pytest.skip("tensor cores take one head_dim for both")
    dtype = "float16" if tensor_cores(backend) and dim > 128 else taken(backend)
    p = problem(*size(backend, (133, 151), (5, 7)), dim=dim, dim_v=dim_v, dtype=dtype)
    # The simulator has one block for every 32 columns, each of which computes all scores again.
    check(backend, p, causal=True, backward=size(backend, True, max(dim, dim_v) < 96))


def test_case_37_the_same_bits_again(backend, monkeypatch):
    """FA 349: forward and backward, many times, and for any order of the simulated threads."""
    dtype = taken(backend, "float16")
    p = problem(*size(backend, (333, 517), (20, 37)), heads=2, heads_kv=1, dtype=dtype)
    expected = run_problem(backend, p, causal=True)
    launch = simulate.launch
    for seed in range(50 if on_gpu(backend) else size(backend, 5, 3)):
        monkeypatch.setattr(simulate, "launch", functools.partial(launch, seed=seed))
        assert_same_bits(run_problem(backend, p, causal=True), expected)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_sums_in_any_order(backend, dim, causal):
    """Without `deterministic` the blocks of a backward on tensor cores add to dq as they come."""
    if not tensor_cores(backend):
        pytest.skip("always in one order")
    enough(backend, causal)
    dtype = taken(backend, "float16")
    if dtype == "float32" and dim > 128:
        pytest.skip("float32 on tensor cores has a head_dim of 128 at most")
    p = problem(*size(backend, (333, 517), (70, 140)), heads=2, heads_kv=1, dim=dim, dtype=dtype)
    check(backend, p, causal=causal, deterministic=False)


# --- bad input ------------------------------------------------------------------------------------


def inputs_for_errors(dtype="float32"):
    p = problem(5, 7, batch=2, heads=4, heads_kv=2, dim=8, dtype=dtype)
    return {"q": p.q, "k": p.k, "v": p.v}


def cast(dtype, *names):
    return lambda given: {n: given[n].astype(dtype) for n in names}


def cut(name, index):
    return lambda given: {name: given[name][index]}


# name: (exception, what its message starts with, the arguments that are wrong)
BAD = {
    "int8": (TypeError, r"q\.dtype=int8 must be one of", cast(np.int8, "q", "k", "v")),
    "int64": (TypeError, r"q\.dtype=int64 must", cast(np.int64, "q", "k", "v")),
    "complex": (TypeError, r"q\.dtype=complex64 must", cast(np.complex64, "q", "k", "v")),
    "k_dtype": (TypeError, r"k\.dtype=float16 must be that of q", cast(np.float16, "k")),
    "v_dtype": (TypeError, r"v\.dtype=float64 must be that of q", cast(np.float64, "v")),
    "k_bfloat16": (TypeError, r"k\.dtype=bfloat16 must", cast(DTYPES["bfloat16"], "k")),
    "heads": (ValueError, "heads_q 3 in .* multiple of heads_kv 2", cut("q", np.s_[:, :, :3])),
    "no_heads": (ValueError, "heads_q 0 in ", cut("q", np.s_[:, :, :0])),
    "head_dim": (ValueError, r"k\.shape=.* with head_dim 8", cut("k", np.s_[..., :7])),
    "head_dim_0": (ValueError, "head dimensions must be at least 1", cut("v", np.s_[..., :0])),
    "batch": (ValueError, r"k\.shape=.* with batch 2", cut("k", np.s_[:1])),
    "v_seqlen": (ValueError, r"v\.shape=.* seqlen_kv 7", cut("v", np.s_[:, :6])),
    "v_heads": (ValueError, r"v\.shape=.* heads_kv 2", cut("v", np.s_[:, :, :1])),
    "q_axes": (ValueError, r"q\.shape=.* must be \(batch", cut("q", np.s_[None])),
    "k_axes": (ValueError, r"k\.shape=.* with as many axes as", cut("k", np.s_[0])),
    "v_axes": (ValueError, r"v\.shape=.* with as many axes as", cut("v", np.s_[0])),
    "q_list": (TypeError, "q must be a NumPy or CuPy array", {"q": [[1.0]]}),
    "v_none": (TypeError, "v must be a NumPy or CuPy array", {"v": None}),
    "window_left": (ValueError, r"window=\(-1, 0\)", {"window": (-1, 0)}),
    "window_right": (ValueError, r"window=\(None, -2\)", {"window": (None, -2)}),
    "window_float": (ValueError, r"window=\(1.5, 0\)", {"window": (1.5, 0)}),
    "window_bool": (ValueError, r"window=\(True, 0\)", {"window": (True, 0)}),
    "window_one": (ValueError, "window=4 must", {"window": 4}),
    "window_three": (ValueError, r"window=\(1, 2, 3\) must", {"window": (1, 2, 3)}),
    "dropout": (ValueError, "dropout=1.5 must", {"dropout": 1.5}),
    "dropout_1": (ValueError, "dropout=1.0 must", {"dropout": 1.0}),
    "dropout_nan": (ValueError, "dropout=nan must", {"dropout": NAN}),
    "scale_nan": (ValueError, "scale=nan must be finite", {"scale": NAN}),
    "scale_inf": (ValueError, "scale=inf must be finite", {"scale": INF}),
    "scale_text": (TypeError, "scale must be a real number, not str", {"scale": "1"}),
    "causal": (ValueError, "causal='lower_right' must", {"causal": "lower_right"}),
    "causal_int": (ValueError, "causal=2 must", {"causal": 2}),
    "layout": (ValueError, "layout='sbhd' must", {"layout": "sbhd"}),
    "backend": (ValueError, "backend='cuda' must", {"backend": "cuda"}),
    "unknown": (TypeError, "unexpected keyword argument 'is_causal'", {"is_causal": True}),
    "softcap": (NotImplementedError, "softcap is not built yet", {"softcap": 15.0}),
    "lengths_many": (ValueError, r"q_lengths\.shape=\(3,\) must", {"q_lengths": [1, 2, 3]}),
    "lengths_axes": (ValueError, r"kv_lengths\.shape=\(1, 2\)", {"kv_lengths": [[1, 2]]}),
    "lengths_long": (ValueError, r"q_lengths\[1\]=6 must be from 0", {"q_lengths": [5, 6]}),
    "lengths_low": (ValueError, r"kv_lengths\[0\]=-1 must be", {"kv_lengths": [-1, 7]}),
    "lengths_float": (TypeError, "kv_lengths must hold integers", {"kv_lengths": [1.0, 7.0]}),
}


def bad_arguments(case, convert=lambda x: x):
    error, message, changes = BAD[case]
    given = inputs_for_errors()
    given |= changes(given) if callable(changes) else changes
    given = {n: convert(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
    return pytest.raises(error, match=message), given


@pytest.fixture
def nothing_launched(monkeypatch):
    """Allocating an output or starting a kernel is an error of its own."""

    def fail(*args, **options):
        raise AssertionError("a call that has to fail got as far as this")

    for module, name in (
        (arrays, "allocate"),
        (runtime, "launch"),
        (simulate, "launch"),
        (blas, "forward"),
        (blas, "backward"),
    ):
        monkeypatch.setattr(module, name, fail)


def backward_of_zeros(q, k, v, **options):
    """`attention_backward` with nothing wrong but what the forward's arguments bring along."""
    o = np.zeros((2, 5, 4, 8), np.float32)
    return fn.attention_backward(o, q, k, v, o, np.zeros((2, 4, 5), np.float32), **options)


@pytest.mark.usefixtures("nothing_launched")
def test_case_42_the_guard_sees_a_launch(backend):
    """A valid call runs into the guard of the tests below."""
    with pytest.raises(AssertionError, match="got as far as this"):
        run(backend, *inputs_for_errors(taken(backend)).values())


@pytest.mark.usefixtures("nothing_launched")
@pytest.mark.parametrize(
    "function", [fn.attention, fn.attention_vjp, fn.explain, backward_of_zeros]
)
@pytest.mark.parametrize("case", BAD)
def test_case_42_bad_input(case, function):
    """Every public function names the argument and what it was, before anything is launched."""
    raises, given = bad_arguments(case)
    with raises:
        function(**given)


@pytest.mark.usefixtures("nothing_launched")
@pytest.mark.gpu
@pytest.mark.parametrize("case", BAD)
def test_case_42_bad_input_on_a_gpu(case):
    """The same errors for CuPy arrays."""
    import cupy

    raises, given = bad_arguments(case, functools.partial(to_gpu, cupy))
    with raises:
        fn.attention(**given)


@pytest.mark.usefixtures("nothing_launched")
def test_case_42_a_foreign_byte_order():
    """Big-endian numbers are refused, not read as noise."""
    given = {n: x.astype(">f4") for n, x in inputs_for_errors().items()}
    with pytest.raises(TypeError, match=r"q\.dtype=>f4 must"):
        fn.attention(**given)


@pytest.mark.usefixtures("nothing_launched")
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("on_gpu", "options", "error", "message"),
    [
        ("k", {}, TypeError, "q is a numpy array, but k is a cupy array"),
        ("v", {}, TypeError, "q is a numpy array, but v is a cupy array"),
        ("kv", {}, TypeError, "q is a numpy array, but k is a cupy array"),
        ("q", {}, TypeError, "q is a cupy array, but k is a numpy array"),
        ("qkv", {"backend": "numpy"}, ValueError, "backend='numpy' takes NumPy arrays"),
        ("qkv", {"backend": "simulator"}, ValueError, "backend='simulator' takes NumPy"),
        ("", {"q_lengths": "gpu"}, TypeError, "q_lengths is a cupy array, but q is a numpy array"),
    ],
)
def test_case_42_arrays_of_both_kinds(on_gpu, options, error, message):
    """A NumPy q with a CuPy k, and other mixtures, are named; nothing is copied in silence."""
    import cupy

    given = {n: cupy.asarray(x) if n in on_gpu else x for n, x in inputs_for_errors().items()}
    if "q_lengths" in options:
        options = {"q_lengths": cupy.asarray([5, 5])}
    with pytest.raises(error, match=message):
        fn.attention(**given, **options)


BAD_GRADIENTS = {
    "do_shape": (ValueError, r"do\.shape=.* must be that of the output", {"do": np.s_[:, :4]}),
    "do_axes": (ValueError, r"do\.shape=.* must be that of the output", {"do": np.s_[0]}),
    "do_dtype": (TypeError, r"do\.dtype=float64 must be that of q", {"do": np.float64}),
    "do_list": (TypeError, "do must be a NumPy or CuPy array", {"do": list}),
    "dlse_shape": (ValueError, r"dlse\.shape=.* must be \(batch", {"dlse": np.s_[:, :3]}),
    "dlse_dtype": (TypeError, r"dlse\.dtype=float16 must be float32", {"dlse": np.float16}),
    "o_shape": (ValueError, r"o\.shape=.* must be that of the output", {"o": np.s_[..., :7]}),
    "o_dtype": (TypeError, r"o\.dtype=float16 must be that of q", {"o": np.float16}),
    "lse_shape": (ValueError, r"lse\.shape=.* must be \(batch", {"lse": np.s_[:1]}),
    "lse_dtype": (TypeError, r"lse\.dtype=float64 must be float32", {"lse": np.float64}),
}


@NO_TENSOR_CORES
@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_case_42_bad_gradients(case, backend, request):
    """`attention_backward` and a pullback name what does not fit the forward."""
    error, message, ((name, change),) = (*BAD_GRADIENTS[case][:2], BAD_GRADIENTS[case][2].items())
    p = problem(5, 7, batch=2, heads=4, heads_kv=2, dim=8)
    options = {"backend": named(backend)}
    (o, lse), pullback = fn.attention_vjp(p.q, p.k, p.v, return_lse=True, **options)
    given = {"do": p.do, "dlse": p.dlse, "o": o, "lse": lse}
    x = given[name]
    if change is list:
        given[name] = x.tolist()
    else:
        given[name] = x.astype(change) if isinstance(change, type) else x[change]
    request.getfixturevalue("nothing_launched")
    with pytest.raises(error, match=message):
        fn.attention_backward(q=p.q, k=p.k, v=p.v, **given, **options)
    if name in ("do", "dlse"):
        with pytest.raises(error, match=message):
            pullback(given["do"], given["dlse"])
