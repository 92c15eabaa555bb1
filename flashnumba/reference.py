"""Exact attention in NumPy: the executable specification that every kernel is held against.

Read `attention_tiled` first. It is FlashAttention's forward pass, and every kernel in this package
is that function with thread indices added. `attention` states the same result without the trick,
`attention_backward` its gradients, and `low_precision` how far from exact an honest computation in
float16 or bfloat16 lands, which sets the tolerance of the tests.

The symbols are the same here and in the kernels. Sizes: batch B, heads Hq and Hkv, lengths Sq and
Skv, head widths D and Dv. Query head h reads key head h // (Hq // Hkv). Logarithms are natural.

    q k v        inputs (B, Sq, Hq, D), (B, Skv, Hkv, D), (B, Skv, Hkv, Dv)
    s            scores scale * q k^T, (B, Hq, Sq, Skv) or one tile of them; -inf where masked
    m            a row's largest score so far, (..., rows, 1); -inf before the first key
    l            its denominator so far, the sum of exp(s - m), (..., rows, 1)
    u            its numerator so far, the sum of exp(s - m) v, (..., rows, Dv), *not* divided by l;
                 the kernels say acc, since there it lives in the accumulator registers
    a            exp(m - m'), which carries l and u, both of them, over to a larger maximum m'
    p            exp(s - m) inside the recurrence; exp(s - lse), the probabilities, outside it
    o            output u / l, (B, Sq, Hq, Dv)
    lse          m + log l, the log of the sum of exp(s), (B, Hq, Sq); with it, p needs no second
                 normalisation in the backward pass
    do dlse      gradients of the loss with respect to o and lse, in their shapes
    dq dk dv     gradients with respect to q, k, v, in their shapes
    dp ds        gradients with respect to the probabilities p and the scores s
    delta        rowsum(do * o) - dlse, the one number by which the keys of a row affect each other

Inside a function arrays are (B, Hq, S, D), so that `@` multiplies head by head.

A query sees a key when the mask allows it and their score is not -inf. What is not seen is never
multiplied in, so NaN or infinity there does not spread; what is seen follows IEEE arithmetic, NaN
included. A row that sees nothing has o = 0, lse = -inf and zero gradients.

All functions take NumPy or CuPy arrays and return the same kind.

Sources: Milakov & Gimelshein, Online normalizer calculation for softmax (2018); Rabe & Staats,
Self-attention does not need O(n^2) memory (2021); Dao et al., FlashAttention (2022).
"""

import numpy as np

INF = float("inf")

# NaN and infinity are data here. They follow IEEE arithmetic without a warning; division by zero,
# which only a missing guard could cause, still warns.
_ieee = np.errstate(invalid="ignore", over="ignore")


def visible(q, k, *, causal=False, window=None, q_lengths=None, kv_lengths=None):
    """The mask, straight from the definitions. These four keywords mean the same in every function.

    Parameters
    ----------
    q, k : array (B, Sq, ...), array (B, Skv, ...)
        Only their shapes and their array module are used.
    causal : bool or "upper_left"
        True: the last query sees exactly up to the last key (lower right). "upper_left": query 0
        sees key 0 alone, and so on down the diagonal.
    window : None or (left, right)
        Query i sees `left` keys before its own position, that position, and `right` keys after it.
        None in either place means no limit on that side.
    q_lengths, kv_lengths : None or int array (B,)
        How much of each sequence is real; the rest is padding.

    Returns
    -------
    bool array (B, 1, Sq, Skv)
    """
    xp = array_module(q)
    batch, seqlen_q, seqlen_kv = q.shape[0], q.shape[1], k.shape[1]

    def per_batch(lengths, full):
        lengths = [full] * batch if lengths is None else lengths
        return xp.asarray(lengths, dtype=xp.int64).reshape(batch, 1, 1, 1)

    i, j = xp.arange(seqlen_q)[:, None], xp.arange(seqlen_kv)[None, :]
    q_length, kv_length = per_batch(q_lengths, seqlen_q), per_batch(kv_lengths, seqlen_kv)
    offset = 0 if causal == "upper_left" else kv_length - q_length
    left, right = (None, None) if window is None else window

    seen = (i < q_length) & (j < kv_length)
    if causal:
        seen = seen & (j <= i + offset)
    if left is not None:
        seen = seen & (i + offset - left <= j)
    if right is not None:
        seen = seen & (j <= i + offset + right)
    return seen


