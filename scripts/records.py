"""What the benchmarks share: the CSV they append to, the FLOPs they count, who measured."""

import csv
import os
import platform
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path

COLUMNS = (
    "pass dtype head_dim heads_q heads_kv batch seqlen mask variant implementation ms tflops error "
    "gpu driver versions date peak_mib"
).split()
RESULTS = Path(__file__).resolve().parent / "results"


def flops(which, batch, heads, seqlen, head_dim, mask):
    """Multiplications and additions: 2 products forward, 5 backward; half of them if causal."""
    products = {"forward": 2, "backward": 5}[which]
    pairs = batch * heads * seqlen**2 * (0.5 if mask == "causal" else 1)
    return products * 2 * pairs * head_dim


def row(
    which, dtype, heads, head_dim, batch, seqlen, mask, implementation, ms, error, peak, machine
):
    """One row of the CSV, as a dict by COLUMNS; `machine` is from cpu() or gpu()."""
    tflops = flops(which, batch, heads, seqlen, head_dim, mask) / ms / 1e9
    return {
        "pass": which,
        "dtype": dtype,
        "head_dim": head_dim,
        "heads_q": heads,
        "heads_kv": heads,
        "batch": batch,
        "seqlen": seqlen,
        "mask": mask,
        "variant": "",
        "implementation": implementation,
        "ms": f"{ms:.4g}",
        "tflops": f"{tflops:.4g}",
        "error": f"{error:.3g}",
        **machine,
        "date": date.today().isoformat(),
        "peak_mib": f"{peak:.1f}",
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
