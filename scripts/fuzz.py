"""Random attention problems, each held against float64.

    python scripts/fuzz.py --seed 7                           # 1000, on a GPU if there is one
    python scripts/fuzz.py --seed 7 --index 123 --backward    # one of them, with its gradients
    python scripts/fuzz.py --backend mma --dtype float16      # by one backend
    python scripts/fuzz.py --backend simulators --max-seqlen 20 --max-head-dim 20 --count 20

Each is a pure function of --seed, its index and the two limits; from these follow its dtype, of
those in --dtype that the backend takes, and its backend, of those in --backend that take it. "all"
are those of the GPU, and what runs where there is one; "simulators" run their kernels in Python;
"auto" is flashnumba's own choice, and what runs without a GPU. A problem is written as a short
Python program, and that program is what runs; where something is wrong, it is printed as it ran.
Checked are the tests' pass rule, max|got - exact| <= 2 max|low - exact| + rounding, where low is of
float16 or bfloat16 if float32 is asked for with less precision; o = 0 and lse = -inf where no key
is seen; the same bits from a second call; inputs left as they were. NaN or infinity stands where
nobody looks: in keys and values that no query sees, in queries that see no key, and in the memory
around slices.
"""

import argparse
import sys
from collections import Counter
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from tqdm import tqdm

import flashnumba as fn
from flashnumba import reference, runtime
from flashnumba.problem import BACKENDS, ON_GPU, SIMULATED, prepare

DTYPES = {"float16": "np.float16", "bfloat16": "ml_dtypes.bfloat16",
          "float32": "np.float32", "float64": "np.float64"}  # fmt: skip
HALVES = ("float16", "bfloat16")
LESS = {"tf32": "np.float16", "bf16": "ml_dtypes.bfloat16"}  # precision: dtype of as many bits
USUAL = (*HALVES, "float32")  # the reference of float64 takes long
GROUPS = {"all": ON_GPU, "simulators": SIMULATED, "auto": (None,)}  # of backends, to draw from
LONGEST, WIDEST = 1500, 256
MOST_SCORES = 1 << 24  # of one problem: 128 MiB an array in float64, of which about ten are alive
EDGES = (64, 80, 128, 160, 176, 192)  # tile sizes
WIDTHS = (64, 96, 128, 192, 256)
ODD_WIDTHS = (1, 2, 7, 8, 16, 32, 40, 72, 80, 104, 111, 129, 160, 200, 255)

# How an array of values x, in the caller's axes, gets other strides. {s} and {h} are the axes of
# sequence and heads, {at_s} and {at_h} the indices before them.
STRIDES = {
    "contiguous": "put({x})",
    "other layout": "put({x}.swapaxes(1, 2)).swapaxes(1, 2)",
    "columns apart": "put({x}.T).T",
    "reversed": "put({x}[{at_s}::-1])[{at_s}::-1]",
    "slice of tokens": "around({x}, {s})[{at_s}1:-1]",
    "slice of heads": "around({x}, {h})[{at_h}1:-1]",
    "slice of columns": "around({x}, 3)[..., 1:-1]",
    "one element off": "put(np.pad({x}.ravel(), (1, 0)))[1:].reshape({x}.shape)",
    "one head": "xp.broadcast_to(put({x}[{at_h}:1]), {x}.shape)",
    "one batch": "xp.broadcast_to(put({x}[:1]), {x}.shape)",
}
LAYOUTS = {
    "bshd": {"s": 1, "h": 2, "at_s": ":, ", "at_h": ":, :, "},
    "bhsd": {"s": 2, "h": 1, "at_s": ":, :, ", "at_h": ":, "},
}


# --- configurations ----------------------------------------------------------------------


class Dice:
    """Random choices as plain Python objects."""

    def __init__(self, *seed):
        self.rng = np.random.default_rng(seed)

    def below(self, n):
        return int(self.rng.integers(n))

    def pick(self, *options):
        return options[self.below(len(options))]


