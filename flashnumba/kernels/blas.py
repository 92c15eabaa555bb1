"""Attention by BLAS: the tiled online-softmax recurrence, vectorised over batch and heads.

The machine here is NumPy's matrix product. One step takes a tile of scores, some queries by some
keys, for a chunk of (batch, key head) pairs at once:

    chunk of (batch, key head)       k and v packed once: contiguous, in the compute type
        tile of queries              q packed and scaled; m = -inf, l = 0, acc = 0
            tile of keys             s = q k^T, then the recurrence
        o = acc / l, lse = m + log l

Inside a chunk every array starts with its batches b and key heads h. The G query heads that read
one key head are folded into the rows, (b, h, G * M, D) @ (b, h, D, N): BLAS gets few, large
products and no key is repeated. Keys are cut where masks begin and end (`key_tiles`): those that
no row sees are not visited, those that all rows see run without mask code.

Beyond the results, memory is one chunk: its keys and values and a few tiles. The order of every sum
depends on shapes, lengths and masks alone, so the same call gives the same bits.

Threads are left to BLAS. On 2 cores (float32, B1 H8 S4096 D64) a forward pass takes about 0.5 s;
split over two Python threads 0.75 s, as both wait for one pool of BLAS threads.

Sources: Milakov & Gimelshein (2018) for the online normaliser; Dao et al., FlashAttention (2022),
algorithms 1 and 4; Dao, FlashAttention-2 (2023), for dividing by l at the end.
"""

import math
from dataclasses import dataclass

import numpy as np

from flashnumba.window import alignment


@dataclass(frozen=True)
class Tiling:
    """Size of one step: query rows (all grouped heads together), keys, and a chunk's workspace."""

    rows: int
    keys: int
    chunk_bytes: int


# Seconds on 2 cores that were not idle, float32, B1 H8 S4096 D64, medians of 5 interleaved rounds:
#     rows x keys       128x512  256x512  256x1024  256x2048  512x1024  512x2048  1024x1024
#     forward             0.73     0.64     0.56      0.46      0.56      0.48      0.56
#     forward, causal     0.45     0.46     0.33      0.32      0.42      0.36      0.47
#     backward            1.38     1.23     1.04      0.94      1.06      1.00      1.02
#     backward, causal    0.76     0.72     0.63      0.56      0.67      0.67      0.80
# Wide tiles because a row's maximum costs 0.8 ns a score over 256 keys and 0.3 ns over 1024; few
# rows because a causal tile computes rows / 2 keys too many a row. 256 x 2048 float32 is 2 MiB, one
# core's L2 cache there. chunk_bytes: B65536 S16 H1 D80 takes 0.89, 0.75, 0.86 s forward and 1.43,
# 1.21, 1.64 s backward with 1, 4, 16 MiB.
TILING = Tiling(rows=256, keys=2048, chunk_bytes=4 << 20)


def forward(q, k, v, *, scale, tiling=TILING, **mask):
    """Attention, a tile of scores at a time.

    Parameters
    ----------
    q, k, v : ndarray (B, Sq, Hq, D), (B, Skv, Hkv, D), (B, Skv, Hkv, Dv)
        Of one floating type and any strides.
    scale : float
        Factor of the scores.
    tiling : Tiling
        Changes the order of sums, not what is summed.
    left, right : int
        Keys seen before and after the diagonal, or UNBOUNDED.
    upper_left : bool
        Which corner the diagonal starts from; see `flashnumba.window.alignment`.
    q_lengths, kv_lengths : int64 ndarray (B,) or None
        How much of each sequence is real.

    Returns
    -------
    o : ndarray (B, Sq, Hq, Dv)
        In the type of q; 0 where a row sees no key.
    lse : ndarray (B, Hq, Sq)
        float32, or float64 for float64; -inf where a row sees no key.
    """
    compute = compute_type(q.dtype)
    o = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), compute)
    geometry = Geometry(q.shape, k.shape, v.shape, **mask)
    scratch = Scratch(compute)
    q, k, v = geometry.group(q), k.swapaxes(1, 2), v.swapaxes(1, 2)
    o_rows, lse_rows = geometry.group(o), geometry.group_rows(lse)

    with np.errstate(all="ignore"):  # NaN and infinity are data
        for b, h in geometry.chunks(tiling, compute.itemsize):
            k_chunk, v_chunk = scratch.pack("k", k[b, h]), scratch.pack("v", v[b, h])
            kv_finite = all_finite(k_chunk, v_chunk)
            for queries in geometry.query_tiles(tiling.rows):
                at = (b, h, slice(None), queries)
                q_tile = scratch.fold("q", q[at])
                q_tile *= scale
                careful = not (kv_finite and all_finite(q_tile))
                key_range = key_tiles(*geometry.visible_keys(b, queries), tiling.keys)
                o_tile, lse_tile = forward_tile(
                    q_tile, k_chunk, v_chunk, key_range, careful, scratch
                )
                unfold(o_rows[at], o_tile)
                unfold(lse_rows[at], lse_tile)
    return o, lse


