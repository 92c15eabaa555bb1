"""Speed, memory and error of the GPU kernels, beside dense attention in CuPy where that fits.

    python scripts/bench.py                                   # float32, D 64 and 128
    python scripts/bench.py --dtype bfloat16 --mask causal
    python scripts/bench.py --seqlen 131072 --heads 1 --batch 1 --head-dim 64 --save

A cell has 16384 tokens and a hidden size of 2048 unless --batch or --heads say otherwise. What is
compared runs in turn, round by round, and the table shows medians of GPU time. The error is
|got - exact| / |exact| in the 2-norm, against float64, of the first batch and head: of o forward,
the largest of dq, dk and dv backward. Peak memory is what CuPy's pool had to get beyond the inputs,
results included.
"""

import argparse
from pathlib import Path

import cupy
import numpy as np
import records
from dense import dense_backward, dense_forward
from tqdm import tqdm

import flashnumba as fn

TOKENS, HIDDEN = 16384, 2048
DENSE_LIMIT = 16 << 30  # bytes of scores above which dense attention is skipped


def exact_head(do, q, k, v, scale, causal, rows=1024):
    """float64 (o, dq, dk, dv) of one head, (seqlen, dim) each, some rows of scores at a time."""
    do, q, k, v = (x.astype(np.float64) for x in (do, q, k, v))
    o, dq = cupy.empty((len(q), v.shape[1])), cupy.empty_like(q)
    dk, dv = cupy.zeros_like(k), cupy.zeros_like(v)
    for start in range(0, len(q), rows):
        at = slice(start, start + rows)
        s = scale * (q[at] @ k.T)
        if causal:
            i = cupy.arange(start, start + len(s))[:, None] + len(k) - len(q)
            s = cupy.where(cupy.arange(len(k)) <= i, s, -np.inf)
        p = cupy.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        o[at] = p @ v
        dp = do[at] @ v.T
        ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) * scale
        dq[at] = ds @ k
        dk += ds.T @ q[at]
        dv += p.T @ do[at]
    return o, dq, dk, dv


def error(got, exact):
    """The largest relative error of several arrays, each by its first batch and head."""
    norm = cupy.linalg.norm
    return max(float(norm(g[0, :, 0] - e) / norm(e)) for g, e in zip(got, exact, strict=True))


def once(function):
    """GPU time of one call, in ms."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    function()
    end.record()
    end.synchronize()
    return cupy.cuda.get_elapsed_time(start, end)


def with_peak(function):
    """(result, peak MiB); the first call compiles and is not counted."""
    function()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    result = function()
    cupy.cuda.Device().synchronize()
    return result, (pool.total_bytes() - before) / 2**20


def cell(args, head_dim, seqlen, mask, machine):
    """The rows of one problem: each pass and implementation."""
    heads = args.heads or max(1, HIDDEN // head_dim)
    batch = args.batch or max(1, TOKENS // seqlen)
    causal, scale = mask == "causal", head_dim**-0.5
    random = lambda: cupy.random.standard_normal((batch, seqlen, heads, head_dim), np.float32)
    dtype = np.dtype(args.dtype) if args.dtype != "bfloat16" else bfloat16()
    q, k, v, do = (random().astype(dtype) for _ in range(4))
    o, lse = fn.attention(q, k, v, causal=causal, return_lse=True)
    runs = {
        ("forward", "flashnumba"): lambda: fn.attention(q, k, v, causal=causal),
        ("backward", "flashnumba"): lambda: fn.attention_backward(
            do, q, k, v, o, lse, causal=causal
        ),
        ("forward", "cupy-dense"): lambda: dense_forward(q, k, v, scale, causal),
        ("backward", "cupy-dense"): lambda: dense_backward(do, q, k, v, o, scale, causal),
    }
    runs = {key: run for key, run in runs.items() if key[0] in args.passes}
    if batch * heads * seqlen**2 * 8 > DENSE_LIMIT:
        runs = {key: run for key, run in runs.items() if key[1] != "cupy-dense"}
    exact = exact_head(*(x[0, :, 0] for x in (do, q, k, v)), scale, causal)
    peaks, errors, times = {}, {}, {key: [] for key in runs}
    for key, run in runs.items():
        got, peaks[key] = with_peak(run)
        forward = key[0] == "forward"
        errors[key] = error([got] if forward else got, exact[:1] if forward else exact[1:])
        del got
    for _ in range(args.rounds):
        for key, run in runs.items():
            times[key].append(once(run))
    for (which, name), ms in times.items():
        key = which, name
        yield records.row(which, args.dtype, heads, head_dim, batch, seqlen, mask, name,
                          float(np.median(ms)), errors[key], peaks[key], machine)  # fmt: skip


def bfloat16():
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    both = ["forward", "backward"]
    parser.add_argument("--pass", dest="passes", nargs="+", choices=both, default=both)
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    parser.add_argument("--dtype", choices=dtypes, default="float32")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--mask", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--heads", type=int, help=f"default: {HIDDEN} / head_dim")
    parser.add_argument("--batch", type=int, help=f"default: {TOKENS} / seqlen")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="append to results/PASS-GPU.csv")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    machine = records.gpu()
    print(f"{machine['gpu']}, driver {machine['driver']}; {machine['versions']}\n")
    header = ("ms", "TFLOP/s", "error", "peak MiB")
    print(f"{'cell':<34}{'pass':<10}{'what':<12}" + "".join(f"{name:>10}" for name in header))
    cells = [(d, s, m) for d in args.head_dim for s in args.seqlen for m in args.mask]
    for head_dim, seqlen, mask in tqdm(cells, leave=False):
        rows = list(cell(args, head_dim, seqlen, mask, machine))
        for r in rows:
            name = f"{r['dtype']} B{r['batch']} H{r['heads_q']} T{seqlen} D{head_dim} {mask}"
            numbers = (r["ms"], r["tflops"], r["error"], r["peak_mib"])
            line = f"{name:<34}{r['pass']:<10}{r['implementation']:<12}"
            tqdm.write(line + "".join(f"{x:>10}" for x in numbers))
        if args.save:
            gpu = machine["gpu"].replace(" ", "-")
            for which in args.passes:
                path = Path(records.RESULTS / f"{which}-{gpu}.csv")
                records.save(path, [r for r in rows if r["pass"] == which])


if __name__ == "__main__":
    main()
