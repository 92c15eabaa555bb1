"""The specification, held against definitions that are simpler still: loops, differences, hand."""

from math import exp, log

import ml_dtypes
import numpy as np
import pytest
from rule import assert_within_rule, eps

from flashnumba.reference import (
    attention,
    attention_backward,
    attention_tiled,
    low_precision,
    low_precision_backward,
    merge,
    visible,
)

INF = float("inf")
NAN = float("nan")
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]

# Every kind of mask, alone and combined; lengths are for a batch of 2 and include 0.
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "upper_left": {"causal": "upper_left"},
    "window": {"window": (2, 1)},
    "left": {"window": (3, None)},
    "right": {"window": (None, 0)},
    "causal_window": {"causal": True, "window": (2, 5)},
    "upper_left_window": {"causal": "upper_left", "window": (1, None)},
    "ragged": {"q_lengths": [3, 5], "kv_lengths": [6, 2]},
    "ragged_causal": {"q_lengths": [5, 4], "kv_lengths": [2, 7], "causal": True},
    "ragged_window": {"q_lengths": [5, 2], "kv_lengths": [0, 5], "window": (1, 1)},
}
each_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def problem(
    seqlen_q=5, seqlen_kv=7, heads_q=4, heads_kv=2, dim=4, dim_v=3, batch=2, dtype=float, seed=0
):
    """q, k, v, do, dlse; no two sizes are equal, so that no axis can pass for another."""
    rng = np.random.default_rng(seed)
    shapes = {
        "q": (batch, seqlen_q, heads_q, dim),
        "k": (batch, seqlen_kv, heads_kv, dim),
        "v": (batch, seqlen_kv, heads_kv, dim_v),
        "do": (batch, seqlen_q, heads_q, dim_v),
        "dlse": (batch, heads_q, seqlen_q),
    }
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes.values())


def mask_of(seqlen_q, seqlen_kv, **mask):
    """`visible` for one sequence, as rows of 0 and 1."""
    seen = visible(np.empty((1, seqlen_q)), np.empty((1, seqlen_kv)), **mask)
    return seen[0, 0].astype(int).tolist()


def by_hand(q, k, v, seen, scale):
    """Attention one query at a time, over the list of keys that it sees."""
    o = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -INF)
    for b, i, h in np.ndindex(q.shape[:3]):
        kv_head = h * k.shape[2] // q.shape[2]
        keys = np.flatnonzero(seen[b, 0, i])
        if len(keys):
            weights = np.exp(scale * k[b, keys, kv_head] @ q[b, i, h])
            o[b, i, h] = weights @ v[b, keys, kv_head] / weights.sum()
            lse[b, h, i] = log(weights.sum())
    return o, lse


# Masks, against matrices written by hand