def forward_tile(q, k, v, key_range, careful, scratch):
    """The recurrence for one tile of queries: (o, lse).

    m' = max(m, max s)      a = exp(m - m')      p = exp(s - m')
    l' = a l + sum p        acc' = a acc + p v   and at the end o = acc / l
    """
    b, h, rows, _ = q.shape
    m = np.full((b, h, rows, 1), -np.inf, q.dtype)
    l = np.zeros_like(m)
    acc = scratch.zeros("acc", b, h, rows, v.shape[3])
    pv = scratch("pv", *acc.shape)
    for keys, mask in key_range:
        s, hidden = scores(q, k[:, :, keys], mask, careful, scratch)
        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        m_safe = np.where(m_new == -np.inf, 0, m_new)  # no key yet: exp(-inf - 0) = 0, not NaN
        a = np.exp(m - m_safe)
        s -= m_safe
        p = np.exp(s, out=s)
        l = a * l + row_sum(p)
        acc *= a
        acc += product(p, v[:, :, keys], hidden if careful else None, pv)
        m = m_new
    l = np.where(m == -np.inf, 1, l)  # saw nothing: o = 0 / 1, lse = -inf + 0
    acc /= l
    return acc, m + np.log(l)


def backward(do, dlse, q, k, v, o, lse, *, scale, tiling=TILING, **mask):
    """Gradients with respect to q, k and v, recomputing the scores a tile at a time.

    Parameters
    ----------
    do, dlse : ndarray (B, Sq, Hq, Dv), ndarray (B, Hq, Sq) or None
        Gradients of the loss with respect to o and lse.
    q, k, v, o, lse
        Inputs and results of `forward`; any strides.
    scale, tiling, **mask
        As in `forward`.

    Returns
    -------
    dq, dk, dv : ndarray
        Shapes and types of q, k, v.
    """
    compute = compute_type(q.dtype)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v))
    geometry = Geometry(q.shape, k.shape, v.shape, **mask)
    scratch = Scratch(compute)
    q, o, do, dq_rows = (geometry.group(x) for x in (q, o, do, dq))
    k, v, dk_rows, dv_rows = (x.swapaxes(1, 2) for x in (k, v, dk, dv))
    lse = geometry.group_rows(lse)
    dlse = None if dlse is None else geometry.group_rows(dlse)

    with np.errstate(all="ignore"):
        for b, h in geometry.chunks(tiling, compute.itemsize):
            k_chunk, v_chunk = scratch.pack("k", k[b, h]), scratch.pack("v", v[b, h])
            dk_chunk = scratch.zeros("dk", *k_chunk.shape)
            dv_chunk = scratch.zeros("dv", *v_chunk.shape)
            chunk = k_chunk, v_chunk, dk_chunk, dv_chunk
            kv_finite = all_finite(k_chunk, v_chunk)
            for queries in geometry.query_tiles(tiling.rows):
                at = (b, h, slice(None), queries)
                q_tile, do_tile = scratch.fold("q", q[at]), scratch.fold("do", do[at])
                q_tile *= scale
                careful = not (kv_finite and all_finite(q_tile, do_tile))
                delta = row_sum(do_tile * scratch.fold("o", o[at]))
                if dlse is not None:
                    delta -= scratch.fold("dlse", dlse[at])
                lse_tile = scratch.fold("lse", lse[at])
                key_range = key_tiles(*geometry.visible_keys(b, queries), tiling.keys)
                dq_tile = backward_tile(
                    q_tile, do_tile, lse_tile, delta, *chunk, key_range, careful, scratch
                )
                dq_tile *= scale
                unfold(dq_rows[at], dq_tile)
            dk_rows[b, h], dv_rows[b, h] = dk_chunk, dv_chunk
    return dq, dk, dv


