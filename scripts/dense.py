"""The conventional attention that the scripts compare with: all scores at once, NumPy or CuPy.

A fair opponent: batched products, everything after them in place, no copies but the ones that
BLAS needs. Arrays are (batch, seqlen, heads, head_dim); halves are computed in float32.
"""

import sys

import numpy as np


def module(x):
    """numpy or cupy, by the class of an array."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def by_head(x):
    """(B, S, H, D) -> (B, H, S, D), contiguous, in the type computed in."""
    compute = np.float64 if x.dtype == np.float64 else np.float32
    return module(x).ascontiguousarray(x.swapaxes(1, 2).astype(compute, copy=False))


def probabilities(q, k, scale, causal):
    """All of softmax(scale q k^T), in place after the product."""
    xp = module(q)
    s = xp.matmul(q * q.dtype.type(scale), k.swapaxes(-1, -2))
    if causal:
        n = xp.arange(s.shape[-1])
        s[..., n > n[:, None]] = -np.inf
    s -= s.max(axis=-1, keepdims=True)
    xp.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s


def dense_forward(q, k, v, scale, causal=False):
    """o, in the inputs' type."""
    p = probabilities(by_head(q), by_head(k), scale, causal)
    return (p @ by_head(v)).swapaxes(1, 2).astype(q.dtype, copy=False)


def dense_backward(do, q, k, v, o, scale, causal=False):
    """dq, dk, dv, from recomputed probabilities."""
    dtype = q.dtype
    do, q, k, v, o = (by_head(x) for x in (do, q, k, v, o))
    p = probabilities(q, k, scale, causal)
    dv = p.swapaxes(-1, -2) @ do
    ds = do @ v.swapaxes(-1, -2)
    ds -= (do * o).sum(axis=-1, keepdims=True)
    ds *= p
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q
    dq *= q.dtype.type(scale)
    dk *= q.dtype.type(scale)
    return tuple(x.swapaxes(1, 2).astype(dtype, copy=False) for x in (dq, dk, dv))
