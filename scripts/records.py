"""What the benchmarks share: the CSV they append to, how its rows compare, who measured, a figure.

A row is one implementation on one cell, a dict by COLUMNS. `flashnumba` is this package; `matmul`
is the GPU's ceiling, a matrix product measured in the same rounds: its row has the columns of the
cell that it was measured with, the size in `variant` and the product's own FLOPs. Errors are norms
of the difference to float64 over norms of float64. The `variant` of a row of this package is ""
where all was its own choice; else it names the backend that was asked for, the precision of float32
if it was less than all, and `deterministic` where sums had a fixed order.
"""

import csv
import math
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

COLUMNS = (
    "pass dtype head_dim heads_q heads_kv batch seqlen mask variant implementation ms tflops error "
    "gpu driver versions date peak_mib"
).split()
CELL = "pass dtype head_dim heads_q heads_kv batch seqlen mask".split()
OURS, CEILING, DETERMINISTIC = "flashnumba", "matmul", "deterministic"
RESULTS = Path(__file__).resolve().parent / "results"
COLORS = {
    "flashnumba": "#d62728",
    "torch-cudnn": "#1f77b4",
    "torch-flash": "#9ecae1",
    "torch-efficient": "#17becf",
    "torch-flex": "#9467bd",
    "fa3-jax": "#2ca02c",
    "pallas-float16": "#ff9f40",
    "cupy-dense": "#bcbd22",
}


@dataclass(frozen=True)
class Cell:
    """One problem of a benchmark."""

    dtype: str
    batch: int
    seqlen: int
    heads: int
    head_dim: int
    mask: str

    @property
    def shape(self):
        return self.batch, self.seqlen, self.heads, self.head_dim

    @property
    def causal(self):
        return self.mask == "causal"

    @property
    def scale(self):
        return self.head_dim**-0.5

    def __str__(self):
        return f"B{self.batch} H{self.heads} T{self.seqlen} D{self.head_dim} {self.mask}"


# --- rows --------------------------------------------------------------------------------


def flops(which, batch, heads, seqlen, head_dim, mask):
    """Multiplications and additions: 2 products forward, 5 backward; half of them if causal."""
    products = {"forward": 2, "backward": 5, "training": 7}[which]
    pairs = batch * heads * seqlen**2 * (0.5 if mask == "causal" else 1)
    return products * 2 * pairs * head_dim


def variant_of(*names):
    """The variant of one of our rows, from what was asked for; None is our own choice."""
    return " ".join(filter(None, names))


def row(
    which,
    dtype,
    heads,
    head_dim,
    batch,
    seqlen,
    mask,
    implementation,
    ms,
    error,
    peak,
    machine,
    *,
    variant="",
    count=None,
):
    """One row of the CSV, as a dict by COLUMNS; `machine` is from cpu() or gpu().

    `count` replaces the FLOPs of attention. What has none (count 0), no error or no peak (None)
    leaves its column empty.
    """
    if count is None:
        count = flops(which, batch, heads, seqlen, head_dim, mask)
    number = lambda x, form: "" if x is None else format(x, form)
    return {
        "pass": which,
        "dtype": dtype,
        "head_dim": head_dim,
        "heads_q": heads,
        "heads_kv": heads,
        "batch": batch,
        "seqlen": seqlen,
        "mask": mask,
        "variant": variant,
        "implementation": implementation,
        "ms": f"{ms:.4g}",
        "tflops": number(count / ms / 1e9 if count else None, ".4g"),
        "error": number(error, ".3g"),
        **machine,
        "date": date.today().isoformat(),
        "peak_mib": number(peak, ".1f"),
    }


def save(path, rows):
    """Append to a CSV; a new file gets the header."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def load(path):
    """The rows of a CSV, every value as text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- comparing ---------------------------------------------------------------------------


def compared(rows, variant=""):
    """The rows that compare: of ours those of one variant."""
    for r in rows:
        ours = r["implementation"] == OURS
        if r["implementation"] == CEILING or r["variant"] == (variant if ours else ""):
            yield r


def by_cell(rows, variant=""):
    """{cell: {implementation: row}}, in order; of rows for the same thing the last one counts."""
    cells = {}
    for r in compared(rows, variant):
        key = tuple(str(r[name]) for name in CELL)
        cells.setdefault(key, {})[r["implementation"]] = r
    return cells


def rate(found, name):
    """TFLOP/s of an implementation in one cell; None where it has no row."""
    return float(found[name]["tflops"]) if name in found else None


