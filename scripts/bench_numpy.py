"""Time and memory of the NumPy backend against dense attention in NumPy.

    python scripts/bench_numpy.py                    # B1 H8 S4096 D64, forward and backward
    python scripts/bench_numpy.py --causal --dtype bfloat16
    python scripts/bench_numpy.py --long             # S32768, where dense scores take 32 GiB

Both are warmed up, then timed in turn, round by round, so that a busy machine slows both; the
table shows medians. Peak memory is what NumPy allocates beyond the inputs, results included
(tracemalloc).
Errors are relative to float64 on some rows: |got - exact| / |exact| in the 2-norm, of o and of dq.
"""

import argparse
import statistics
import time
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import records
from dense import dense_backward, dense_forward
from tqdm import tqdm

from flashnumba.kernels import blas
from flashnumba.window import UNBOUNDED

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
LONG = 32768


def exact_rows(do, q, k, v, scale, causal, rows):
    """o and dq in float64 for some query rows of the first batch and head."""
    do, q, k, v = (x[0, :, 0].astype(np.float64) for x in (do, q, k, v))
    s = scale * q[rows] @ k.T
    if causal:
        s[np.arange(len(k)) > rows[:, None]] = -np.inf
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = do[rows] @ v.T
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
    return p @ v, ds @ k


def relative_error(got, exact, rows):
    difference = got[0, rows, 0].astype(np.float64) - exact
    return float(np.linalg.norm(difference) / np.linalg.norm(exact))


def timed(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_mib(function):
    """The result, and the peak of what was allocated to get it."""
    tracemalloc.start()
    result = function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return result, peak / 2**20


def measure(args):
    """One result a pass and implementation, as a dict of the numbers that vary."""
    shape = (args.batch, args.seqlen, args.heads, args.head_dim)
    rng = np.random.default_rng(0)
    dtype = DTYPES[args.dtype]
    q, k, v, do = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(4))
    scale = args.head_dim**-0.5
    right = 0 if args.causal else UNBOUNDED
    mask = dict(left=UNBOUNDED, right=right, upper_left=False, q_lengths=None, kv_lengths=None)
    o, lse = blas.forward(q, k, v, scale=scale, **mask)
    runs = {
        ("forward", "flashnumba-numpy"): lambda: blas.forward(q, k, v, scale=scale, **mask),
        ("forward", "numpy-dense"): lambda: (dense_forward(q, k, v, scale, args.causal),),
        ("backward", "flashnumba-numpy"): lambda: blas.backward(
            do, None, q, k, v, o, lse, scale=scale, **mask
        ),
        ("backward", "numpy-dense"): lambda: dense_backward(do, q, k, v, o, scale, args.causal),
    }
    if args.long:
        runs = {key: run for key, run in runs.items() if key[1] != "numpy-dense"}

    rows = np.unique(np.linspace(0, args.seqlen - 1, 64).astype(int))
    exact_o, exact_dq = exact_rows(do, q, k, v, scale, args.causal, rows)
    exact = {"forward": exact_o, "backward": exact_dq}
    results = {}
    for key, run in runs.items():  # also the warm-up, and with no rounds the measurement
        start = time.perf_counter()
        got, peak = peak_mib(run)
        first = time.perf_counter() - start
        error = relative_error(got[0], exact[key[0]], rows)
        results[key] = {"error": error, "peak_mib": peak, "seconds": [] if args.rounds else [first]}
        del got
    for _ in tqdm(range(args.rounds), desc="rounds", leave=False):
        for key, run in runs.items():
            results[key]["seconds"].append(timed(run))
    return results


def record(args, key, result):
    """A row of the CSV."""
    which, implementation = key
    ms = statistics.median(result["seconds"]) * 1e3
    mask = "causal" if args.causal else "full"
    return records.row(
        which,
        args.dtype,
        args.heads,
        args.head_dim,
        args.batch,
        args.seqlen,
        mask,
        implementation,
        ms,
        result["error"],
        result["peak_mib"],
        records.cpu(),
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlen", type=int, default=None, help="4096, with --long 32768")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rounds", type=int, default=None, help="5; with --long 0: one cold run")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--long", action="store_true", help="a length that dense cannot hold")
    parser.add_argument("--save", type=Path, metavar="CSV", help="append the rows to a CSV")
    args = parser.parse_args(argv)
    args.seqlen = args.seqlen or (LONG if args.long else 4096)
    if args.rounds is None:
        args.rounds = 0 if args.long else 5

    rows = [record(args, key, result) for key, result in measure(args).items()]
    print(
        f"{rows[0]['gpu']}; {rows[0]['versions']}\n{args.dtype}, {rows[0]['mask']}, "
        f"B{args.batch} H{args.heads} S{args.seqlen} D{args.head_dim}, {args.rounds} rounds\n"
    )
    header = ("seconds", "TFLOP/s", "peak MiB", "error")
    print(f"{'pass':10}{'implementation':18}" + "".join(f"{name:>10}" for name in header))
    for r in rows:
        print(
            f"{r['pass']:10}{r['implementation']:18}{float(r['ms']) / 1e3:10.3f}{r['tflops']:>10}"
            f"{r['peak_mib']:>10}{r['error']:>10}"
        )
    if args.long:
        itemsize = blas.compute_type(DTYPES[args.dtype]).itemsize
        scores = args.batch * args.heads * args.seqlen**2 * itemsize / 2**30
        print(f"\ndense scores: {scores:.1f} GiB forward, {2 * scores:.1f} GiB backward")
    if args.save:
        records.save(args.save, rows)


if __name__ == "__main__":
    main()
