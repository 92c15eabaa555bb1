"""Calls of flashnumba that return NumPy arrays whatever the backend, and random problems."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from rule import assert_within_rule, eps

import flashnumba as fn
from flashnumba import reference

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


def on_gpu(backend):
    """Whether the fixture `backend` is a GPU's."""
    return backend.startswith("gpu")


def named(backend):
    """What a user calls it."""
    name = "simt" if backend == "gpu" else backend.removeprefix("gpu-")
    return name.replace("split", "wgmma")


def tensor_cores(backend):
    """Whether it is kernels for tensor cores: wgmma, of halves or of float32 in parts, or mma."""
    return named(backend).endswith("mma")


def of_blocks(backend):
    """Whether it is a simulated kernel of many threads, a second or two a call."""
    return named(backend) in ("simulator-mma", "simulator-wgmma")


def taken(backend, dtype="float32"):
    """A dtype that the backend can compute: `dtype`, or the nearest that it takes."""
    if backend.endswith("split"):
        return "float32"
    if backend.endswith("wgmma") and dtype in ("float32", "float64"):
        return "float16"
    return "float32" if tensor_cores(backend) and dtype == "float64" else dtype


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


def run(backend, q, k, v, do=None, dlse=None, deterministic=True, **options):
    """Forward, and backward if `do` is given: a namespace of NumPy arrays o, lse, dq, dk, dv."""
    inputs = [q, k, v, do, dlse]
    if on_gpu(backend):
        import cupy

        inputs = [None if x is None else to_gpu(cupy, x) for x in inputs]
    options = {"backend": named(backend), "deterministic": deterministic, **options}
    q, k, v, do, dlse = inputs
    (o, lse), pullback = fn.attention_vjp(q, k, v, return_lse=True, **options)
    grads = pullback(do, dlse) if do is not None else (None,) * 3
    out = {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    return SimpleNamespace(**{n: x.get() if on_gpu(backend) and x is not None else x
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


def check(backend, p, *, dlse=True, backward=True, **options):
    """Run problem `p` forward and backward and hold everything against the pass rule."""
    do, dlse = (p.do if backward else None), (p.dlse if dlse else None)
    got = run(backend, p.q, p.k, p.v, do, dlse, **options)
    assert_right(got, p.q, p.k, p.v, do, dlse, **options)
    return got


def assert_right(got, q, k, v, do=None, dlse=None, **options):
    """Hold results of `run` against the pass rule."""
    mask = {n: x for n, x in options.items() if n not in ("backend", "layout", "deterministic")}
    results = exact_and_low("attention", "low_precision", (q, k, v), **mask)
    lse = results[1][0]
    for name, (exact, low) in zip(("o", "lse"), results, strict=True):
        assert_within_rule(getattr(got, name), exact, low, getattr(got, name).dtype, name)
    if do is None:
        return
    largest = np.abs(lse[np.isfinite(lse)]).max(initial=0)
    results = exact_and_low(
        "attention_backward", "low_precision_backward", (do, q, k, v), dlse=dlse, **mask
    )
    for name, (exact, low) in zip(("dq", "dk", "dv"), results, strict=True):
        # The baseline keeps p; a recomputed p = exp(s - lse) has an error of eps |lse| more, half
        # of it from storing lse, half from subtracting it.
        more = eps(got.lse.dtype) * largest * np.abs(exact).max(initial=0)
        low = low + np.copysign(more, low - exact)
        assert_within_rule(getattr(got, name), exact, low, q.dtype, name)


def exact_and_low(exact, low, inputs, dlse=None, **options):
    """Pairs of an exact result and one in the inputs' dtype, by these two functions of `reference`.

    Exact is float64, and for float64 inputs the 80 bits of x86's longdouble: a float64 result is as
    far from the truth as the kernel's, and the difference of both says nothing about either.
    """
    dtype = inputs[0].dtype
    if dtype == np.float64 and np.finfo(np.longdouble).eps == eps(np.float64):
        pytest.skip("no type here is more exact than float64")
    wide = np.longdouble if dtype == np.float64 else np.float64
    more = {} if dlse is None else {"dlse": dlse}
    truth = getattr(reference, exact)(*(x.astype(wide) for x in inputs), **more, **options)
    return tuple(zip(truth, getattr(reference, low)(*inputs, **more, **options), strict=True))


RESULTS = ("o", "lse", "dq", "dk", "dv")


def assert_same_bits(got, expected, names=RESULTS):
    """Every named result of two calls of `run` is the same to the bit."""
    for name in names:
        x, y = getattr(got, name), getattr(expected, name)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert x.tobytes() == y.tobytes(), f"{name}: {np.sum(x != y)} of {x.size} entries differ"


def masks(seqlen_q, seqlen_kv):
    """Every kind of mask, alone and combined, for a batch of 2. Lengths include 0 and 1."""
    ragged = {
        "q_lengths": [seqlen_q, seqlen_q * 2 // 3],
        "kv_lengths": [seqlen_kv // 2, seqlen_kv - 1],
    }
    empty = {"q_lengths": [0, seqlen_q - 1], "kv_lengths": [seqlen_kv, 1]}
    no_keys = {"kv_lengths": [0, seqlen_kv * 3 // 4]}
    wide = seqlen_kv // 2  # more than a tile in the simulator
    return {
        "full": {},
        "causal": {"causal": True},
        "upper_left": {"causal": "upper_left"},
        "window": {"window": (3, 2)},
        "diagonal": {"window": (0, 0)},
        "wide": {"window": (wide, wide // 3)},
        "left": {"window": (2, None)},
        "right": {"window": (None, 4)},
        "causal_window": {"causal": True, "window": (5, 3)},
        "upper_left_window": {"causal": "upper_left", "window": (wide, None)},
        "ragged": ragged,
        "ragged_causal": {"causal": True, **ragged},
        "ragged_upper_left": {"causal": "upper_left", **ragged},
        "ragged_window": {"window": (4, wide // 2), **ragged},
        "ragged_causal_window": {"causal": True, "window": (7, None), **ragged},
        "empty_causal": {"causal": True, **empty},
        "no_keys_window": {"window": (None, 1), **no_keys},
    }


MASKS = tuple(masks(2, 2))
