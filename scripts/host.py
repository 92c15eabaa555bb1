"""Host time: what a call costs before the GPU has anything to do. Run by `bench.py --host`.

Steady state: a tiny problem is called 200 times without waiting, so that only the host is measured;
PyTorch's scaled_dot_product_attention in turn with it, batch by batch. First calls: two new
processes share an empty kernel cache, so that one compiles and the other finds everything on disk.
`first call` includes what the package imports late; `new configuration` is another head_dim in the
same process, later. Rows have pass "host" and the quantity in `variant`.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import peers
import records
from records import OURS
from tqdm import tqdm

BATCH, SEQLEN, HEADS, HEAD_DIM, NEW_HEAD_DIM = 1, 128, 8, 128, 64
CALLS, BATCHES = 200, 15
STEADY = "steady call"


def arrays(dtype, head_dim=HEAD_DIM):
    """A tiny q, k, v."""
    import cupy
    import ml_dtypes  # noqa: F401  names bfloat16

    shape = BATCH, SEQLEN, HEADS, head_dim
    return [cupy.zeros(shape, np.dtype(dtype)) for _ in range(3)]


def wait():
    import cupy

    cupy.cuda.Device().synchronize()


def callables(dtype):
    """{implementation: a call of it}; PyTorch's where there is PyTorch."""
    import flashnumba as fn

    q, k, v = arrays(dtype)
    runs = {OURS: lambda: fn.attention(q, k, v)}
    problem = peers.Torch().available()
    if problem is None:
        from torch.nn.functional import scaled_dot_product_attention

        tensors = peers.Torch().tensors(q, k, v)
        runs["torch-sdpa"] = lambda: scaled_dot_product_attention(*tensors)
    else:
        print(f"without torch-sdpa: {problem}")
    return runs


def per_call(run, calls):
    """Milliseconds of a call on the host; the GPU is waited for before and after."""
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    ms = (time.perf_counter() - start) / calls * 1e3
    wait()
    return ms


def steady(runs):
    """{implementation: median milliseconds of a call}."""
    times = {name: [] for name in runs}
    for run in runs.values():
        per_call(run, CALLS)  # compiles and warms up
    for _ in tqdm(range(BATCHES), desc="host", leave=False, disable=None):
        for name, run in runs.items():
            times[name].append(per_call(run, CALLS))
    return {name: statistics.median(found) for name, found in times.items()}


def first_calls(dtype):
    """{quantity: milliseconds} of this process, in which flashnumba was not imported yet."""
    first, new = arrays(dtype), arrays(dtype, NEW_HEAD_DIM)
    wait()
    times, start = {}, time.perf_counter()

    def lap(name):
        nonlocal start
        wait()
        now = time.perf_counter()
        times[name], start = (now - start) * 1e3, now

    import flashnumba as fn

    lap("import")
    fn.attention(*first)
    lap("first call")
    fn.attention(*new)
    lap("new configuration")
    fn.attention(*new)
    lap("second call")
    return times


def in_new_process(dtype, cache):
    """`first_calls` of a process of its own with the kernel cache in a folder."""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"FLASHNUMBA_CACHE_DIR": cache, "PYTHONPATH": path}
    command = [sys.executable, __file__, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def first_calls_by_cache(dtype):
    """{quantity: milliseconds}, with an empty kernel cache and with a full one."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="flashnumba-bench-") as cache:
        kinds = ("empty cache", "from disk")
        for kind in tqdm(kinds, desc="first calls", leave=False, disable=None):
            for name, ms in in_new_process(dtype, cache).items():
                found[f"{name}, {kind}"] = ms
    return found


def row(dtype, implementation, quantity, ms, machine):
    return records.row(
        "host", dtype, HEADS, HEAD_DIM, BATCH, SEQLEN, "full", implementation, ms, None, None,
        machine, variant=quantity, count=0,
    )  # fmt: skip


def main(args, machine, path):
    """Measure, print, and append to a CSV if there is a path."""
    dtype = args.dtype
    print(f"{dtype}, B{BATCH} H{HEADS} T{SEQLEN} D{HEAD_DIM}; milliseconds\n")
    found = [(name, STEADY, ms) for name, ms in steady(callables(dtype)).items()]
    found += [(OURS, name, ms) for name, ms in first_calls_by_cache(dtype).items()]
    rows = [row(dtype, *entry, machine) for entry in found]
    for r in rows:
        print(f"{r['implementation']:<12}{r['variant']:<32}{r['ms']:>10}")
    if path:
        records.save(path, rows)
    return 0


if __name__ == "__main__":
    print(json.dumps(first_calls(sys.argv[1])))
