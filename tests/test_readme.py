"""The README: its examples run, its numbers are those of the committed results."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_examples_run():
    """All Python blocks, one after the other, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    names = {}
    for block in blocks:
        exec(block, names)
    assert names["dq"].shape == names["q"].shape and np.isfinite(names["dk"]).all()


def test_the_commands_set_themselves_up():
    """Two commands, each from a new virtual environment; the second is what CI runs."""
    commands = re.findall(r"<!-- (\w+) command -->\n```\n(.*)\n```", README)
    assert [name for name, _ in commands] == ["main", "test"]
    for _, command in commands:
        assert command.startswith("python -m venv .venv && ") and "pip install" in command
    assert "scripts/quickstart.py" in commands[0][1] and "-m pytest" in commands[1][1]


def test_the_tables_hold_what_was_measured():
    """Every TFLOP/s of the tables of mma and float32, every time of the CPU's, is in a CSV."""
    measured = {}
    for path in (ROOT / "scripts" / "results").glob("*.csv"):
        with path.open() as file:
            for r in csv.DictReader(file):
                if r["variant"] not in ("", "mma"):
                    continue
                name, digits = r["variant"] or r["implementation"], int(r["dtype"] == "float32")
                key = (r["pass"], r["head_dim"], r["seqlen"], r["mask"], name)
                speed = f"{float(r['tflops']):.{digits}f}"
                measured.setdefault((*key, r["dtype"]), set()).add(speed)
                seconds = f"{float(r['ms']) / 1e3:.2f}"
                measured.setdefault(("seconds", r["pass"], r["seqlen"], r["mask"]), set()).add(
                    seconds
                )
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (full|causal) \| (\S+) / (\S+) \| (\S+) / (\S+) \|",
                      README, re.MULTILINE)  # fmt: skip
    assert len(rows) == 18 + 12
    for dim, seqlen, mask, *cells in rows:
        dtype, *names = "bfloat16", "mma", "torch-flash"
        if "." in cells[0]:
            dtype, *names = "float32", "flashnumba", "torch-efficient"
        for i, cell in enumerate(cells):
            which, name = ("forward", "backward")[i // 2], names[i % 2]
            assert cell in measured[which, dim, seqlen, mask, name, dtype]
    rows = re.findall(r"^\| (\d+) \| (full|causal) \| (\w+ward) \| (\S+) / (\S+) \|",
                      README, re.MULTILINE)  # fmt: skip
    assert len(rows) >= 6
    for seqlen, mask, which, *cells in rows:
        for cell in cells:
            assert cell == "-" or cell in measured["seconds", which, seqlen, mask]


def test_the_table_of_precisions_holds_what_was_measured():
    """Full / causal of each pass, and the larger of both errors, from the committed CSVs."""
    measured = {}
    for which in ("forward", "backward"):
        path = ROOT / "scripts" / "results" / f"{which}-NVIDIA-H200.csv"
        with path.open() as file:
            for r in csv.DictReader(file):
                if r["dtype"] == "float32" and r["implementation"] == "flashnumba":
                    key = which, r["variant"] or "float32", r["head_dim"], r["seqlen"], r["mask"]
                    measured[key] = f"{float(r['tflops']):.0f}", float(r["error"])
    rows = re.findall(r"^\| (float32|tf32|bf16) \| (\d+) \| (.*) \|$", README, re.MULTILINE)
    assert len(rows) == 6
    for precision, dim, cells in rows:
        cells = cells.split(" | ")
        for i, which in enumerate(("forward", "backward")):
            both = [measured[which, precision, dim, "4096", mask] for mask in ("full", "causal")]
            assert cells[i] == " / ".join(speed for speed, _ in both)
            assert cells[2 + i] == f"{max(error for _, error in both):.1e}"


@pytest.mark.parametrize(
    ("which", "names"),
    [
        ("forward", ("flashnumba", "torch-cudnn", "fa3-jax", "torch-flash")),
        ("backward", ("flashnumba", "deterministic", "torch-cudnn", "fa3-jax", "torch-flash")),
    ],
)
def test_the_hopper_tables_hold_what_was_measured(which, names):
    """Every TFLOP/s, and the ratio to the best peer in its row, from the committed CSV."""
    measured = {}
    with (ROOT / "scripts" / "results" / f"{which}-NVIDIA-H200.csv").open() as file:
        for r in csv.DictReader(file):
            if r["dtype"] == "bfloat16" and r["variant"] in ("", "deterministic"):
                name = "deterministic" if r["variant"] == "deterministic" else r["implementation"]
                key = r["head_dim"], r["seqlen"], r["mask"], name
                measured.setdefault(key, set()).add(float(r["tflops"]))
    number = r"(\d+|-) \| "
    rows = re.findall(
        rf"^\| (\d+) \| (\d+) \| (full|causal) \| {number * len(names)}([\d.]+) \|$",
        README,
        re.MULTILINE,
    )
    assert len(rows) == 18
    for dim, seqlen, mask, *cells, ratio in rows:
        for name, cell in zip(names, cells, strict=True):
            found = measured.get((dim, seqlen, mask, name), set())
            assert cell in {f"{x:.0f}" for x in found} if found else cell == "-"
        speed = {n: float(x) for n, x in zip(names, cells, strict=True) if x != "-"}
        peers = [x for n, x in speed.items() if n not in ("flashnumba", "deterministic")]
        assert float(ratio) == pytest.approx(speed["flashnumba"] / max(peers), abs=0.007)
