"""Speed, error and memory of the GPU kernels, beside the attention of other libraries.

    python scripts/bench.py                             # forward, bfloat16, D 64, 128 and 256
    python scripts/bench.py --only torch-cudnn fa3-jax  # and no other peer
    python scripts/bench.py --pass backward training    # gradients alone, and with the forward
    python scripts/bench.py --pass forward backward --dtype float32 --mask causal
    python scripts/bench.py --seqlen 131072 --heads 1 --batch 1 --head-dim 64 --save
    python scripts/bench.py --backend mma --only torch-flash torch-cudnn
    python scripts/bench.py --dtype float32 --precision tf32
    python scripts/bench.py --host                      # host time and first-call time

A cell has 16384 tokens and a hidden size of 2048 unless --batch or --heads say otherwise. What is
compared is measured in turn, round by round, each round beginning with another; the table shows
medians. A measurement is the wall clock from a GPU at rest until it is at rest again, around so
many calls back to back that it takes 10 ms: the same for every library, since JAX has streams of
its own. A product of two 8192 x 8192 matrices runs in the same rounds, as a ceiling.

`ratio` is flashnumba's speed over the best peer's. The error is |got - exact| / |exact| in the
2-norm, against float64, of the first batch and head: of o forward, the largest of dq, dk and dv
else. `deterministic` is flashnumba's backward with sums in a fixed order; it is no peer. Peak
memory, of flashnumba, is what CuPy's pool had to get beyond the inputs, results included. A peer
that fails is skipped and the reason is listed; flashnumba failing makes the exit status 1.

With --backend flashnumba is held to one of its backends, with --precision to fewer products for one
of float32, in all passes; its rows carry the names in the column `variant`, and the figure, of this
run alone, in the name of its file.
"""

import argparse
import math
import statistics
import time
import traceback
from pathlib import Path

import host
import numpy as np
import peers
import records
from dense import module
from records import CEILING, OURS, Cell
from tqdm import tqdm

import flashnumba as fn
from flashnumba import config
from flashnumba.problem import ON_GPU, PRECISIONS

TOKENS, HIDDEN = 16384, 2048
SPAN_MS = 10  # of one measurement: long beside starting it and waiting for its end
DTYPE = "bfloat16"  # by default
WRONG = 0.1  # relative error from which a result is no attention


class Flashnumba(peers.Peer):
    """This package: its own choice of everything, but for what is asked for."""

    name = OURS
    dtypes = ("float16", "bfloat16", "float32", "float64")
    sums = {}  # noqa: RUF012  keywords of gradients

    def __init__(self, **asked):
        self.asked = {name: x for name, x in asked.items() if x is not None}
        self.variant = records.variant_of(*self.asked.values())

    def forward(self, q, k, v, causal):
        options = {"causal": causal, **self.asked}
        return lambda: fn.attention(q, k, v, **options)

    def backward(self, do, q, k, v, causal):
        options = {"causal": causal, **self.asked}
        o, lse = fn.attention(q, k, v, return_lse=True, **options)
        options.update(self.sums)
        return lambda: fn.attention_backward(do, q, k, v, o, lse, **options)

    def training(self, do, q, k, v, causal):
        options = {"causal": causal, **self.asked}
        return lambda: fn.attention_vjp(q, k, v, **options)[1](do)


class Deterministic(Flashnumba):
    """Gradients whose sums are always taken in the same order."""

    name, implementation = records.DETERMINISTIC, OURS
    sums = {"deterministic": True}  # noqa: RUF012
    forward = training = None

    def __init__(self, **asked):
        super().__init__(**asked)
        self.variant = records.variant_of(self.variant, self.name)

    def refuses(self, cell):
        """Only kernels on tensor cores add to dq in any order."""
        backend = self.asked.get("backend")
        families = config.families(backend) if backend else config.FAMILIES
        if any(cell.dtype in f.dtypes and cell.head_dim <= f.head_dim for f in families):
            return super().refuses(cell)
        return "sums have a fixed order anyway"


# --- one cell ----------------------------------------------------------------------------