@_ieee
def attention_tiled(q, k, v, *, block_m, block_n, scale=None, **mask):
    """FlashAttention: exact softmax attention that never holds more than one tile of scores.

    Softmax needs each row's largest score, and a later tile may hold a larger one. So a row keeps
    (m, l, u) relative to the largest score *so far*, and when that grows from m to m', everything
    summed until then, l and u alike, is rescaled by a = exp(m - m'):

        m' = max(m, max s)      a = exp(m - m')      p = exp(s - m')
        l' = a l + sum p        u' = a u + p v       and at the end o = u / l

    Parameters
    ----------
    q, k, v : array (B, Sq, Hq, D), array (B, Skv, Hkv, D), array (B, Skv, Hkv, Dv)
    block_m, block_n : int
        Queries and keys in a tile; neither needs to divide its length.
    scale : float, optional
        1 / sqrt(D) if not given.
    **mask
        See `visible`.

    Returns
    -------
    o : float64 array (B, Sq, Hq, Dv)
    lse : float64 array (B, Hq, Sq)
    """
    xp = array_module(q)
    scale = default_scale(q, scale)
    mask = visible(q, k, **mask)
    q, k, v = by_head(q, k, v, xp.float64)
    seqlen_q, seqlen_kv, head_dim_v = q.shape[2], k.shape[2], v.shape[3]
    o = xp.empty((*q.shape[:3], head_dim_v))
    lse = xp.empty(q.shape[:3])

    for m_begin in range(0, seqlen_q, block_m):
        rows = slice(m_begin, m_begin + block_m)
        q_tile = q[:, :, rows]
        m = xp.full_like(q_tile[..., :1], -INF)
        l = xp.zeros_like(m)
        u = xp.zeros_like(o[:, :, rows])

        for n_begin in range(0, seqlen_kv, block_n):
            cols = slice(n_begin, n_begin + block_n)
            k_tile, v_tile = k[:, :, cols], v[:, :, cols]

            s = scale * (q_tile @ T(k_tile))
            s = xp.where(mask[:, :, rows, cols], s, -INF)

            m_new = xp.maximum(m, s.max(axis=-1, keepdims=True))
            m_safe = xp.where(m_new == -INF, 0, m_new)  # no key yet: exp(-inf - 0) = 0, not NaN
            a = xp.exp(m - m_safe)
            p = xp.exp(s - m_safe)
            l = a * l + p.sum(axis=-1, keepdims=True)
            u = a * u + weighted(p, v_tile, s != -INF)
            m = m_new

        o[:, :, rows], lse[:, :, rows] = normalized(u, m, l)
    return o.swapaxes(1, 2), lse


def normalized(u, m, l):
    """The end of the recurrence, (u / l, m + log l); a row that saw nothing becomes (0, -inf)."""
    xp = array_module(u)
    l = xp.where(m == -INF, 1, l)  # there u = 0, so u / l = 0 and m + log l = -inf
    return u / l, (m + xp.log(l))[..., 0]


@_ieee
def merge(o1, lse1, o2, lse2):
    """Combine the results over two disjoint sets of keys into the result over both.

    A finished part is a state of the recurrence again, m = lse, l = 1, u = o, so this is one more
    rescaling. A part without keys, (0, -inf), leaves the other as it is, to the bit.

    Parameters
    ----------
    o1, o2 : float array (B, Sq, Hq, Dv)
    lse1, lse2 : float array (B, Hq, Sq)

    Returns
    -------
    o, lse : arrays of the same shapes
    """
    xp = array_module(o1)
    m1, m2 = (lse.swapaxes(1, 2)[..., None] for lse in (lse1, lse2))
    m = xp.maximum(m1, m2)
    m_safe = xp.where(m == -INF, 0, m)
    a1, a2 = xp.exp(m1 - m_safe), xp.exp(m2 - m_safe)
    o, lse = normalized(a1 * o1 + a2 * o2, m, a1 + a2)
    o = xp.where(m1 == -INF, o2, xp.where(m2 == -INF, o1, o))  # -0.0 + 0.0 would lose the sign
    return o, lse.swapaxes(1, 2)


@_ieee
def attention(q, k, v, *, scale=None, rounding=None, **mask):
    """Softmax attention by definition, o = softmax(scale q k^T) v, holding all scores at once.

    Parameters
    ----------
    q, k, v, scale, **mask
        As in `attention_tiled`.
    rounding : dtype, optional
        Where intermediate results are rounded to; see `low_precision`.

    Returns
    -------
    o : float64 array (B, Sq, Hq, Dv)
    lse : float64 array (B, Hq, Sq)
        Both may be float32 when `rounding` is given.
    """
    compute, rounded = arithmetic(q, rounding)
    scale = default_scale(q, scale)
    mask = visible(q, k, **mask)
    q, k, v = by_head(q, k, v, compute)
    _, _, o, lse = _forward(q, k, v, scale, mask, rounded)
    return o.swapaxes(1, 2), lse


def _forward(q, k, v, scale, mask, rounded):
    """The equations of the forward pass: (p, seen, o, lse)."""
    xp = array_module(q)
    s = rounded(q @ T(k))
    s = rounded(scale * s)
    s = xp.where(mask, s, -INF)
    seen = s != -INF
    p, lse = softmax(s)
    p = rounded(xp.where(seen, p, 0))  # a row of NaN is NaN only where it sees
    o = rounded(weighted(p, v, seen))
    return p, seen, o, lse