def backward_tile(q, do, lse, delta, k, v, dk, dv, key_range, careful, scratch):
    """One tile of queries against all its keys: returns dq / scale, adds to dk and dv.

    p = exp(s - lse)        dv += p^T do
    dp = do v^T             ds = p (dp - delta)     dq += ds k      dk += ds^T q
    """
    dq = scratch.zeros("dq", *q.shape)
    lse = np.where(lse == -np.inf, 0, lse)  # saw nothing: exp(-inf - 0) = 0, not NaN
    for keys, mask in key_range:
        k_tile, v_tile = k[:, :, keys], v[:, :, keys]
        s, hidden = scores(q, k_tile, mask, careful, scratch)
        apart = hidden if careful else None
        s -= lse
        p = np.exp(s, out=s)
        clear(p, hidden)  # a row of NaN is NaN only where it sees
        dv[:, :, keys] += product(T(p), do, T(apart), scratch("p^T do", *v_tile.shape))
        ds = np.matmul(do, T(v_tile), out=scratch("ds", *p.shape))
        ds -= delta
        ds *= p
        clear(ds, hidden)
        dq += product(ds, k_tile, apart, scratch("ds k", *q.shape))
        dk[:, :, keys] += product(T(ds), q, T(apart), scratch("ds^T q", *k_tile.shape))
    return dq


def scores(q, k, mask, careful, scratch):
    """One tile of scores, -inf where hidden, and where that is (None: nowhere).

    `careful` when an operand is not finite: a score of -inf then hides its key too, and `product`
    has to know what is hidden. While all are finite, 0 times what is hidden is 0.
    """
    s = np.matmul(q, T(k), out=scratch("s", *q.shape[:3], k.shape[2]))
    hidden = None if mask is None else ~mask
    if hidden is not None:
        np.copyto(s, -np.inf, where=hidden)
    return s, (s == -np.inf if careful else hidden)


def clear(x, hidden):
    """Set what is hidden to 0, in place."""
    if hidden is not None:
        np.copyto(x, 0, where=hidden)


def product(p, x, hidden, out):
    """p @ x, where row j of x does not reach the rows of p that it is hidden from.

    There p is 0, which suffices while x is finite. Rows of x that are not, and that are hidden from
    some row of p, stay out of the product; they are added, one by one, where they are seen.
    """
    if hidden is None:
        return np.matmul(p, x, out=out)
    apart = ~np.isfinite(x).all(axis=-1) & hidden.any(axis=-2)  # (b, h, N)
    np.matmul(p, np.where(apart[..., None], 0, x), out=out)
    for j in np.flatnonzero((apart & ~hidden.all(axis=-2)).any(axis=(0, 1))):
        reached = apart[..., None, j] & ~hidden[..., j]  # (b, h, rows)
        term = p[..., j, None] * x[..., None, j, :]
        np.add(out, term, out=out, where=reached[..., None])
    return out


def key_tiles(lo, hi, tile_keys):
    """Cut the keys of rows that see [lo, hi) into tiles.

    On the left lie keys that only some rows see, then those that all see, then again some. Each
    part is cut to its own ends, so that a narrow mask never makes a wide tile masked.

    Yields
    ------
    keys : slice
    mask : bool ndarray (b or 1, 1, rows, N) or None
        Which row sees which key; None where all see all.
    """
    lo, hi = np.broadcast_arrays(lo, hi)
    some = lo < hi
    if not some.any():
        return
    begin, end = int(lo[some].min()), int(hi[some].max())
    full_begin, full_end = int(lo.max()), int(hi.min())
    if full_begin >= full_end or not some.all():
        full_begin = full_end = end
    for start, stop in ((begin, full_begin), (full_begin, full_end), (full_end, end)):
        for n in range(start, stop, tile_keys):
            keys = slice(n, min(n + tile_keys, stop))
            if full_begin <= n < full_end:
                yield keys, None
                continue
            kv_idx = np.arange(keys.start, keys.stop)
            mask = (lo <= kv_idx) & (kv_idx < hi)
            if mask.any():  # sequences of one chunk may leave a gap between them
                yield keys, mask


