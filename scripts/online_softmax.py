"""The online softmax, one row at a time, and what goes wrong when half of it is left out.

    python scripts/online_softmax.py
    python scripts/online_softmax.py --scores 1,2,3,4 --values=-1,0,1,2 --block 2 --save figure.png

One query row visits its keys block by block and keeps a maximum m, a denominator l and a numerator
u, both relative to m. A block with scores s and values v updates them by

    m' = max(m, max s)      a = exp(m - m')      p = exp(s - m')
    l' = a l + sum p        u' = a u + sum p v   and at the end o = u / l

Whoever keeps the normalised output o in place of u must bring the old denominator back in:

    o' = (a l o + sum p v) / l'

The script runs this beside three versions with one factor missing. Each of those is right on some
inputs, which is how it survives a careless test.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018).
"""

import argparse
import math
import sys
from typing import NamedTuple

INF = float("inf")


class Step(NamedTuple):
    """The state after a block, and the exact output over the keys seen so far."""

    m: float
    l: float
    u: float
    output: float
    exact: float


class Variant(NamedTuple):
    """One way to write the update; True where the factor is there."""

    name: str
    rescale_l: bool = True
    rescale_u: bool = True
    normalised: bool = False
    old_denominator: bool = True


VARIANTS = (
    Variant("(a) l and u rescaled"),
    Variant("(b) only l rescaled", rescale_u=False),
    Variant("(c) only u rescaled", rescale_l=False),
    Variant("(d) o kept, old l forgotten", normalised=True, old_denominator=False),
    Variant("(e) o kept, old l included", normalised=True),
)

JUMP = (1.0, 2.0, 1001.0, 1002.0), (2.0, -1.0, 4.0, 8.0)
JUMP_TEXT = """\
The maximum jumps from 2 to 1002. exp(1002) overflows, yet no exponent here is above 0. Of the first
block nothing may remain, since a = exp(-1000) = 0. (b) and (c) keep its u or its l and are wrong.
(d) agrees with the truth, but only because the factor that it forgets is multiplied by that zero:
a test with scores this far apart would pass it."""

RISE = (4.0, 5.0, 9.0, 10.0, 8.0, 7.0), (20.0, 10.0, 4.0, 8.0, -3.0, 5.0)
RISE_TEXT = """\
The maximum rises from 5 to 10, then stays. At block 2 both l and u are multiplied by a = exp(-5) =
0.0067, which is small but not 0, so now (d) is wrong too. At block 3 nothing needs rescaling, yet
(d) is off by far more: what it loses is the weight of the old output, whether or not the maximum
changes. A test of an online softmax needs more than two blocks, with scores close together."""


# ---- the recurrence ----


def trace(scores, values, block, variant=VARIANTS[0]):
    """The running state after each block.

    Parameters
    ----------
    scores, values : sequence of float
        A score of -inf is a masked key, whose value is never looked at.
    block : int
        Keys in a block; the last may be shorter.
    variant : Variant

    Returns
    -------
    list of Step
        For a variant that keeps o, `u` is the numerator that its o stands for, o * l.
    """
    m, l, u, steps = -INF, 0.0, 0.0, []
    for start in range(0, len(scores), block):
        s, v = scores[start : start + block], values[start : start + block]
        m_new = max(m, *s)
        a = exp_difference(m, m_new)
        p = [exp_difference(score, m_new) for score in s]
        pv = sum(weight * value for weight, value in zip(p, v, strict=True) if weight)
        l_new = (a if variant.rescale_l else 1) * l + sum(p)
        u = updated_numerator(variant, a, l, u) + pv
        m, l = m_new, l_new
        exact = softmax_average(scores[: start + block], values[: start + block])
        steps.append(Step(m, l, u, u / l if l else 0.0, exact))
    return steps


def updated_numerator(variant, a, l, u):
    """What is left of the old numerator u, before the new block is added."""
    if not variant.normalised:
        return (a if variant.rescale_u else 1) * u
    o = u / l if l else 0.0
    return a * l * o if variant.old_denominator else a * o


def exp_difference(x, m):
    """exp(x - m) for x <= m; 0 for x = -inf, also when m is -inf and the difference undefined."""
    return 0.0 if x == -INF else math.exp(x - m)


def softmax_average(scores, values):
    """The definition, with all scores at hand: sum(w v) / sum(w), w = exp(s - max s)."""
    weights = [exp_difference(s, max(scores)) for s in scores]
    total = sum(w * v for w, v in zip(weights, values, strict=True) if w)
    return total / sum(weights) if any(weights) else 0.0


