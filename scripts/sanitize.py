"""Small calls of every GPU kernel, to run under NVIDIA's compute-sanitizer.

    python scripts/sanitize.py                                   # once, fills the kernel cache
    compute-sanitizer --tool memcheck python scripts/sanitize.py
    compute-sanitizer --tool racecheck python scripts/sanitize.py
    compute-sanitizer --tool synccheck python scripts/sanitize.py --forward --dtype float16

Lengths are off every tile boundary; there are grouped heads, padding, windows, empty rows, wide
heads in several slices, inputs that start in the middle of their memory, infinite values, some of
which no query sees, and more works than multiprocessors. Halves with 8, 64, 128 and 256 columns go
by TMA on a Hopper GPU, others without.
"""

import argparse

import cupy
import numpy as np

import flashnumba as fn

MANY = 90  # with two heads more works than a GPU has multiprocessors: blocks take a second
CASES = {
    "full": (2, {}),
    "causal": (2, {"causal": True}),
    "window, ragged": (2, {"window": (9, 3), "q_lengths": [70, 0], "kv_lengths": [81, 40]}),
    "causal, many": (MANY, {"causal": True}),
}


def call(dtype, head_dim, batch, mask, forward_only):
    """Forward and backward of one problem; outputs must be finite."""
    random = cupy.random.default_rng(0).standard_normal
    shape = lambda seqlen, heads: (batch, seqlen + 1, heads, head_dim)
    make = lambda *size: random(shape(*size), np.float32).astype(dtype)[:, 1:]
    q, k, v, do = make(70, 4), make(81, 2), make(81, 2), make(70, 4)
    if "kv_lengths" in mask:
        v[1, mask["kv_lengths"][1] :] = np.inf
    if forward_only:
        results = (fn.attention(q, k, v, **mask),)
    else:
        o, pullback = fn.attention_vjp(q, k, v, **mask)
        ordered = fn.attention_vjp(q, k, v, deterministic=True, **mask)[1]
        results = (o, *pullback(do), *ordered(do))
    for x in results:
        if not bool(cupy.isfinite(x.astype(np.float32)).all()):
            raise SystemExit(f"not finite: {dtype}, head_dim {head_dim}, {mask}")
    v[0, 75] = np.inf
    if not bool(cupy.isinf(fn.attention(q, k, v, **mask)).any()):
        raise SystemExit(f"an infinite value went unseen: {dtype}, head_dim {head_dim}, {mask}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["float16", "float32", "float64"])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[8, 64, 129])
    parser.add_argument("--forward", action="store_true", help="no gradients")
    args = parser.parse_args(argv)
    for dtype in args.dtype:
        for head_dim in args.head_dim:
            for name, (batch, mask) in CASES.items():
                call(dtype, head_dim, batch, mask, args.forward)
                print(f"{dtype}, head_dim {head_dim}, {name}: done")


if __name__ == "__main__":
    main()