@pytest.mark.parametrize(
    ("causal", "expected"),
    [
        (True, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        ("upper_left", [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]),
    ],
)
def test_causal_with_more_keys_than_queries(causal, expected):
    assert mask_of(3, 5, causal=causal) == expected


@pytest.mark.parametrize(
    ("causal", "expected"),
    [
        (True, [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        ("upper_left", [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]]),
    ],
)
def test_causal_with_more_queries_than_keys(causal, expected):
    assert mask_of(5, 3, causal=causal) == expected


def test_window_is_inclusive_on_both_sides():
    expected = [[1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert mask_of(3, 5, window=(2, 0)) == expected
    assert mask_of(3, 5, window=(1, 1)) == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert mask_of(3, 5, window=(0, 1), causal="upper_left") == np.eye(3, 5, dtype=int).tolist()
    assert np.sum(mask_of(9, 9, window=(3, 0)), axis=1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4]


def test_window_without_a_limit_on_one_side():
    assert mask_of(4, 4, window=(None, 0)) == np.tri(4, dtype=int).tolist()
    assert mask_of(4, 4, window=(0, None)) == np.tri(4, dtype=int).T.tolist()
    assert mask_of(4, 6, window=(None, None)) == mask_of(4, 6)


def test_window_as_wide_as_the_sequence_equals_causal():
    for seqlen_q, seqlen_kv in [(6, 6), (4, 6), (6, 4), (1, 6)]:
        assert mask_of(seqlen_q, seqlen_kv, window=(5, 0)) == mask_of(
            seqlen_q, seqlen_kv, causal=True
        )


def test_one_query_with_a_window_sees_the_last_keys():
    assert np.flatnonzero(mask_of(1, 1000, window=(128, 0))[0]).tolist() == [*range(871, 1000)]


def test_lengths_move_the_lower_right_corner():
    shape = np.empty((2, 3)), np.empty((2, 4))
    ragged = {"q_lengths": np.array([2, 3], np.uint32), "kv_lengths": [4, 1]}
    lower_right = visible(*shape, causal=True, **ragged)
    assert lower_right.shape == (2, 1, 3, 4)
    assert lower_right[0, 0].astype(int).tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert lower_right[1, 0].astype(int).tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]]
    upper_left = visible(*shape, causal="upper_left", **ragged)
    assert upper_left[0, 0].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


# Dense against hand, tiled against dense


@each_mask
def test_dense_equals_a_loop_over_queries(mask):
    q, k, v, *_ = problem()
    o, lse = attention(q, k, v, scale=0.7, **mask)
    expected_o, expected_lse = by_hand(q, k, v, visible(q, k, **mask), 0.7)
    np.testing.assert_allclose(o, expected_o, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("block_n", [1, 2, 3, 8])
@pytest.mark.parametrize("block_m", [1, 2, 8])
@each_mask
def test_tiled_equals_dense(mask, block_m, block_n):
    q, k, v, *_ = problem()
    o, lse = attention_tiled(q, k, v, block_m=block_m, block_n=block_n, **mask)
    expected_o, expected_lse = attention(q, k, v, **mask)
    np.testing.assert_allclose(o, expected_o, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("group", [(3, 1), (3, 3), (6, 2), (8, 1)])
def test_grouped_heads_equal_repeated_key_heads(group):
    heads_q, heads_kv = group
    q, k, v, do, dlse = problem(heads_q=heads_q, heads_kv=heads_kv)
    repeated = [x.repeat(heads_q // heads_kv, axis=2) for x in (k, v)]
    for got, expected in zip(attention(q, k, v), attention(q, *repeated), strict=True):
        np.testing.assert_array_equal(got, expected)
    _, dk, dv = attention_backward(do, q, k, v, dlse=dlse)
    assert dk.shape == k.shape and dv.shape == v.shape


def test_the_seed_example():
    """Scores 1, 2, 1001, 1002 in blocks of two: the second block raises the maximum by 1000."""
    values = [2.0, -1.0, 4.0, 8.0]
    q = np.ones((1, 1, 1, 1))
    k = np.reshape([1.0, 2.0, 1001.0, 1002.0], (1, 4, 1, 1))
    v = np.reshape(values, (1, 4, 1, 1))
    o, lse = attention_tiled(q, k, v, block_m=1, block_n=2)

    weights = [exp(s - 1002.0) for s in (1.0, 2.0, 1001.0, 1002.0)]
    plain = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
    printed = 4 + 4 / (1 + exp(-1))  # the first two weights are 0 next to exp(-1) and 1
    assert o.item() == pytest.approx(plain, rel=1e-15)
    assert o.item() == pytest.approx(printed, rel=1e-15)
    assert lse.item() == pytest.approx(1002 + log(1 + exp(-1)), rel=1e-15)


def test_a_constant_added_to_all_scores_only_shifts_lse():
    q, k, v, *_ = problem()
    o, lse = attention_tiled(q, k, v, block_m=2, block_n=3, scale=1.0)
    for shift in (-800.0, 800.0):
        q_shift = np.concatenate([q, np.ones_like(q[..., :1])], axis=-1)
        k_shift = np.concatenate([k, np.full_like(k[..., :1], shift)], axis=-1)
        o_shift, lse_shift = attention_tiled(q_shift, k_shift, v, block_m=2, block_n=3, scale=1.0)
        np.testing.assert_allclose(o_shift, o, atol=1e-11)
        np.testing.assert_allclose(lse_shift, lse + shift, atol=1e-11)


def test_the_order_of_keys_does_not_matter():
    q, k, v, *_ = problem()
    order = np.random.default_rng(1).permutation(k.shape[1])
    o, lse = attention_tiled(q, k[:, order], v[:, order], block_m=2, block_n=2)
    expected_o, expected_lse = attention(q, k, v)
    np.testing.assert_allclose(o, expected_o, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_default_scale_is_one_over_sqrt_of_head_dim():
    q, k, v, *_ = problem(dim=9)
    np.testing.assert_array_equal(attention(q, k, v)[0], attention(q, k, v, scale=1 / 3)[0])


# The contract: rows and keys without partners


@pytest.mark.parametrize("lengths", [(5, 2), (0, 3), (3, 0), (0, 0), (1, 1)])
@each_mask
def test_what_sees_nothing_is_zero(mask, lengths):
    q, k, v, do, dlse = problem(*lengths)
    mask = mask | {
        name: np.minimum(mask[name], length)
        for name, length in zip(("q_lengths", "kv_lengths"), lengths, strict=True)
        if name in mask
    }
    seen = visible(q, k, **mask)
    row_empty, key_unseen = ~seen.any(axis=3)[:, 0], ~seen.any(axis=2)[:, 0]
    for o, lse in (
        attention(q, k, v, **mask),
        attention_tiled(q, k, v, block_m=2, block_n=3, **mask),
    ):
        assert np.isfinite(o).all() and (o[row_empty] == 0).all()
        assert ((lse == -INF) == row_empty[:, None, :]).all()
    dq, dk, dv = attention_backward(do, q, k, v, dlse=dlse, **mask)
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))
    assert (dq[row_empty] == 0).all()
    assert (dk[key_unseen] == 0).all() and (dv[key_unseen] == 0).all()


def test_a_row_of_scores_of_minus_infinity_is_empty():
    q, k, v, do, _ = problem()
    q[0, 2], k[0] = 1.0, -INF
    for o, lse in (attention(q, k, v), attention_tiled(q, k, v, block_m=2, block_n=2)):
        assert (o[0, 2] == 0).all() and (lse[0, :, 2] == -INF).all()
    assert (attention_backward(do, q, k, v)[0][0, 2] == 0).all()


def test_scores_of_finfo_min_are_uniform():
    q, k, v, do, _ = problem(1, 4, 1, 1, 1, 3)
    q[:], k[:] = 1.0, np.finfo(np.float64).min
    for o, lse in (attention(q, k, v), attention_tiled(q, k, v, block_m=1, block_n=2)):
        np.testing.assert_allclose(o[:, 0], v.mean(axis=1), atol=1e-15)
        assert (lse == np.finfo(np.float64).min).all()
    _, _, dv = attention_backward(do, q, k, v)
    np.testing.assert_allclose(dv, np.broadcast_to(do / 4, dv.shape), rtol=1e-15)


def test_one_key_is_copied_whatever_its_score():
    q, k, v, do, _ = problem(3, 1)
    for score in (-524288.0, 3e38):
        q[..., :], k[..., :] = 0, 0
        q[..., 0], k[..., 0] = 1.0, score
        for o, _ in (attention(q, k, v), attention_tiled(q, k, v, block_m=2, block_n=2)):
            np.testing.assert_array_equal(o, v.repeat(2, axis=2).repeat(3, axis=1))
    dq, dk, _ = attention_backward(do, q, k * 0, v)
    np.testing.assert_allclose(dq, 0, atol=1e-15)
    np.testing.assert_allclose(dk, 0, atol=1e-14)


# The contract: NaN and infinity


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("lengths", [(6, 9), (9, 6)])
@pytest.mark.parametrize("dtype", DTYPES)
@each_mask
def test_what_is_not_seen_changes_no_bit(mask, dtype, lengths, poison):
    """Poison every key that no query sees, and every query, do and dlse that sees no key."""
    mask = mask or {"q_lengths": [4, 6], "kv_lengths": [6, 5]}
    good = problem(*lengths, dtype=dtype)
    bad = q, k, v, do, dlse = tuple(x.copy() for x in good)
    seen = visible(q, k, **mask)[:, 0]
    row_empty, key_unseen = ~seen.any(axis=2), ~seen.any(axis=1)
    q[row_empty] = do[row_empty] = dlse.swapaxes(1, 2)[row_empty] = poison
    k[key_unseen] = v[key_unseen] = poison

    def results(q, k, v, do, dlse):
        return (
            *attention(q, k, v, **mask),
            *attention_tiled(q, k, v, block_m=2, block_n=4, **mask),
            *attention_backward(do, q, k, v, dlse=dlse, **mask),
            *low_precision(q, k, v, **mask),
            *low_precision_backward(do, q, k, v, dlse=dlse, **mask),
        )

    for got, expected in zip(results(*bad), results(*good), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_visible_nan_reaches_exactly_the_rows_that_see_it():
    """Causal, key 4 of 7 queries and keys: rows 4, 5, 6 see it; their NaN reaches all they see."""
    for poisoned in ("k", "v"):
        q, k, v, do, _ = problem(7, 7)
        {"k": k, "v": v}[poisoned][0, 4] = NAN
        for o, lse in (
            attention(q, k, v, causal=True),
            attention_tiled(q, k, v, block_m=2, block_n=2, causal=True),
        ):
            assert np.isnan(o[0, 4:]).all() and np.isfinite(o[0, :4]).all()
            assert np.isnan(lse[0, :, 4:]).all() == (poisoned == "k")
            assert np.isfinite(o[1]).all() and np.isfinite(lse[1]).all()
        dq, dk, dv = attention_backward(do, q, k, v, causal=True)
        assert np.isnan(dq[0, 4:]).all() and np.isfinite(dq[0, :4]).all()
        assert np.isnan(dk[0]).all() and np.isfinite(dk[1]).all()
        assert np.isnan(dv[0]).any() == (poisoned == "k") and np.isfinite(dv[1]).all()


def test_a_visible_nan_in_do_reaches_exactly_the_keys_seen_by_its_row():
    q, k, v, do, _ = problem(7, 7)
    do[0, 4] = NAN
    dq, dk, dv = attention_backward(do, q, k, v, causal=True)
    assert np.isnan(dq[0, 4]).all() and np.isfinite(np.delete(dq, 4, axis=1)).all()
    for x in (dk, dv):
        assert np.isnan(x[0, :5]).all() and np.isfinite(x[0, 5:]).all() and np.isfinite(x[1]).all()


def test_a_visible_infinity_in_v_follows_ieee():
    q, k, v, *_ = problem(7, 7)
    v[0, 4, :, 0] = INF
    for o, _ in (
        attention(q, k, v, causal=True),
        attention_tiled(q, k, v, block_m=2, block_n=2, causal=True),
    ):
        assert (o[0, 4:, :, 0] == INF).all() and np.isfinite(o[0, :4]).all()
        assert np.isfinite(o[0, :, :, 1:]).all()


# Gradients, against differences


@each_mask
def test_gradients_equal_finite_differences(mask):
    q, k, v, do, dlse = problem(5, 7, 2, 1, 2, 3)

    def loss():
        o, lse = attention(q, k, v, scale=0.6, **mask)
        return (o * do).sum() + (np.where(lse == -INF, 0, lse) * dlse).sum()

    gradients = attention_backward(do, q, k, v, dlse=dlse, scale=0.6, **mask)
    step = 1e-5
    for x, gradient in zip((q, k, v), gradients, strict=True):
        assert gradient.shape == x.shape
        expected = np.empty_like(x)
        for index in np.ndindex(x.shape):
            kept = x[index]
            x[index] = kept + step
            above = loss()
            x[index] = kept - step
            expected[index] = (above - loss()) / (2 * step)
            x[index] = kept
        np.testing.assert_allclose(gradient, expected, atol=1e-8)


def test_gradient_of_lse_alone():
    """loss = sum(lse): dq = scale p k, and v does not matter."""
    q, k, v, do, dlse = problem(heads_kv=4)
    dq, _, dv = attention_backward(0 * do, q, k, v, dlse=np.ones_like(dlse), scale=0.5)
    expected, _ = attention(q, k, 0.5 * k, scale=0.5)
    np.testing.assert_allclose(dq, expected, atol=1e-14)
    assert (dv == 0).all()


# Merging


def test_merging_disjoint_keys_equals_attending_to_all():
    q, k, v, *_ = problem()
    for cut in range(8):
        parts = attention(q, k[:, :cut], v[:, :cut]), attention(q, k[:, cut:], v[:, cut:])
        for got, expected in zip(merge(*parts[0], *parts[1]), attention(q, k, v), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_merging_masked_parts():
    """Row 0 has keys in both parts, row 1 in the first, row 2 in the second, row 3 in neither."""
    q, k, v, *_ = problem(4, 6, batch=1)
    seen = np.array([[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 1], [0] * 6], bool)
    first = np.arange(6) < 3
    o, lse = by_hand(q, k, v, seen[None, None], 1.0)
    o1, lse1 = by_hand(q, k, v, (seen & first)[None, None], 1.0)
    o2, lse2 = by_hand(q, k, v, (seen & ~first)[None, None], 1.0)
    got_o, got_lse = merge(o1, lse1, o2, lse2)
    np.testing.assert_allclose(got_o, o, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-13, atol=1e-15)
    np.testing.assert_array_equal(got_o[:, 1], o1[:, 1])
    np.testing.assert_array_equal(got_o[:, 2], o2[:, 2])
    assert (got_o[:, 3] == 0).all() and (got_lse[:, :, 3] == -INF).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merging_with_an_empty_part_changes_no_bit(dtype):
    q, k, v, *_ = problem()
    o, lse = (x.astype(dtype) for x in attention(q, k, v, window=(0, 0)))
    o[0, 0] = -0.0
    empty = np.zeros_like(o), np.full_like(lse, -INF)
    for got_o, got_lse in (merge(o, lse, *empty), merge(*empty, o, lse)):
        assert got_o.dtype == got_lse.dtype == dtype
        assert got_o.tobytes() == o.tobytes() and got_lse.tobytes() == lse.tobytes()
    got_o, got_lse = merge(*empty, *empty)
    assert (got_o == 0).all() and (got_lse == -INF).all()


# Low precision, and the rule that it feeds


def low_and_exact(dtype, **mask):
    q, k, v, do, dlse = problem(33, 47, dim=32, dim_v=16, dtype=dtype)
    low = low_precision(q, k, v, **mask)
    low += low_precision_backward(do, q, k, v, dlse=dlse, **mask)
    exact = attention(q, k, v, **mask)
    exact += attention_backward(do, q, k, v, dlse=dlse, **mask)
    return low, exact


@pytest.mark.parametrize("dtype", DTYPES)
@each_mask
def test_low_precision_is_off_by_a_few_eps(mask, dtype):
    for low, exact in zip(*low_and_exact(dtype, **mask), strict=True):
        assert low.shape == exact.shape and exact.dtype == np.float64
        finite = np.isfinite(exact)
        np.testing.assert_array_equal(finite, np.isfinite(low))
        error = np.abs(low[finite] - exact[finite]).max()
        size = max(1.0, np.abs(exact[finite]).max())
        assert error < 8 * eps(dtype) * size
        if dtype != np.float64:
            assert error > eps(dtype) * size / 64


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_low_precision_rounds_every_stored_result(dtype):
    """One head, written out; sums this short are the same in any order once rounded."""
    q, k, v, do, _ = problem(3, 3, 1, 1, 2, 2, batch=1, dtype=dtype)
    scale = 0.3

    def stored(x):
        return x.astype(dtype).astype(np.float32)

    q1, k1, v1, do1 = (x[0, :, 0].astype(np.float32) for x in (q, k, v, do))
    s = stored(scale * stored(q1 @ k1.T))
    p = np.exp(s - s.max(axis=1, keepdims=True))
    p = stored(p / p.sum(axis=1, keepdims=True))
    o = stored(p @ v1)
    ds = p * (stored(do1 @ v1.T) - (do1 * o).sum(axis=1, keepdims=True))
    ds = stored(scale * stored(ds))
    expected = o, stored(ds @ k1), stored(ds.T @ q1), stored(p.T @ do1)

    o, _ = low_precision(q, k, v, scale=scale)
    got = o, *low_precision_backward(do, q, k, v, scale=scale)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x[0, :, 0], y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_low_precision_holds_values_of_its_dtype(dtype):
    (o, _, *gradients), _ = low_and_exact(dtype)
    for x in (o, *gradients):
        assert x.dtype == (np.float64 if dtype == np.float64 else np.float32)
        np.testing.assert_array_equal(x, x.astype(dtype).astype(x.dtype))


def test_the_rule_accepts_what_is_as_good_as_the_baseline():
    low, exact = low_and_exact(ml_dtypes.bfloat16, causal=True)
    for a, b in zip(low, exact, strict=True):
        assert_within_rule(a, b, a, ml_dtypes.bfloat16)
        assert_within_rule(b.astype(ml_dtypes.bfloat16), b, b, ml_dtypes.bfloat16)
    empty = np.empty((2, 0, 3))
    assert_within_rule(empty, empty, empty, np.float32)
    nothing_seen = np.full(3, -INF)
    assert_within_rule(nothing_seen, nothing_seen, nothing_seen, np.float32)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        ([1.0, 2.5, -INF], r"exceeds .* by a factor of .* at \(1,\)"),
        ([1.0, NAN, -INF], r"first at \(1,\)"),
        ([1.0, 2.0, INF], r"first at \(2,\)"),
        ([1.0, 2.0, -1e38], r"first at \(2,\)"),
        ([1.0, -INF, -INF], r"first at \(1,\)"),
        ([1.0, 2.0], "shapes differ"),
    ],
)
def test_the_rule_rejects(got, message):
    exact, low = np.array([1.0, 2.0, -INF]), np.array([1.0, 2.1, -INF])
    with pytest.raises(AssertionError, match="lse: .*" + message):
        assert_within_rule(np.array(got), exact, low, np.float16, "lse")


def test_the_rule_is_not_loosened_by_a_broken_baseline():
    exact = np.array([1.0, 2.0])
    with pytest.raises(AssertionError, match="baseline overflowed"):
        assert_within_rule(exact, exact, np.array([1.0, NAN]), np.float16)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [{}, {"causal": True, "kv_lengths": [9, 0]}], ids=["full", "mask"])
def test_cupy_arrays_give_what_numpy_gives(mask):
    """Every public function, with NaN behind the mask; CuPy in, CuPy out."""
    import cupy

    rng = np.random.default_rng(0)
    q, do = (rng.standard_normal((2, 5, 4, 6)) for _ in range(2))
    k, v = (rng.standard_normal((2, 11, 2, 6)) for _ in range(2))
    if mask:
        v[0, 9:] = np.nan
    there = {name: cupy.asarray(x) for name, x in {"q": q, "k": k, "v": v, "do": do}.items()}
    calls = {
        "attention": lambda q, k, v, do: attention(q, k, v, **mask),
        "tiled": lambda q, k, v, do: attention_tiled(q, k, v, block_m=2, block_n=3, **mask),
        "backward": lambda q, k, v, do: attention_backward(do, q, k, v, **mask),
        "low": lambda q, k, v, do: low_precision(
            *(x.astype(np.float16) for x in (q, k, v)), **mask
        ),
        "merge": lambda q, k, v, do: merge(
            *attention(q, k, v, **mask), *attention(q, k, v, kv_lengths=[0, 0])
        ),
    }
    for name, call in calls.items():
        expected, got = call(q, k, v, do), call(**there)
        for e, g in zip(expected, got, strict=True):
            assert isinstance(g, cupy.ndarray), name
            tolerance = 2e-3 if name == "low" else 1e-12
            np.testing.assert_allclose(g.get(), e, tolerance, tolerance)