def draw(seed, index, dtypes=USUAL, longest=LONGEST, widest=WIDEST):
    """Configuration number `index` of a seed, a namespace of plain Python objects.

    `strides` says how q, k, v and do lie in memory, `factor` multiplies standard normal numbers,
    `hidden` stands where nobody looks, `mask` holds the keywords that are not at their defaults.
    """
    dice, dtype = Dice(seed, index, 1), Dice(seed, index, 2).pick(*dtypes)
    pick = dice.pick
    sizes = draw_sizes(dice, longest, widest, dtype)
    mask = draw_mask(dice, sizes["batch"], sizes["seqlen_q"], sizes["seqlen_kv"])
    plain = pick(True, False, False)
    strides = {x: "contiguous" if plain else pick(*STRIDES) for x in ("q", "k", "v", "do")}
    precision = Dice(seed, index, 4).pick(None, None, *LESS) if dtype == "float32" else None
    hidden = pick(None, "np.nan", "np.nan", "np.inf", "-np.inf")
    if "one batch" in strides.values() or not mask:  # what one entry hides another may see
        hidden = None
    return SimpleNamespace(
        seed=seed, index=index, dtype=dtype, **sizes, mask=mask, strides=strides, hidden=hidden,
        precision=precision, layout=pick("bshd", "bhsd"), factor=pick(1, 1, 3, 0.01),
        scale=pick(None, None, None, dice.below(500) / 1000, -0.125, 0, 1),
    )  # fmt: skip


def draw_sizes(dice, longest, widest, dtype):
    """Lengths, heads and head dimensions; batch and heads shrink until the scores are few."""
    seqlen_q, seqlen_kv = draw_length(dice, longest), draw_length(dice, longest)
    seqlen_kv = dice.pick(seqlen_q, seqlen_kv, seqlen_kv)
    counts = [dice.pick(1, 2, 3), dice.pick(1, 2, 3), dice.pick(1, 2, 3, 4, 8)]
    few = min(256, longest)  # few scores can still be many numbers in q or in k and v
    scores = max(seqlen_q, few) * max(seqlen_kv, few)
    most = min(MOST_SCORES, 8 * longest**2)
    if dtype == "float64":  # its reference is longdouble, without BLAS
        most //= 64
    for i in range(3):
        if np.prod(counts) * scores > most:
            counts[i] = 1
    batch, heads_kv, group = counts
    head_dim = draw_width(dice, widest)
    return {
        "batch": batch, "seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv,
        "heads_q": heads_kv * group, "heads_kv": heads_kv,
        "head_dim": head_dim, "head_dim_v": dice.pick(*3 * [head_dim], draw_width(dice, widest)),
    }  # fmt: skip