def inputs(cell):
    """Normal random do, q, k, v."""
    import cupy
    import ml_dtypes  # noqa: F401  names bfloat16

    random = cupy.random.default_rng(0).standard_normal
    return [random(cell.shape, np.float32).astype(np.dtype(cell.dtype)) for _ in range(4)]


def exact_head(do, q, k, v, scale, causal, rows=1024):
    """float64 (o, dq, dk, dv) of one head, (seqlen, dim) each, some rows of scores at a time."""
    xp = module(q)
    do, q, k, v = (x.astype(np.float64) for x in (do, q, k, v))
    o, dq = xp.empty((len(q), v.shape[1])), xp.empty_like(q)
    dk, dv = xp.zeros_like(k), xp.zeros_like(v)
    for start in range(0, len(q), rows):
        at = slice(start, start + rows)
        s = scale * (q[at] @ k.T)
        if causal:
            i = xp.arange(start, start + len(s))[:, None] + len(k) - len(q)
            s = xp.where(xp.arange(len(k)) <= i, s, -np.inf)
        p = xp.exp(s - s.max(axis=1, keepdims=True))
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
    norm = module(exact[0]).linalg.norm
    heads = [g[0, :, 0].astype(np.float64) for g in got]
    return max(float(norm(g - e) / norm(e)) for g, e in zip(heads, exact, strict=True))


def finish(result):
    """Wait until everything that was asked for is done: JAX may not have launched it yet."""
    import cupy

    if hasattr(result, "block_until_ready"):
        result.block_until_ready()
    cupy.cuda.Device().synchronize()


def timed(run, repeat):
    """Milliseconds of a call, in the mean of some back to back."""
    start = time.perf_counter()
    for _ in range(repeat):
        result = run()
    finish(result)
    return (time.perf_counter() - start) / repeat * 1e3


def with_peak(run):
    """(result, peak MiB) of a call that is no longer the first."""
    import cupy

    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    result = run()
    finish(result)
    return result, (pool.total_bytes() - before) / 2**20


class Refusal(Exception):
    """Why an implementation is not run in a cell: said in advance, so no failure."""


class Contestant:
    """One implementation in one cell: its callable, and what was measured of it."""

    def __init__(self, peer, cell, which, arrays, exact):
        prepare = getattr(peer, which, None)
        refusal = f"no {which} here yet" if prepare is None else peer.refuses(cell)
        if refusal is not None:
            raise Refusal(refusal)
        self.peer, self.times = peer, []
        self.run = prepare(*arrays, cell.causal)
        finish(self.run())  # compiles
        result, self.peak = with_peak(self.run)
        self.error = None if peer.name == CEILING else error(results(peer, result), exact)
        if self.error is not None and not self.error < WRONG:
            raise ArithmeticError(f"wrong result: relative error {self.error:.2g}")
        self.repeat = max(1, math.ceil(SPAN_MS / timed(self.run, 3)))

    def measure(self):
        self.times.append(timed(self.run, self.repeat))

    def row(self, cell, which, machine):
        cupys = self.peer.implementation in (OURS, "cupy-dense")
        peak = self.peak if cupys else None  # of CuPy's pool
        if self.peer.packages:
            machine = machine | {"versions": records.versions(*self.peer.packages)}
        return records.row(
            which, cell.dtype, cell.heads, cell.head_dim, cell.batch, cell.seqlen, cell.mask,
            self.peer.implementation, statistics.median(self.times), self.error, peak, machine,
            variant=self.peer.variant, count=self.peer.count,
        )  # fmt: skip


def results(peer, result):
    """What a call returned as CuPy arrays: (o,) or (dq, dk, dv)."""
    return [peer.to_cupy(x) for x in (result if isinstance(result, tuple) else (result,))]