@_ieee
def attention_backward(do, q, k, v, *, dlse=None, scale=None, rounding=None, **mask):
    """Gradients with respect to q, k and v, given those with respect to o and lse.

    Softmax has ds = p * (dp - rowsum(p * dp)). As o = p v, that row sum equals rowsum(do * o),
    known before any key is visited. As the derivative of lse by s is p, dlse only shifts it.

    Parameters
    ----------
    do : array (B, Sq, Hq, Dv)
    q, k, v, scale, rounding, **mask
        As in `attention`.
    dlse : array (B, Hq, Sq), optional
        Zero if not given.

    Returns
    -------
    dq, dk, dv : float64 arrays in the shapes of q, k, v
        A key head that several query heads read receives the sum of their gradients.
    """
    xp = array_module(q)
    compute, rounded = arithmetic(q, rounding)
    scale = default_scale(q, scale)
    mask = visible(q, k, **mask)
    kv_heads = k.shape[2]
    q, k, v = by_head(q, k, v, compute)
    do = do.astype(compute).swapaxes(1, 2)
    dlse = 0 if dlse is None else dlse.astype(compute)[..., None]

    p, seen, o, _ = _forward(q, k, v, scale, mask, rounded)
    dv = rounded(weighted(T(p), do, T(seen)))
    dp = rounded(do @ T(v))
    delta = (do * o).sum(axis=-1, keepdims=True) - dlse
    ds = rounded(xp.where(seen, p * (dp - delta), 0))  # where unseen, dp and delta may be NaN
    ds = rounded(scale * ds)
    dq = rounded(weighted(ds, k, seen))
    dk = rounded(weighted(T(ds), q, T(seen)))

    def over_group(x):
        batch, heads, *rest = x.shape
        return rounded(x.reshape(batch, kv_heads, heads // kv_heads, *rest).sum(axis=2))

    return tuple(x.swapaxes(1, 2) for x in (dq, over_group(dk), over_group(dv)))


def low_precision(q, k, v, **mask):
    """`attention` as an eager framework computes it in the dtype of q: the tests' baseline.

    Products accumulate in float32 and are rounded to the dtype of q when stored, and so is every
    elementwise result. Softmax and its derivative are one operation each, float32 inside and
    rounded at the end. float64 inputs are computed in float64 throughout.

    Parameters
    ----------
    q, k, v, **mask
        As in `attention`; float16, bfloat16, float32 or float64, all of one dtype.

    Returns
    -------
    o : float32 or float64 array (B, Sq, Hq, Dv)
        Holds only values of the dtype of q.
    lse : float32 or float64 array (B, Hq, Sq)
        Not rounded further.
    """
    return attention(q, k, v, rounding=q.dtype, **mask)


def low_precision_backward(do, q, k, v, *, dlse=None, **mask):
    """`attention_backward` in the arithmetic of `low_precision`: (dq, dk, dv)."""
    return attention_backward(do, q, k, v, dlse=dlse, rounding=q.dtype, **mask)


def arithmetic(q, rounding):
    """The dtype to compute in, and the function that stores an intermediate result.

    Without rounding that is float64, or longdouble where q is: the tests of float64 need a result
    more exact than their own.
    """
    if rounding is None:
        return np.promote_types(q.dtype, np.float64), lambda x: x
    compute = np.float64 if rounding == np.float64 else np.float32
    return compute, lambda x: x.astype(rounding).astype(compute)


def softmax(s):
    """(p, lse) of each row of s (..., rows, keys).

    p = exp(s - m) / l is exp(s - lse), but also right where m is so large that m + log l = m.
    """
    xp = array_module(s)
    if s.shape[-1] == 0:
        return s, xp.full(s.shape[:-1], -INF, s.dtype)
    m = s.max(axis=-1, keepdims=True)
    p = xp.exp(s - xp.where(m == -INF, 0, m))
    return normalized(p, m, p.sum(axis=-1, keepdims=True))


def array_module(x):
    """CuPy if x lives on a GPU, else NumPy."""
    if type(x).__module__.startswith("cupy"):
        import cupy

        return cupy
    return np


def T(x):
    """Transpose the last two axes."""
    return x.swapaxes(-1, -2)


def default_scale(q, scale):
    """`scale` as a Python float, which never widens an array's dtype."""
    return float(q.shape[-1] ** -0.5 if scale is None else scale)


def by_head(q, k, v, dtype):
    """q, k, v as (B, Hq, S, D) in `dtype`, with a key head repeated for each of its query heads."""
    q, k, v = (x.astype(dtype).swapaxes(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    return q, k.repeat(group, axis=1), v.repeat(group, axis=1)


def weighted(w, x, seen):
    """w @ x, where row j of x reaches only those rows i of the result with seen[i, j].

    Elsewhere w is 0, which suffices while x is finite. But 0 * NaN is NaN: rows of x that are not
    finite stay out of the product and are then added, one by one, where they are seen.
    w and seen (B, H, M, N), x (B, H, N, D), result (B, H, M, D).
    """
    xp = array_module(x)
    finite = xp.isfinite(x).all(axis=-1)  # (B, H, N)
    if finite.all():
        return w @ x
    out = w @ xp.where(finite[..., None], x, 0)
    for j in xp.flatnonzero(~finite.all(axis=(0, 1))).tolist():
        reached = seen[..., j] & ~finite[..., j, None]  # (B, H, M)
        term = w[..., j, None] * x[..., None, j, :]  # (B, H, M, D)
        out = xp.where(reached[..., None], out + term, out)
    return out