def best_peer(found):
    """The fastest of the others in one cell; None where there is none."""
    peers = [name for name in found if name not in (OURS, CEILING)]
    return max(peers, key=lambda name: rate(found, name), default=None)


def ratio(found):
    """Our speed over the best peer's in one cell; None where one of them is missing."""
    peer = best_peer(found)
    return None if peer is None or OURS not in found else rate(found, OURS) / rate(found, peer)


def deterministic(rows, variant=""):
    """Speed with deterministic sums over that without, of each cell that has both."""
    with_it, without = variant_of(variant, DETERMINISTIC), variant
    speeds = {}
    for r in (r for r in rows if r["implementation"] == OURS):
        speeds.setdefault(tuple(str(r[name]) for name in CELL), {})[r["variant"]] = float(r["ms"])
    return [x[without] / x[with_it] for x in speeds.values() if {without, with_it} <= set(x)]


def of_ceiling(found):
    """Our speed over the matmul's of the same rounds; None where one of them is missing."""
    return rate(found, OURS) / rate(found, CEILING) if {OURS, CEILING} <= set(found) else None


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


# --- who measured ------------------------------------------------------------------------


def versions(*packages):
    """ "numpy 2.4.6, ..." of those that are installed, and Python's."""
    found = [f"python {platform.python_version()}"]
    for name in packages:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def cpu():
    """The machine's columns for a run on the CPU: processor and cores in place of a GPU."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [s for s in info.read_text().splitlines() if s.startswith("model name")]
        name = names[0].split(":", 1)[1].strip() if names else name
    return {
        "gpu": f"{name}, {os.cpu_count()} cores",
        "driver": "",
        "versions": versions("numpy"),
    }


def gpu():
    """The machine's columns for a run on CuPy's current GPU."""
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    packages = [p.metadata["Name"] for p in metadata.distributions()]
    cupy_package = next((p for p in packages if p and p.startswith("cupy")), "cupy")
    return {
        "gpu": properties["name"].decode(),
        "driver": driver,
        "versions": versions("numba-cuda", cupy_package, "numpy", "nvidia-nvvm"),
    }


# --- the figure --------------------------------------------------------------------------


def plot(rows, path, variant=""):
    """TFLOP/s against length: a panel for each mask and head dimension, a bar an implementation.

    The matmul of the same rounds is a dashed line. The rows are of one pass, dtype and GPU; of ours
    those are drawn that `compared` yields.
    """
    from matplotlib.figure import Figure

    rows = list(compared(rows, variant))
    masks, dims = (list(dict.fromkeys(r[name] for r in rows)) for name in ("mask", "head_dim"))
    figure = Figure(figsize=(1 + 4.2 * len(dims), 0.8 + 2.7 * len(masks)), layout="constrained")
    axes = figure.subplots(len(masks), len(dims), sharey=True, squeeze=False)
    for line, mask in zip(axes, masks, strict=True):
        for axis, dim in zip(line, dims, strict=True):
            _panel(axis, [r for r in rows if r["mask"] == mask and r["head_dim"] == dim])
            axis.set_title(f"head_dim {dim}, {mask}", fontsize=10)
        line[0].set_ylabel("TFLOP/s")
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    handles = {}
    for axis in axes.flat:
        bars, names = axis.get_legend_handles_labels()
        handles.update(zip(names, bars, strict=True))
    columns = min(8, 3 * len(dims))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, fontsize=9
    )
    first = rows[0]
    figure.suptitle(f"{first['pass']}, {first['dtype']}, {first['gpu']}, {first['date']}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _panel(axis, rows):
    """One head dimension and mask: a group of bars for each length."""
    lengths = list(dict.fromkeys(r["seqlen"] for r in rows))
    names = [n for n in dict.fromkeys(r["implementation"] for r in rows) if n != CEILING]
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        found = [r for r in rows if r["implementation"] == name]
        x = [lengths.index(r["seqlen"]) + (i + 0.5) * width - 0.4 for r in found]
        heights = [float(r["tflops"]) for r in found]
        label = " ".join(filter(None, (name, found[0]["variant"])))
        axis.bar(x, heights, width, label=label, color=COLORS.get(name, "#7f7f7f"))
    for r in (r for r in rows if r["implementation"] == CEILING):
        center, height = lengths.index(r["seqlen"]), float(r["tflops"])
        axis.plot([center - 0.45, center + 0.45], [height] * 2, "k--", lw=1, label=r["variant"])
    axis.set_xticks(range(len(lengths)), lengths)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