def compare(chosen, cell, which, rounds, machine, show=lambda name: None):
    """The rows of one cell and pass, and {name: why} of those that have none."""
    arrays = inputs(cell)
    exact = exact_head(*(x[0, :, 0] for x in arrays), cell.scale, cell.causal)
    arrays, exact = (arrays[1:], exact[:1]) if which == "forward" else (arrays, exact[1:])
    running, reasons = {}, {}

    def attempt(name, function):
        show(name)
        try:
            return function()
        except Refusal as refusal:
            reasons[name] = str(refusal)
        except Exception as failure:
            reasons[name] = peers.why(failure)
            if name == OURS:
                tqdm.write(traceback.format_exc())
        running.pop(name, None)

    for peer in chosen:
        make = lambda peer=peer: Contestant(peer, cell, which, arrays, exact)
        contestant = attempt(peer.name, make)
        if contestant is not None:
            running[peer.name] = contestant
    for i in range(rounds):
        names = list(running)
        for name in names[i % len(names) :] + names[: i % len(names)] if names else ():
            attempt(name, running[name].measure)
    return [c.row(cell, which, machine) for c in running.values()], reasons


# --- the table ---------------------------------------------------------------------------


def width(name):
    return max(11, len(name)) + 2


def header(names):
    columns = "".join(f"{name:>{width(name)}}" for name in names)
    return f"{'pass':<10}{'cell':<28}{columns}{'ratio':>7}{'of matmul':>11}{'MiB':>8}"


def name_of(row):
    """The name of a row's column."""
    ordered = row["variant"].endswith(Deterministic.name)
    return Deterministic.name if ordered else row["implementation"]


def line(cell, which, names, rows):
    """A cell of the table: TFLOP/s and error of each implementation, ours against the others."""
    found = {name_of(r): r for r in rows}
    text = f"{which:<10}{str(cell):<28}"
    for name in names:
        r = found.get(name)
        entry = "-" if r is None else f"{float(r['tflops']):.3g}"
        if r is not None and r["error"]:
            entry += f" {float(r['error']):.1e}"
        text += f"{'FAILED' if r is None and name == OURS else entry:>{width(name)}}"
    found.pop(Deterministic.name, None)
    ratio, share = records.ratio(found), records.of_ceiling(found)
    text += f"{'-' if ratio is None else f'{ratio:.3f}':>7}"
    text += f"{'-' if share is None else f'{share:.0%}':>11}"
    return text + f"{found[OURS]['peak_mib'] if OURS in found else '-':>8}"


def summary(rows, variant=""):
    """What a run says in the end: the mean of the ratios, the worst cell, the best share."""
    for which in dict.fromkeys(r["pass"] for r in rows):
        cells = records.by_cell((r for r in rows if r["pass"] == which), variant)
        name = lambda cell: "D{2} T{6} {7}".format(*cell)
        ratios = {c: records.ratio(found) for c, found in cells.items()}
        ratios = {c: x for c, x in ratios.items() if x is not None}
        if ratios:
            worst = min(ratios, key=ratios.get)
            yield (
                f"{which}: {records.geometric_mean(ratios.values()):.3f} of the best peer, the "
                f"geometric mean of {len(ratios)} cells; worst {ratios[worst]:.3f}, {name(worst)} "
                f"against {records.best_peer(cells[worst])}"
            )
        costs = records.deterministic((r for r in rows if r["pass"] == which), variant)
        if costs:
            yield (
                f"{which}: deterministic at {records.geometric_mean(costs):.3f} of the default's "
                f"speed, the geometric mean of {len(costs)} cells; worst {min(costs):.3f}"
            )
        shares = {c: records.of_ceiling(found) for c, found in cells.items()}
        shares = {c: x for c, x in shares.items() if x is not None}
        if shares:
            best = max(shares, key=shares.get)
            product = cells[best][CEILING]["variant"]
            speed = statistics.median(records.rate(cells[c], CEILING) for c in shares)
            yield (
                f"{which}: {product} ran at {speed:.0f} TFLOP/s, flashnumba at up to "
                f"{shares[best]:.0%} of it, {name(best)}"
            )


def skipped(reasons, cells):
    """{(implementation, why): number of cells} as lines."""
    for (name, why), count in reasons.items():
        verb = "failed" if name == OURS else "skipped"
        yield f"{verb}: {name} in {count} of {cells} cells: {why}"


