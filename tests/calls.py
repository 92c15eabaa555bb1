"""Calls of flashnumba that return NumPy arrays whatever the backend, and random problems."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
from rule import assert_within_rule

import flashnumba as fn
from flashnumba import reference

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


def problem(seqlen_q, seqlen_kv, *, batch=1, heads=1, heads_kv=None, dim=16, dim_v=None,
            dtype="float32", seed=0, factor=1.0):  # fmt: skip
    """Random q, k, v, do, dlse in standard normal numbers times `factor`."""
    rng = np.random.default_rng(seed)
    heads_kv = heads_kv or heads
    dim_v = dim_v or dim
    make = lambda *shape: (factor * rng.standard_normal(shape)).astype(DTYPES[dtype])
    return SimpleNamespace(
        q=make(batch, seqlen_q, heads, dim),
        k=make(batch, seqlen_kv, heads_kv, dim),
        v=make(batch, seqlen_kv, heads_kv, dim_v),
        do=make(batch, seqlen_q, heads, dim_v),
        dlse=rng.standard_normal((batch, heads, seqlen_q)).astype(
            np.float64 if dtype == "float64" else np.float32
        ),
    )


def run(backend, q, k, v, do=None, dlse=None, **options):
    """Forward, and backward if `do` is given: a namespace of NumPy arrays o, lse, dq, dk, dv."""
    inputs = [q, k, v, do, dlse]
    if backend == "gpu":
        import cupy

        inputs = [None if x is None else to_gpu(cupy, x) for x in inputs]
        options = {"backend": "simt", **options}
    else:
        options = {"backend": backend, **options}
    q, k, v, do, dlse = inputs
    (o, lse), pullback = fn.attention_vjp(q, k, v, return_lse=True, **options)
    grads = pullback(do, dlse) if do is not None else (None,) * 3
    out = {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    return SimpleNamespace(**{n: x.get() if backend == "gpu" and x is not None else x
                              for n, x in out.items()})  # fmt: skip


def to_gpu(cupy, x):
    """A CuPy array with the strides of `x`, negative and zero ones included."""
    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    if base is x or not (base.flags.c_contiguous and base.dtype == x.dtype):
        return cupy.asarray(x)
    start = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    there = cupy.asarray(base)
    memory = there.data + start
    return cupy.ndarray(x.shape, x.dtype, memptr=memory, strides=x.strides)


def check(backend, p, *, dlse=True, **options):
    """Run problem `p` forward and backward and hold everything against the pass rule."""
    mask = {n: x for n, x in options.items() if n not in ("backend", "layout")}
    dlse = p.dlse if dlse else None
    got = run(backend, p.q, p.k, p.v, p.do, dlse, **options)
    exact = reference.attention(p.q, p.k, p.v, **mask)
    low = reference.low_precision(p.q, p.k, p.v, **mask)
    assert_within_rule(got.o, exact[0], low[0], p.q.dtype, "o")
    assert_within_rule(got.lse, exact[1], low[1], got.lse.dtype, "lse")
    exact = reference.attention_backward(p.do, p.q, p.k, p.v, dlse=dlse, **mask)
    low = reference.low_precision_backward(p.do, p.q, p.k, p.v, dlse=dlse, **mask)
    for name, e, w in zip(("dq", "dk", "dv"), exact, low, strict=True):
        assert_within_rule(getattr(got, name), e, w, p.q.dtype, name)
    return got