def draw_length(dice, longest):
    edge, beside = dice.pick(*EDGES), dice.pick(-1, 0, 1)
    later = edge * (1 + dice.below(1 + longest // edge)) + beside
    return min(longest, dice.pick(dice.below(18), edge + beside, later, dice.below(longest + 1)))


def draw_width(dice, widest):
    usual, odd = dice.pick(*WIDTHS), dice.pick(*ODD_WIDTHS)
    return min(widest, dice.pick(usual, usual, odd, 1 + dice.below(widest)))


def draw_mask(dice, batch, seqlen_q, seqlen_kv):
    pick, longest = dice.pick, max(seqlen_q, seqlen_kv)
    side = lambda: pick(None, 0, 1 + dice.below(18), dice.below(longest + 2))
    lengths = lambda n: [pick(0, n, *2 * [dice.below(n + 1)]) for _ in range(batch)]
    mask = {
        "causal": pick(None, None, True, "upper_left"),
        "window": pick(None, (side(), side())),
        "q_lengths": pick(None, None, lengths(seqlen_q)),
        "kv_lengths": pick(None, None, lengths(seqlen_kv)),
    }
    return {name: x for name, x in mask.items() if x is not None}


def draw_backend(c, backends):
    """One of those that take a configuration.

    Where none does, v gets the width of q; where that is too wide, both become narrower.
    """
    sizes = lambda: (c.dtype, c.head_dim, c.head_dim_v)
    narrower = [c.head_dim, *(x for x in reversed(WIDTHS) if x < c.head_dim)]
    while not (able := [x for x in backends if obstacle(x, *sizes()) is None]) and narrower:
        c.head_dim = c.head_dim_v = narrower.pop(0)
    return Dice(c.seed, c.index, 3).pick(*able or backends)


def obstacle(backend, dtype, head_dim=8, head_dim_v=8):
    """What keeps a backend from a problem, as an error of flashnumba's; None when nothing does."""
    q, v = (np.zeros((1, 1, 1, width), dtype) for width in (head_dim, head_dim_v))
    try:
        prepare(q, q, v, backend=backend)
    except (RuntimeError, ValueError) as error:
        return error


# --- the program -------------------------------------------------------------------------


def program(c, xp="numpy", backend=None, backward=False):
    """(preparation, call): the text that makes inputs and expected results, and that of the call.

    Running both leaves o, lse, o_exact, lse_exact, o_low, lse_low; with `backward` dq, dk, dv too.
    All are (batch, seqlen, heads, dim), whatever the layout of the call.
    """
    inputs = ("q", "k", "v", "do") if backward else ("q", "k", "v")
    text = write_values(c, inputs, xp) + write_expected(c, backward) + write_arrays(c, inputs)
    return text, write_call(c, backend, backward)


def keywords(options):
    return ", ".join(f"{name}={x!r}" for name, x in options.items() if x is not None)


def write_values(c, inputs, xp):
    """NumPy arrays (batch, seqlen, heads, dim); what will be broadcast repeats its values."""
    text = f"""\
import ml_dtypes
import numpy as np
import {xp} as xp

import flashnumba as fn
from flashnumba import reference

rng = np.random.default_rng([{c.seed}, {c.index}])
values = lambda *shape: ({c.factor} * rng.standard_normal(shape)).astype({DTYPES[c.dtype]})
put = lambda x: xp.array(x, order="C")


def around(x, axis):
    width = [(int(a == axis),) * 2 for a in range(4)]
    return put(np.pad(x, width, constant_values=np.nan))


q = values({c.batch}, {c.seqlen_q}, {c.heads_q}, {c.head_dim})
k = values({c.batch}, {c.seqlen_kv}, {c.heads_kv}, {c.head_dim})
v = values({c.batch}, {c.seqlen_kv}, {c.heads_kv}, {c.head_dim_v})
"""
    if "do" in inputs:
        dtype = "np.float64" if c.dtype == "float64" else "np.float32"
        text += f"do = values({c.batch}, {c.seqlen_q}, {c.heads_q}, {c.head_dim_v})\n"
        text += f"dlse = rng.standard_normal(({c.batch}, {c.heads_q}, {c.seqlen_q}), {dtype})\n"
    same = {"one head": "[:, :, :1]", "one batch": "[:1]"}
    lines = [f"{x}[...] = {x}{same[c.strides[x]]}\n" for x in inputs if c.strides[x] in same]
    return text + "".join(lines)


def write_expected(c, backward):
    """Results in float64, or for float64 in longdouble on the CPU, and in the inputs' dtype."""
    exact, low = ("np.longdouble", "np.asarray") if c.dtype == "float64" else ("xp.asarray",) * 2
    text = f"options = dict({keywords({'scale': c.scale, **c.mask})})\n"
    if c.precision:
        text += f"like = lambda x: xp.asarray(x.astype({LESS[c.precision]}))\n"
        low = "like"
    text += f"""\
o_exact, lse_exact = reference.attention(*map({exact}, (q, k, v)), **options)
o_low, lse_low = reference.low_precision(*map({low}, (q, k, v)), **options)
"""
    return text if not backward else f"""{text}\
dq_exact, dk_exact, dv_exact = reference.attention_backward(
    *map({exact}, (do, q, k, v)), dlse={exact}(dlse), **options
)
dq_low, dk_low, dv_low = reference.low_precision_backward(
    *map({low}, (do, q, k, v)), dlse={low}(dlse), **options
)
"""  # fmt: skip


def write_arrays(c, inputs):
    """What nobody sees becomes NaN or infinite; then layout and strides."""
    lines = [""]
    if c.hidden:
        lines.append(f"seen = reference.visible(q, k, {keywords(c.mask)})[:, 0]")
        for x in inputs:
            lines.append(f"{x}[~seen.any(axis={1 if x in ('k', 'v') else 2})] = {c.hidden}")
    if c.layout == "bhsd":
        lines.append(f"{', '.join(inputs)} = (x.swapaxes(1, 2) for x in ({', '.join(inputs)}))")
    for x in inputs:
        how = STRIDES[c.strides[x]].format(x=x, **LAYOUTS[c.layout])
        lines.append(f"{x} = {how}  # {c.strides[x]}")
    return "\n".join([*lines, "", ""])


def deterministic(c):
    """Whether gradients are asked to have the same bits again: every other time."""
    return c.index % 2 == 0


def write_call(c, backend, backward):
    how = {"layout": c.layout, "backend": backend, "precision": c.precision}
    more = f"{keywords(how)}, **options"
    lines = [f"o, lse = fn.attention(q, k, v, return_lse=True, {more})"]
    rows = "o, dq, dk, dv" if backward else "o,"
    if backward:
        lines.append("dq, dk, dv = fn.attention_backward(")
        lines.append("    do, q, k, v, o, lse, dlse=put(dlse),")
        lines.append(f"    deterministic={deterministic(c)}, {more}\n)")
    if c.layout == "bhsd":
        lines.append(f"{rows} = (x.swapaxes(1, 2) for x in ({rows}))")
    return "\n".join([*lines, ""])


# --- the checks --------------------------------------------------------------------------


def failures(c, text, call, names):
    """Run a program in `names`, its call twice: what is wrong, as (sentence, line to show it)."""
    try:
        exec(text, names)
        before = {x: bits(names[x]) for x in ("q", "k", "v", "do") if x in names}
        exec(call, names)
        got = {x: names[x] for x in ("o", "lse", "dq", "dk", "dv") if x in names}
        exec(call, names)
        for name, x in got.items():
            if bits(x) != bits(names[name]) and (name != "dq" or deterministic(c)):
                yield f"{name} has other bits on a second call", ""
        for name, x in before.items():
            if bits(names[name]) != x:
                yield f"the call changed {name}", ""
        yield from wrong_values(c, got, names)
    except Exception as error:  # whatever it is, it is what was looked for
        yield f"{type(error).__name__}: {error}", ""


def wrong_values(c, got, names):
    """Results outside the pass rule, and output where no key is seen."""
    lse = names["lse_exact"]
    for name, x in got.items():
        exact, low = names[f"{name}_exact"], names[f"{name}_low"]
        found = outside(x, exact, low, more_than_baseline(c, name, exact, lse))
        if found:
            at, sentence = found
            yield f"{name}{at}: {sentence}", f"print({name}{at}, {name}_exact{at})"
    if host(got["o"])[(host(lse) == -np.inf).swapaxes(1, 2)].any():
        yield "o is not 0 in a row that sees no key", ""


def more_than_baseline(c, name, exact, lse):
    """How far a right result may be off for reasons that the baseline does not have.

    The baseline keeps p, where gradients recompute exp(s - lse), with an error of eps |lse|: as in
    the tests. In float32 and float64 the baseline rounds no more than the kernels do, so luck says
    which of them is closer; allowed is the rounding of 32 terms of typical size.
    """
    unit = eps("float64" if c.dtype == "float64" else "float32")
    more = unit * largest(lse) * largest(exact) if name in ("dq", "dk", "dv") else 0.0
    if c.dtype in HALVES:
        return more
    scale = abs(c.head_dim**-0.5 if c.scale is None else c.scale)
    score, dp = scale * c.factor**2 * c.head_dim**0.5, c.factor**2 * c.head_dim_v**0.5
    terms = {"o": score * c.factor, "lse": score, "dv": score * c.factor}
    return more + 32 * unit * terms.get(name, (1 + score) * dp * scale * c.factor)


def outside(got, exact, low, more=0.0):
    """Where and how far a result is outside the pass rule; None when it is inside.

    The rule of tests/rule.py: max|got - exact| <= 2 (max|low - exact| + more) + 2 eps max|exact|,
    where eps is that of the dtype of `got`, and the same infinities.
    """
    rounding = 2 * eps(got.dtype)
    if got.shape != exact.shape:
        return "", f"shape {got.shape}, not {exact.shape}"
    if exact.size == 0:
        return None
    xp = reference.array_module(exact)
    got = (host(got) if xp is np else got).astype(exact.dtype)
    finite = xp.isfinite(exact)
    distance = lambda x: abs(xp.where(finite, x, 0) - xp.where(finite, exact, 0))
    wrong = xp.where(finite, ~xp.isfinite(got), got != exact)
    error = xp.where(wrong, np.inf, distance(got))
    allowed = float(2 * (distance(low).max() + more) + rounding * largest(exact))
    worst = tuple(map(int, np.unravel_index(int(error.argmax()), error.shape)))
    if float(error[worst]) <= allowed < np.inf:
        return None
    return list(worst), (
        f"{float(got[worst])}, exact {float(exact[worst])}: "
        f"off by {float(error[worst]):.3g} where {allowed:.3g} is allowed"
    )


def largest(x):
    """max|x| over what is finite, 0 if nothing is."""
    xp = reference.array_module(x)
    return float(xp.where(xp.isfinite(x), abs(x), 0).max()) if x.size else 0.0


def eps(dtype):
    return float(ml_dtypes.finfo(dtype).eps)


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def bits(x):
    return host(x).tobytes()


# --- the command -------------------------------------------------------------------------


def report(c, backend, args, found, text):
    """A failure as a Python program: in comments what is wrong, then how to get there."""
    command = f"python scripts/fuzz.py --seed {c.seed} --index {c.index}"
    command += f" --max-seqlen {args.max_seqlen} --max-head-dim {args.max_head_dim}"
    command += f" --dtype {c.dtype} --backend {backend or 'auto'}"
    command += " --backward" if args.backward else ""
    notes = [f"# {line}" for sentence, _ in found for line in sentence.splitlines()]
    shown = [line for _, line in found if line]
    return "\n".join([f"# FAILED: {command}", *notes, text, *shown, ""])


def kernel(c, backend, names):
    """What `explain` says computes the forward pass."""
    q, k, v = (names[x] for x in "qkv")
    rows = dict(fn.explain(q, k, v, layout=c.layout, backend=backend, **names["options"]).rows)
    return rows.get("forward", rows["backend"]).partition(":")[0]


def gpu_is_lost():
    """Whether a kernel did what no other can run after, such as reading an illegal address."""
    import cupy

    try:
        cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return True
    return False


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000, help="how many, from index 0")
    parser.add_argument("--index", type=int, nargs="+", help="only these")
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=USUAL,
        help="to draw from, where the backend takes them; default: all but float64",
    )  # fmt: skip
    parser.add_argument("--max-seqlen", type=int, default=LONGEST)
    parser.add_argument("--max-head-dim", type=int, default=WIDEST)
    parser.add_argument("--backward", action="store_true", help="check the gradients too")
    parser.add_argument(
        "--backend", choices=(*BACKENDS, *GROUPS),
        help="as in attention, or what to draw one from; default: all, without a GPU auto",
    )  # fmt: skip
    parser.add_argument("--kernels", action="store_true", help="count which ran; compiles more")
    args = parser.parse_args(argv)
    name = args.backend or ("all" if runtime.gpu_available() else "auto")
    args.backends = GROUPS.get(name, (name,))
    obstacles = {x: [obstacle(backend, x) for backend in args.backends] for x in args.dtype}
    args.dtype = [x for x, errors in obstacles.items() if None in errors]
    if not args.dtype:
        reasons = dict.fromkeys(str(errors[0]) for errors in obstacles.values())
        parser.error("; ".join(reasons))
    return args


def main(argv=None):
    args = parse(argv)
    done, failed, backends, kernels = 0, 0, Counter(), Counter()
    for index in tqdm(range(args.count) if args.index is None else args.index, leave=False):
        c = draw(args.seed, index, args.dtype, args.max_seqlen, args.max_head_dim)
        backend = draw_backend(c, args.backends)
        on_gpu = backend in (None, *ON_GPU) and runtime.gpu_available()
        text, call = program(c, "cupy" if on_gpu else "numpy", backend, args.backward)
        found = list(failures(c, text, call, names := {}))
        done += 1
        backends[backend] += 1
        if found:
            failed += 1
            tqdm.write(report(c, backend, args, found, text + call))
            if on_gpu and gpu_is_lost():
                tqdm.write("# The GPU is lost to this process: stopped here.")
                break
        elif args.kernels:
            kernels[kernel(c, backend, names)] += 1
    print(f"{done} configurations, seed {args.seed}: {failed} failed")
    if len(args.backends) > 1:
        print(", ".join(f"{count} by {name}" for name, count in backends.most_common()))
    for name, count in kernels.most_common():
        print(f"{count:>6} x {name}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