class Geometry:
    """Sizes and mask of one call: what is looped over, and which keys a row sees."""

    def __init__(
        self, q_shape, k_shape, v_shape, *, left, right, upper_left, q_lengths, kv_lengths
    ):
        self.batch, self.seqlen_q, heads_q, head_dim = q_shape
        _, self.seqlen_kv, self.heads_kv, head_dim_v = v_shape
        self.groups = heads_q // max(self.heads_kv, 1)
        self.head_dims = head_dim + head_dim_v
        self.left, self.right, self.upper_left = left, right, upper_left
        self.q_lengths, self.kv_lengths = q_lengths, kv_lengths

    def group(self, x):
        """(B, S, Hq, D) -> (B, Hkv, G, S, D), a view: query heads by the key head they read."""
        b, s, _, d = x.shape
        return x.reshape(b, s, self.heads_kv, self.groups, d).transpose(0, 2, 3, 1, 4)

    def group_rows(self, x):
        """(B, Hq, S) -> (B, Hkv, G, S, 1), a view."""
        b, _, s = x.shape
        return x.reshape(b, self.heads_kv, self.groups, s, 1)

    def chunks(self, tiling, itemsize):
        """Slices (batches, key heads) whose forward workspace fits; at least one of each."""
        rows = self.groups * min(self.seqlen_q, self.step(tiling.rows))
        keys = min(self.seqlen_kv, tiling.keys)
        head_bytes = itemsize * (rows * keys + (rows + self.seqlen_kv) * self.head_dims)
        pairs = max(1, tiling.chunk_bytes // max(1, head_bytes))
        h_step = max(1, min(pairs, self.heads_kv))
        b_step = pairs // h_step
        for b in range(0, self.batch, b_step):
            for h in range(0, self.heads_kv, h_step):
                yield slice(b, b + b_step), slice(h, h + h_step)

    def step(self, rows):
        """Queries in a tile of `rows` rows."""
        return max(1, rows // max(self.groups, 1))

    def query_tiles(self, rows):
        """Slices of query indices."""
        for m in range(0, self.seqlen_q, self.step(rows)):
            yield slice(m, min(m + self.step(rows), self.seqlen_q))

    def visible_keys(self, batches, queries):
        """`flashnumba.window.interval` of all rows of a tile: arrays lo, hi (b or 1, 1, G * M, 1).

        A row beyond its query length sees nothing, lo >= hi.
        """
        q_length = per_batch(self.q_lengths, self.seqlen_q, batches)
        kv_length = per_batch(self.kv_lengths, self.seqlen_kv, batches)
        q_idx = np.tile(np.arange(queries.start, queries.stop), self.groups)[:, None]
        diagonal = q_idx + alignment(q_length, kv_length, self.upper_left)
        lo = np.clip(diagonal - self.left, 0, kv_length)
        hi = np.clip(diagonal + self.right + 1, 0, kv_length)
        return lo, np.where(q_idx < q_length, hi, 0)


def per_batch(lengths, seqlen, batches):
    """The lengths of a chunk's sequences, (b, 1, 1, 1), or the one that all have, (1, 1, 1, 1)."""
    lengths = np.array([seqlen]) if lengths is None else lengths[batches]
    return lengths.reshape(-1, 1, 1, 1)


class Scratch:
    """Working memory by name: the same name is the same memory again, so that it stays in cache."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.buffers = {}

    def __call__(self, name, *shape):
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].size < size:
            self.buffers[name] = np.empty(size, self.dtype)
        return self.buffers[name][:size].reshape(shape)

    def zeros(self, name, *shape):
        out = self(name, *shape)
        out[...] = 0
        return out

    def pack(self, name, x):
        """A contiguous copy of x, of any strides and floating type, in the compute type."""
        out = self(name, *x.shape)
        np.copyto(out, x)
        return out

    def fold(self, name, x):
        """`pack`, then (b, h, G, M, D) -> (b, h, G * M, D): a group's query heads are rows."""
        b, h, groups, m, d = x.shape
        return self.pack(name, x).reshape(b, h, groups * m, d)


def unfold(out, x):
    """Store x (b, h, G * M, D) in out (b, h, G, M, D), converting to its type."""
    out[...] = x.reshape(out.shape)


def compute_type(dtype):
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def all_finite(*arrays):
    return all(np.isfinite(x).all() for x in arrays)


def row_sum(x):
    """Sums along the last axis, kept: 0.1 ns an element by BLAS, 0.35 ns by ndarray.sum."""
    return x @ np.ones((x.shape[-1], 1), x.dtype)


def T(x):
    """Transpose the last two axes, of None too."""
    return None if x is None else x.swapaxes(-1, -2)