# ---- what a person sees ----


def format_table(scores, values, block):
    """Every variant's state, block by block, with its error at the end."""
    header = f"{'':29}block {'m':>9} {'l':>10} {'u':>10} {'output':>10} {'exact':>10} {'error':>9}"
    lines = [header, "-" * len(header)]
    rounding = 1e-12 * max(map(abs, values))
    for variant in VARIANTS:
        name = variant.name
        for i, step in enumerate(trace(scores, values, block, variant), 1):
            numbers = f"{step.m:9.6g} " + " ".join(f"{x:10.6g}" for x in step[1:])
            error = step.output - step.exact
            flag = "  WRONG" if abs(error) > rounding else ""
            lines.append(f"{name:29}{i:5} {numbers} {error:9.1e}{flag}")
            name = ""
    return "\n".join(lines)


def draw(cases, path):
    """One row of panels a case: m, l, u and the output after each block, for every variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = len(cases)
    figure, axes = plt.subplots(rows, 4, figsize=(13, 3.4 * rows + 0.8), squeeze=False)
    titles = "maximum m", "denominator l", "numerator u", "output u / l"
    looks = ("o-", 1.6, 9), ("s--", 1.4, 6), ("^--", 1.4, 6), ("D:", 1.8, 5), ("x-", 1.0, 6)
    for row, (scores, values, block) in zip(axes, cases, strict=True):
        for variant, (style, width, size) in zip(VARIANTS, looks, strict=True):
            steps = trace(scores, values, block, variant)
            blocks = range(1, len(steps) + 1)
            for axis, column in zip(row, list(zip(*steps, strict=True))[:4], strict=True):
                axis.plot(blocks, column, style, lw=width, ms=size, mfc="none", label=variant.name)
        exact = [step.exact for step in steps]
        row[3].plot(blocks, exact, "k_", ms=26, mew=2, zorder=0, label="exact, keys so far")
        for axis, title in zip(row, titles, strict=True):
            axis.set(title=title, xlabel="after block", xticks=blocks)
            axis.margins(x=0.15)
            axis.grid(alpha=0.3)
        row[0].set_ylabel("scores " + ", ".join(f"{s:g}" for s in scores), fontsize=9)
    handles, labels = axes[0, 3].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.7 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


# ---- the command ----


def floats(text):
    """Comma-separated floats."""
    return tuple(float(part) for part in text.split(","))


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    negative = "write --%s=-1,2 when the first is negative"
    parser.add_argument("--scores", type=floats, metavar="S,S,...", help=negative % "scores")
    parser.add_argument("--values", type=floats, metavar="V,V,...", help=negative % "values")
    parser.add_argument("--block", type=int, default=2, help="keys in a block (2)")
    parser.add_argument("--save", metavar="FILE", help="draw it: .png, .svg, .pdf")
    args = parser.parse_args(argv)
    if args.block < 1:
        parser.error(f"--block must be at least 1, got {args.block}")
    if (args.scores is None) != (args.values is None):
        parser.error("--scores and --values go together")
    if args.scores is not None:
        check_row(parser, args.scores, args.values)
    return args


def check_row(parser, scores, values):
    """Reject what has no exact answer to compare with."""
    if len(scores) != len(values):
        parser.error(f"{len(scores)} scores need as many values, got {len(values)}")
    if any(math.isnan(s) or s == INF for s in scores):
        parser.error("scores must be finite, or -inf for a masked key")
    if not all(map(math.isfinite, values)):
        parser.error("values must be finite")


def main(argv=None):
    args = parse(argv)
    rows = [(*JUMP, JUMP_TEXT), (*RISE, RISE_TEXT)]
    if args.scores is not None:
        rows = [(args.scores, args.values, "")]
    for scores, values, text in rows:
        print("scores", *(f"{s:g}" for s in scores))
        print("values", *(f"{v:g}" for v in values), f"  block {args.block}\n")
        print(format_table(scores, values, args.block))
        print(f"\n{text}\n" if args.block == 2 and text else "")  # the texts count blocks of 2
    print("u of (d) and (e) is o * l, the numerator that their o stands for.")
    if args.save:
        try:
            draw([(scores, values, args.block) for scores, values, _ in rows], args.save)
        except (OSError, ValueError) as error:
            print(f"online_softmax.py: error: cannot save the figure: {error}", file=sys.stderr)
            return 2
        print(f"Saved {args.save}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