# --- the run -----------------------------------------------------------------------------


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"Peers: {', '.join(peers.NAMES)}.",
    )
    passes = ["forward", "backward", "training"]
    parser.add_argument(
        "--pass", dest="passes", nargs="+", choices=passes, default=["forward"],
        help="training is the forward and then the gradients",
    )  # fmt: skip
    dtypes = ["float16", "bfloat16", "float32", "float64"]
    parser.add_argument("--dtype", choices=dtypes, default=DTYPE)
    parser.add_argument("--backend", choices=ON_GPU, help="flashnumba's; default: its own choice")
    less = [name for name in PRECISIONS if name != "float32"]
    parser.add_argument("--precision", choices=less, help="of float32, by flashnumba")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--mask", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--heads", type=int, help=f"default: {HIDDEN} / head_dim")
    parser.add_argument("--batch", type=int, help=f"default: {TOKENS} / seqlen")
    parser.add_argument("--rounds", type=int, default=7)
    names = dict(nargs="*", choices=peers.NAMES, metavar="NAME")
    parser.add_argument("--only", **names, help="these peers; without a name none")
    parser.add_argument("--skip", **names, default=[], help="all peers but these")
    parser.add_argument("--host", action="store_true", help="host time of a call, first-call time")
    parser.add_argument(
        "--save", nargs="?", type=Path, const=records.RESULTS, metavar="FOLDER",
        help="append to PASS-GPU.csv (with --host: host-GPU.csv), draw PASS-GPU.png, with what was "
        "asked for in its name PASS-BACKEND-PRECISION-DTYPE-GPU.png; default: scripts/results",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.host and args.backend:
        parser.error("--host measures the backend that flashnumba chooses: leave out --backend")
    if args.precision and args.dtype != "float32":
        parser.error(f"--precision is for --dtype float32, not {args.dtype}")
    return args


def grid(args):
    for head_dim in args.head_dim:
        for seqlen in args.seqlen:
            for mask in args.mask:
                heads = args.heads or max(1, HIDDEN // head_dim)
                batch = args.batch or max(1, TOKENS // seqlen)
                yield Cell(args.dtype, batch, seqlen, heads, head_dim, mask)


def figure(which, args, gpu):
    """The name of a figure: of what differs from the defaults each has its own."""
    dtype = None if args.dtype == DTYPE else args.dtype
    return "-".join(filter(None, (which, args.backend, args.precision, dtype, gpu))) + ".png"


def main(argv=None):
    args = parse(argv)
    machine = records.gpu()
    gpu = machine["gpu"].replace(" ", "-")
    print(f"{machine['gpu']}, driver {machine['driver']}; {machine['versions']}")
    if args.host:
        return host.main(args, machine, args.save and args.save / f"host-{gpu}.csv")

    chosen, absent = peers.choose(args.dtype, args.only, args.skip)
    for name, problem in absent.items():
        print(f"without {name}: {problem}")
    asked = {"backend": args.backend, "precision": args.precision}
    ours, ordered = Flashnumba(**asked), Deterministic(**asked)
    chosen = [ours, *chosen]
    if "backward" in args.passes and not all(map(ordered.refuses, grid(args))):
        chosen.insert(1, ordered)
    names = [peer.name for peer in chosen]
    what = f"{args.dtype}, flashnumba by {ours.variant}" if ours.variant else args.dtype
    print(f"{what}; TFLOP/s and error, medians of {args.rounds} rounds\n\n{header(names)}")
    work = [(cell, which) for cell in grid(args) for which in args.passes]
    rows, reasons = [], {}
    with tqdm(work, leave=False, disable=None) as bar:
        for cell, which in bar:
            show = bar.set_postfix_str
            here = [x for x in chosen if which == "backward" or x.name != Deterministic.name]
            found, missing = compare(here, cell, which, args.rounds, machine, show)
            tqdm.write(line(cell, which, names, found))
            rows += found
            for key in missing.items():
                reasons[key] = reasons.get(key, 0) + 1
            if args.save:
                records.save(args.save / f"{which}-{gpu}.csv", found)
    print()
    for text in (*skipped(reasons, len(work)), *summary(rows, ours.variant)):
        print(text)
    for which in args.passes if args.save else ():
        found = [r for r in rows if r["pass"] == which]
        if found:
            records.plot(found, args.save / figure(which, args, gpu), ours.variant)
    return int(any(name == OURS for name, _ in reasons))


if __name__ == "__main__":
    raise SystemExit(main())
