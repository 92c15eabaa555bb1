"""Small calls of every GPU kernel, to run under NVIDIA's compute-sanitizer.

    python scripts/sanitize.py                                   # once, fills the kernel cache
    compute-sanitizer --tool memcheck --report-api-errors no python scripts/sanitize.py
    compute-sanitizer --tool racecheck python scripts/sanitize.py
    compute-sanitizer --tool synccheck python scripts/sanitize.py --forward --dtype float16
    compute-sanitizer --tool racecheck python scripts/sanitize.py --backend mma

Lengths are off every tile boundary; there are grouped heads, padding, windows, empty rows, wide
heads in several slices, inputs that start in the middle of their memory, infinite values, some of
which no query sees, and more works than multiprocessors. Halves with 8, 64, 128 and 256 columns go
by TMA on a Hopper GPU, others without. The kernels are those that flashnumba chooses on this GPU;
--backend asks for others, which leave out what they do not take. CUDA's Python bindings ask the
driver for functions that it does not have, which memcheck would report as errors.
"""

import argparse

import cupy
import numpy as np

import flashnumba as fn
from flashnumba import config
from flashnumba.problem import ON_GPU

MANY = 90  # with two heads more works than a GPU has multiprocessors: blocks take a second
CASES = {
    "full": (2, {}),
    "causal": (2, {"causal": True}),
    "window, ragged": (2, {"window": (9, 3), "q_lengths": [70, 0], "kv_lengths": [81, 40]}),
    "causal, many": (MANY, {"causal": True}),
}


def takes(backend, dtype, head_dim):
    """Whether a backend computes such arrays; one that is not in the table of families does all."""
    families = config.families(backend)
    return not families or any(dtype in f.dtypes and head_dim <= f.head_dim for f in families)


def call(dtype, head_dim, batch, mask, forward_only, backend):
    """Forward and backward of one problem; outputs must be finite."""
    options = {**mask, "backend": backend}
    random = cupy.random.default_rng(0).standard_normal
    shape = lambda seqlen, heads: (batch, seqlen + 1, heads, head_dim)
    make = lambda *size: random(shape(*size), np.float32).astype(dtype)[:, 1:]
    q, k, v, do = make(70, 4), make(81, 2), make(81, 2), make(70, 4)
    if "kv_lengths" in mask:
        v[1, mask["kv_lengths"][1] :] = np.inf
    if forward_only:
        results = (fn.attention(q, k, v, **options),)
    else:
        o, pullback = fn.attention_vjp(q, k, v, **options)
        ordered = fn.attention_vjp(q, k, v, deterministic=True, **options)[1]
        results = (o, *pullback(do), *ordered(do))
    for x in results:
        if not bool(cupy.isfinite(x.astype(np.float32)).all()):
            raise SystemExit(f"not finite: {dtype}, head_dim {head_dim}, {options}")
    v[0, 75] = np.inf
    if not bool(cupy.isinf(fn.attention(q, k, v, **options)).any()):
        raise SystemExit(f"an infinite value went unseen: {dtype}, head_dim {head_dim}, {options}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["float16", "float32", "float64"])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[8, 64, 129])
    parser.add_argument("--forward", action="store_true", help="no gradients")
    parser.add_argument("--backend", choices=ON_GPU, help="default: flashnumba's own choice")
    args = parser.parse_args(argv)
    for dtype in args.dtype:
        for head_dim in args.head_dim:
            if not takes(args.backend, dtype, head_dim):
                print(f"{dtype}, head_dim {head_dim}: not for {args.backend}")
                continue
            for name, (batch, mask) in CASES.items():
                call(dtype, head_dim, batch, mask, args.forward, args.backend)
                print(f"{dtype}, head_dim {head_dim}, {name}: done")


if __name__ == "__main__":
    main()
