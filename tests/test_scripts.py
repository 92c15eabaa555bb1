"""The quickstart, the benchmarks, what they compare with, and what they write down."""

import csv
import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from calls import problem

from flashnumba import config, reference

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench
import bench_numpy
import dense
import host
import peers
import quickstart
import records


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dense_attention_is_a_fair_opponent(dtype, causal):
    """It computes the same thing: several heads, a wider v, in the inputs' dtype."""
    p = problem(13, 13, batch=2, heads=3, dim=8, dim_v=5, dtype=dtype)
    scale, loose = 8**-0.5, 4e-3 if dtype == "float16" else 1e-5
    o = dense.dense_forward(p.q, p.k, p.v, scale, causal)
    grads = dense.dense_backward(p.do, p.q, p.k, p.v, o, scale, causal)
    exact = reference.attention(p.q, p.k, p.v, causal=causal)[0]
    exact = (exact, *reference.attention_backward(p.do, p.q, p.k, p.v, causal=causal))
    for got, want in zip((o, *grads), exact, strict=True):
        assert got.dtype == p.q.dtype
        np.testing.assert_allclose(got, want, atol=loose * np.abs(want).max())


@pytest.mark.parametrize("options", [[], ["--causal"]])
def test_quickstart_agrees_with_float64(options, capsys):
    """The whole script on random activations; lengths off the tiles."""
    assert quickstart.main(["--activations", "random", "--tokens", "51", *options]) == 0
    printed = capsys.readouterr().out
    assert "agrees with float64" in printed
    assert printed.count("flashnumba numpy") == 2 and printed.count("backward") >= 2


def test_quickstart_says_when_it_disagrees(monkeypatch, capsys):
    """A wrong result is an exit code of 1."""
    wrong = lambda q, k, v, **options: (1.01 * q, np.zeros(q.shape[:3], np.float32))
    monkeypatch.setattr(quickstart.fn, "attention", wrong)
    monkeypatch.setattr(quickstart.fn, "attention_backward", lambda do, q, *rest, **_: (q, q, q))
    monkeypatch.setattr(quickstart.runtime, "gpu_available", lambda: False)
    assert quickstart.main(["--activations", "random", "--tokens", "40"]) == 1
    assert "DISAGREES" in capsys.readouterr().out


def test_quickstart_refuses_what_is_too_short(capsys):
    """Fewer tokens than the simulated part."""
    with pytest.raises(SystemExit):
        quickstart.main(["--tokens", "3"])
    assert "--tokens must be at least" in capsys.readouterr().err


def test_bench_numpy_appends_rows(tmp_path, capsys):
    """Two runs, one header; the numbers are positive and the errors small."""
    path = tmp_path / "folder" / "out.csv"
    arguments = ["--seqlen", "33", "--heads", "2", "--head-dim", "8", "--rounds", "1"]
    for more in ([], ["--causal", "--dtype", "bfloat16"]):
        bench_numpy.main([*arguments, *more, "--save", str(path)])
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == records.COLUMNS and len(rows) == 8
    assert {r["mask"] for r in rows} == {"full", "causal"}
    for r in rows:
        assert float(r["ms"]) > 0 and float(r["tflops"]) > 0 and float(r["peak_mib"]) >= 0
        assert float(r["error"]) < (1e-6 if r["dtype"] == "float32" else 1e-2)


def test_flops_count_the_products():
    """4 B H T^2 D forward, 2.5 times that backward, half of it causal."""
    assert records.flops("forward", 2, 3, 5, 7, "full") == 4 * 2 * 3 * 25 * 7
    assert records.flops("backward", 2, 3, 5, 7, "full") == 10 * 2 * 3 * 25 * 7
    assert records.flops("forward", 2, 3, 5, 7, "causal") == 2 * 2 * 3 * 25 * 7


# --- records: rows and how they compare --------------------------------------------------

MACHINE = {"gpu": "NVIDIA Test", "driver": "1.2", "versions": "python 3, numpy 2"}
SPEEDS = {  # TFLOP/s by (head_dim, seqlen, mask) and implementation
    (64, 1024, "full"): {"flashnumba": 400, "torch-cudnn": 320, "fa3-jax": 250, "matmul": 800},
    (64, 1024, "causal"): {"flashnumba": 300, "torch-cudnn": 375, "matmul": 750},
    (128, 4096, "full"): {"torch-cudnn": 600, "matmul": 800},
    (128, 4096, "causal"): {"flashnumba": 500},
}


def rows_of(speeds):
    """Rows as a benchmark makes them, at given speeds."""
    for (dim, seqlen, mask), found in speeds.items():
        for name, tflops in found.items():
            product = name == "matmul"
            count = 2e9 if product else records.flops("forward", 2, 4, seqlen, dim, mask)
            yield records.row(
                "forward", "bfloat16", 4, dim, 2, seqlen, mask, name, count / tflops / 1e9,
                None if product else 1.66e-3, 33 if name == "flashnumba" else None, MACHINE,
                variant="matmul 1000" if product else "", count=count,
            )  # fmt: skip


def test_rows_compare_by_cell():
    """Ratio to the best peer, share of the matmul; neither counts the matmul as a peer."""
    cells = records.by_cell(rows_of(SPEEDS))
    assert [c[-2:] for c in cells] == [(str(t), m) for _, t, m in SPEEDS]
    first, second, third, fourth = cells.values()
    assert records.best_peer(first) == "torch-cudnn" and records.ratio(first) == 400 / 320
    assert records.ratio(second) == 300 / 375 and records.of_ceiling(second) == 300 / 750
    assert records.ratio(third) is None and records.best_peer(fourth) is None
    assert records.ratio(fourth) is None and records.of_ceiling(fourth) is None
    assert records.geometric_mean([400 / 320, 300 / 375]) == pytest.approx(1)


def test_the_last_row_of_a_cell_counts_and_variants_do_not():
    """A CSV that grew over several runs."""
    cell = (64, 1024, "full")
    rows = [*rows_of({cell: {"flashnumba": 100}}), *rows_of({cell: {"flashnumba": 200}})]
    rows += [r | {"variant": "alibi"} for r in rows_of({cell: {"flashnumba": 50}})]
    (found,) = records.by_cell(rows).values()
    assert records.rate(found, "flashnumba") == 200


def test_rows_of_a_forced_backend_are_apart():
    """Among the same rows: by default none of them counts, by the backend's name no other."""
    cell, other = (64, 1024, "full"), (64, 1024, "causal")
    rows = list(rows_of({cell: {"flashnumba": 400, "torch-flash": 200}}))
    for variant, tflops in {"mma": 300, "mma deterministic": 150, "deterministic": 320}.items():
        made = rows_of({x: {"flashnumba": tflops} for x in (cell, other)})
        rows += [r | {"variant": variant} for r in made]
    ratios = lambda *backend: [records.ratio(x) for x in records.by_cell(rows, *backend).values()]
    assert ratios() == [2] and ratios("mma") == [1.5, None]
    assert ratios("simt") == [None]
    assert records.deterministic(rows) == pytest.approx([320 / 400], rel=1e-3)
    assert records.deterministic(rows, "mma") == pytest.approx([0.5, 0.5], rel=1e-3)
    assert records.deterministic(rows, "simt") == []
    assert records.variant_of() == "" and records.variant_of("mma", None, "x") == "mma x"


def test_csv_round_trip(tmp_path):
    """What was saved compares as what was measured; one header for two savings."""
    path = tmp_path / "new" / "forward-GPU.csv"
    rows = list(rows_of(SPEEDS))
    records.save(path, rows[:3])
    records.save(path, rows[3:])
    loaded = records.load(path)
    assert list(loaded[0]) == records.COLUMNS
    assert loaded == [{k: str(v) for k, v in r.items()} for r in rows]
    ratios = lambda rows: {c: records.ratio(f) for c, f in records.by_cell(rows).items()}
    assert ratios(loaded) == ratios(rows)


@pytest.mark.parametrize("path", sorted(records.RESULTS.glob("*.csv")), ids=lambda p: p.stem)
def test_committed_results_have_the_columns(path):
    """Every benchmark's CSV can be read by the same code."""
    rows = records.load(path)
    assert rows and all(list(r) == records.COLUMNS for r in rows)
    assert all(float(r["ms"]) > 0 for r in rows) and records.by_cell(rows) is not None


def test_plot_writes_a_png(tmp_path):
    """Panels with gaps: a missing peer, a mask that only one head dimension has."""
    path = tmp_path / "new" / "forward.png"
    speeds = {k: v for k, v in SPEEDS.items() if k != (128, 4096, "causal")}
    records.plot(rows_of(speeds), path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_plot_draws_the_rows_of_one_backend(monkeypatch, tmp_path):
    """In one figure a bar for ours, with the backend's name if one was asked for."""
    from matplotlib.axes import Axes

    rows = [r for r in rows_of(SPEEDS) if r["head_dim"] == 64]
    rows += [r | {"variant": "mma"} for r in rows if r["implementation"] == "flashnumba"]
    rows += [r | {"variant": "mma deterministic"} for r in rows if r["variant"] == "mma"]
    labels = []
    draw = Axes.bar

    def bar(axis, *args, **options):
        labels.append(options["label"])
        return draw(axis, *args, **options)

    monkeypatch.setattr(Axes, "bar", bar)
    for variant, name in (("", "flashnumba"), ("mma", "flashnumba mma")):
        labels.clear()
        records.plot(rows, tmp_path / "x.png", variant)
        assert labels.count(name) == 2 and set(labels) == {name, "torch-cudnn", "fa3-jax"}


# --- peers: who can be asked -------------------------------------------------------------


def test_a_library_that_is_not_there_is_a_reason(monkeypatch):
    """Neither PyTorch nor JAX: every peer of theirs says so, and nothing raises."""
    for name in ("torch", "jax"):
        monkeypatch.setitem(sys.modules, name, None)
    chosen, reasons = peers.choose("bfloat16")
    assert [p.name for p in chosen] == ["matmul"]  # CuPy's
    assert reasons["torch-cudnn"] == reasons["torch-flex"] == "torch is not installed"
    assert reasons["fa3-jax"] == reasons["pallas-float16"] == "jax is not installed"
    assert "--only" in reasons["cupy-dense"]
    assert "cupy-dense" in [p.name for p in peers.choose("float32")[0]]


def test_a_library_that_does_not_import_is_a_reason(monkeypatch, tmp_path):
    """The first line of its error; a peer that cannot even be asked is one too."""
    (tmp_path / "broken_library.py").write_text("raise RuntimeError('no driver\\nlong story')")
    monkeypatch.syspath_prepend(tmp_path)
    message = "broken_library does not import: RuntimeError: no driver"
    assert peers.cannot_import("csv", "broken_library") == message
    assert peers.cannot_import("csv") is None
    monkeypatch.setattr(peers.Matmul, "available", lambda self: 1 / 0)
    assert "ZeroDivisionError" in peers.choose("float16", only=["matmul"])[1]["matmul"]


def test_peers_are_chosen_by_name(monkeypatch):
    """--only, with names and with none, and --skip."""
    monkeypatch.setattr(peers.Torch, "available", lambda self: None)
    names = lambda *args, **options: [p.name for p in peers.choose(*args, **options)[0]]
    assert names("bfloat16", only=["torch-flash", "cupy-dense"]) == ["torch-flash", "cupy-dense"]
    assert names("bfloat16", only=[]) == []
    assert names("bfloat16", only=["torch-flash"], skip=["torch-flash"]) == []
    assert "torch-efficient" in names("float32") and "torch-efficient" not in names("float16")
    assert names("bfloat16", only=["torch-efficient"]) == ["torch-efficient"]
    assert set(records.COLORS) == {"flashnumba", *peers.NAMES} - {"matmul"}


def test_peers_refuse_what_they_cannot_do():
    """Each with a reason, before anything is compiled."""
    by_name = dict(zip(peers.NAMES, peers.ALL, strict=True))
    cell = lambda dtype, seqlen, dim: records.Cell(dtype, 4, seqlen, 32, dim, "full")
    refuses = lambda name, *problem: by_name[name].refuses(cell(*problem))
    assert refuses("fa3-jax", "bfloat16", 1024, 128) is None
    assert "head_dim 128" in refuses("fa3-jax", "bfloat16", 1024, 64)
    assert "float32" in refuses("torch-cudnn", "float32", 1024, 64)
    assert "float32" in refuses("torch-flash", "float32", 1024, 64)
    for dtype in (*peers.HALF, "float32"):
        assert refuses("torch-efficient", dtype, 1024, 64) is None
    assert "float64" in refuses("torch-efficient", "float64", 1024, 64)
    assert refuses("torch-flex", "float32", 1024, 64) is None
    assert "tiles" in refuses("pallas-float16", "bfloat16", 1000, 64)
    assert "head_dim 96" in refuses("pallas-float16", "bfloat16", 1024, 96)
    assert refuses("cupy-dense", "bfloat16", 4096, 64) is None
    assert "GiB" in refuses("cupy-dense", "bfloat16", 16384, 64)


# --- bench: cells, the table, a whole run ------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_exact_head_is_exact(causal):
    """Against the specification, in blocks of rows that do not divide the length."""
    p = problem(13, 13, dim=8, dtype="float64")
    head = [x[0, :, 0] for x in (p.do, p.q, p.k, p.v)]
    got = bench.exact_head(*head, 8**-0.5, causal, rows=5)
    grads = reference.attention_backward(p.do, p.q, p.k, p.v, causal=causal)
    exact = (reference.attention(p.q, p.k, p.v, causal=causal)[0], *grads)
    for x, want in zip(got, exact, strict=True):
        np.testing.assert_allclose(x, want[0, :, 0], rtol=1e-12, atol=1e-14)


def test_error_is_the_largest_and_relative():
    """Of several arrays; the first batch and head alone count."""
    exact = [np.full((3, 2), 2.0), np.full((3, 2), 4.0)]
    got = [np.zeros((2, 3, 2, 2)) for _ in exact]
    for g, value in zip(got, (2.2, 4.1), strict=True):
        g[0, :, 0] = value
    assert bench.error(got, exact) == pytest.approx(0.1)


def test_the_table_says_what_was_measured():
    """Numbers below their names; a gap where there is nothing, FAILED where ours is missing."""
    names = ["flashnumba", "torch-cudnn", "fa3-jax", "matmul"]
    lines = []
    for (dim, seqlen, mask), speeds in SPEEDS.items():
        cell = records.Cell("bfloat16", 2, seqlen, 4, dim, mask)
        rows = list(rows_of({(dim, seqlen, mask): speeds}))
        lines.append(bench.line(cell, "forward", names, rows))
    assert {len(text) for text in lines} == {len(bench.header(names))}
    first, _, third, fourth = (text.split() for text in lines)
    assert first[:6] == ["forward", "B2", "H4", "T1024", "D64", "full"]
    assert first[6:12] == ["400", "1.7e-03", "320", "1.7e-03", "250", "1.7e-03"]
    assert first[12:] == ["800", "1.250", "50%", "33.0"]
    assert third[6:9] == ["FAILED", "600", "1.7e-03"] and third[-3:] == ["-", "-", "-"]
    assert fourth[-3:] == ["-", "-", "33.0"]


def test_the_summary_names_the_worst_cell():
    """Cells without a peer or without ours do not count."""
    mean, ceiling = bench.summary(list(rows_of(SPEEDS)))
    assert mean == (
        "forward: 1.000 of the best peer, the geometric mean of 2 cells; worst 0.800, "
        "D64 T1024 causal against torch-cudnn"
    )
    assert "775 TFLOP/s" in ceiling and "50% of it, D64 T1024 full" in ceiling
    assert list(bench.summary([])) == []


class Fake(peers.Peer):
    """A peer that computes dense attention, and fails where it is told to."""

    def __init__(self, name, fails="", factor=1.0):
        self.name, self.fails, self.factor, self.calls = name, fails, factor, 0

    def forward(self, q, k, v, causal):
        if self.fails == "prepare":
            raise RuntimeError("cannot prepare\nand a long story")

        def run():
            self.calls += 1
            if self.fails == "later" and self.calls > 20:
                raise RuntimeError("ran out of luck")
            return (self.factor * dense.dense_forward(q, k, v, 8**-0.5, causal)).astype(q.dtype)

        return run


@pytest.fixture
def numpy_for_cupy(monkeypatch):
    """CuPy's functions by NumPy, and no GPU: bench.py runs on the NumPy backend."""
    cupy = types.ModuleType("cupy")
    cupy.random, cupy.zeros, cupy.from_dlpack = np.random, np.zeros, np.from_dlpack
    device = types.SimpleNamespace(synchronize=lambda: None)
    cupy.cuda = types.SimpleNamespace(Device=lambda: device)
    pool = types.SimpleNamespace(free_all_blocks=lambda: None, total_bytes=lambda: 0)
    cupy.get_default_memory_pool = lambda: pool
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(quickstart.runtime, "gpu_available", lambda: False)
    monkeypatch.setattr(records, "gpu", lambda: MACHINE)
    monkeypatch.setattr(bench, "SPAN_MS", 1e-3)
    monkeypatch.setattr(peers, "ALL", (Fake("good"), peers.Matmul(32)))
    return monkeypatch


SMALL = "--head-dim 8 --seqlen 16 33 --heads 2 --batch 2 --rounds 9 --dtype float16".split()


def test_a_whole_run(numpy_for_cupy, tmp_path, capsys):
    """Peers that fail in every way are skipped with their reasons; rows and figure are written."""
    bad = [
        Fake("no-start", "prepare"),
        Fake("unlucky", "later"),
        Fake("wrong", factor=1.3),
        Fake("nan", factor=np.nan),
        peers.FlashAttention3(),
    ]
    bad[-1].available = lambda: None
    numpy_for_cupy.setattr(peers, "ALL", (*bad, *peers.ALL, Fake("absent")))
    peers.ALL[-1].available = lambda: "not here"
    assert bench.main([*SMALL, "--save", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    for text in (
        "without absent: not here",
        "skipped: no-start in 4 of 4 cells: RuntimeError: cannot prepare\n",
        "skipped: wrong in 4 of 4 cells: ArithmeticError: wrong result: relative error 0.3",
        "skipped: nan in 4 of 4 cells: ArithmeticError: wrong result: relative error nan",
        "skipped: fa3-jax in 4 of 4 cells: its wheel has kernels for head_dim 128 only",
        "cells: RuntimeError: ran out of luck",
        "geometric mean of 4 cells",
        "matmul 32 ran at",
    ):
        assert text in printed
    rows = records.load(tmp_path / "new" / "forward-NVIDIA-Test.csv")
    assert {r["implementation"] for r in rows} >= {"flashnumba", "good", "matmul"}
    assert len(records.by_cell(rows)) == 4 and all(float(r["ms"]) > 0 for r in rows)
    for r in rows:
        assert r["variant"] == ("matmul 32" if r["implementation"] == "matmul" else "")
        assert (r["error"] == "") == (r["implementation"] == "matmul")
        assert (r["peak_mib"] == "") == (r["implementation"] != "flashnumba")
    assert (tmp_path / "new" / "forward-float16-NVIDIA-Test.png").exists()


@pytest.fixture
def asked(numpy_for_cupy):
    """The backends that calls of flashnumba ask for; NumPy's computes them all."""
    backends = []
    for name in ("attention", "attention_backward", "attention_vjp"):
        right = getattr(bench.fn, name)

        def run(*arrays, backend=None, right=right, **options):
            backends.append(backend)
            return right(*arrays, backend="numpy", **options)

        numpy_for_cupy.setattr(bench.fn, name, run)
    return backends


def test_a_backend_can_be_forced(asked, tmp_path, capsys):
    """In every pass; rows and figures of its own, in the table and the summary flashnumba's."""
    passes = ["forward", "backward", "training"]
    options = [*SMALL[:2], "--seqlen", "16", *SMALL[5:], "--pass", *passes, "--mask", "full"]
    options += ["--save", str(tmp_path)]
    assert bench.main([*options, "--backend", "mma"]) == 0
    assert set(asked) == {"mma"}
    printed = capsys.readouterr().out
    assert "float16, flashnumba by mma; " in printed and "FAILED" not in printed
    assert printed.count("of the best peer, the geometric mean of 1 cells") == 1  # forward alone
    assert "backward: deterministic at" in printed and "flashnumba at up to" in printed
    asked.clear()
    assert bench.main(options) == 0 and set(asked) == {None}
    for which in passes:
        rows = records.load(tmp_path / f"{which}-NVIDIA-Test.csv")
        ours = [r["variant"] for r in rows if r["implementation"] == "flashnumba"]
        both = which == "backward"
        assert ours == ["mma", *["mma deterministic"] * both, "", *["deterministic"] * both]
        assert {r["variant"] for r in rows if r["implementation"] == "good"} <= {""}
        for variant in ("mma", ""):
            (found,) = records.by_cell(rows, variant).values()
            assert found["flashnumba"]["variant"] == variant
            assert len(records.deterministic(rows, variant)) == both
    names = [
        f"{which}-{x}NVIDIA-Test.png" for which in passes for x in ("mma-float16-", "float16-")
    ]
    assert sorted(p.name for p in tmp_path.glob("*.png")) == sorted(names)


def test_less_precision_is_a_variant(numpy_for_cupy, tmp_path, capsys):
    """In the rows, and in what flashnumba is called with."""
    precisions, right = [], bench.fn.attention

    def run(*arrays, precision=None, **options):
        precisions.append(precision)
        return right(*arrays, precision=precision, **options)

    numpy_for_cupy.setattr(bench.fn, "attention", run)
    options = [*SMALL[:2], "--seqlen", "16", *SMALL[5:], "--mask", "full", "--save", str(tmp_path)]
    assert bench.main([*options, "--dtype", "float32", "--precision", "tf32"]) == 0
    assert set(precisions) == {"tf32"} and "float32, flashnumba by tf32" in capsys.readouterr().out
    rows = records.load(tmp_path / "forward-NVIDIA-Test.csv")
    assert [r["variant"] for r in rows if r["implementation"] == "flashnumba"] == ["tf32"]


def test_figures_have_names_of_their_own(capsys):
    """By pass and GPU; by backend and dtype where they are not the defaults."""
    name = lambda *argv: bench.figure("forward", bench.parse(argv), "GPU")
    assert name() == "forward-GPU.png" and name("--dtype", "bfloat16") == name()
    assert name("--dtype", "float32") == "forward-float32-GPU.png"
    assert name("--backend", "mma") == "forward-mma-GPU.png"
    assert name("--backend", "simt", "--dtype", "float32") == "forward-simt-float32-GPU.png"
    less = ["--dtype", "float32", "--precision", "tf32"]
    assert name(*less) == "forward-tf32-float32-GPU.png"
    for argv in (["--backend", "numpy"], less[2:], ["--backend", "mma", "--host"]):
        with pytest.raises(SystemExit):
            bench.parse(argv)
    assert "leave out --backend" in capsys.readouterr().err


def test_deterministic_runs_where_it_is_another_kernel(asked, capsys):
    """That is, where the table has kernels on tensor cores for dtype and width."""
    for dtype in bench.Flashnumba.dtypes:
        for dim in (64, 256, 300):
            cell = records.Cell(dtype, 1, 1, 1, dim, "full")
            names = {f.name for f in config.FAMILIES if dtype in f.dtypes and dim <= f.head_dim}
            for backend in (None, *bench.ON_GPU):
                refusal = bench.Deterministic(backend=backend).refuses(cell)
                assert (refusal is None) == (bool(names) if backend is None else backend in names)
    options = [*SMALL, "--mask", "full", "--pass", "backward", "--only"]
    for backend, runs in (("simt", False), ("mma", True)):
        assert bench.main([*options, "--backend", backend]) == 0
        assert ("deterministic" in capsys.readouterr().out) == runs


def test_flashnumba_failing_is_an_error(numpy_for_cupy, capsys):
    """Exit status 1, the reason, its traceback; the others are measured all the same."""

    def fail(q, k, v, **options):
        raise ValueError("no")

    numpy_for_cupy.setattr(bench.fn, "attention", fail)
    assert bench.main([*SMALL, "--mask", "full"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 2 and printed.count("Traceback") == 2
    assert "failed: flashnumba in 2 of 2 cells: ValueError: no" in printed


def test_backward_runs_beside_dense_attention(numpy_for_cupy, capsys):
    """A peer without a backward is skipped for it."""
    numpy_for_cupy.setattr(peers, "ALL", (*peers.ALL, peers.Dense()))
    options = ["--pass", "forward", "backward", "--only", "cupy-dense", "good"]
    numpy_for_cupy.setattr(peers, "NAMES", [p.name for p in peers.ALL])
    assert bench.main([*SMALL, *options]) == 0
    printed = capsys.readouterr().out
    assert "skipped: good in 4 of 8 cells: no backward here yet" in printed
    assert "without matmul: not asked for" in printed
    assert printed.count("geometric mean of 4 cells") == 3
    assert "backward: deterministic at" in printed


def test_a_training_step_is_a_pass_of_its_own(numpy_for_cupy, capsys):
    assert bench.main([*SMALL, "--mask", "full", "--pass", "training", "--only"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\ntraining  B") == 2 and "deterministic" not in printed


def test_rounds_take_turns(numpy_for_cupy):
    """Each round begins with the next implementation."""
    order = []

    def measure(contestant):
        order.append(contestant.peer.name)
        contestant.times.append(1.0)

    numpy_for_cupy.setattr(bench.Contestant, "measure", measure)
    cell = records.Cell("float16", 1, 9, 1, 8, "causal")
    rows, reasons = bench.compare([Fake(x) for x in "abc"], cell, "forward", 4, MACHINE)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert [r["implementation"] for r in rows] == list("abc") and reasons == {}


# --- host: the time of a call ------------------------------------------------------------


def test_host_times_are_rows(numpy_for_cupy, tmp_path, capsys):
    """Steady state measured, first calls as the two processes report them."""
    numpy_for_cupy.setattr(peers.Torch, "available", lambda self: "torch is not installed")
    for name, value in {"SEQLEN": 5, "CALLS": 2, "BATCHES": 3}.items():
        numpy_for_cupy.setattr(host, name, value)
    told = iter([{"first call": 2500.0}, {"first call": 120.0}])
    numpy_for_cupy.setattr(host, "in_new_process", lambda dtype, cache: next(told))
    assert bench.main(["--host", "--dtype", "float32", "--save", str(tmp_path)]) == 0
    assert "without torch-sdpa: torch is not installed" in capsys.readouterr().out
    rows = records.load(tmp_path / "host-NVIDIA-Test.csv")
    found = {r["variant"]: r["ms"] for r in rows}
    assert list(found) == ["steady call", "first call, empty cache", "first call, from disk"]
    assert float(found["steady call"]) > 0 and found["first call, empty cache"] == "2500"
    assert {(r["pass"], r["tflops"], r["error"]) for r in rows} == {("host", "", "")}


def test_first_calls_run_in_processes_of_their_own(monkeypatch, tmp_path):
    """With the kernel cache they are given; a failure is reported with its output."""
    seen = []

    def run(command, env, **options):
        seen.append((command, env["FLASHNUMBA_CACHE_DIR"]))
        return types.SimpleNamespace(returncode=len(seen) - 1, stdout='noise\n{"a": 1}', stderr="?")

    monkeypatch.setattr(host.subprocess, "run", run)
    assert host.in_new_process("float16", str(tmp_path)) == {"a": 1}
    assert seen == [([sys.executable, host.__file__, "float16"], str(tmp_path))]
    with pytest.raises(RuntimeError, match="failed"):
        host.in_new_process("float16", str(tmp_path))


# --- sanitize: every kernel once ---------------------------------------------------------


@pytest.mark.parametrize("backend", [None, *config.names_of_families()])
def test_sanitize_runs_what_a_backend_takes(asked, monkeypatch, capsys, backend):
    """By that backend in all calls, and says what is left out; without a name everything."""
    monkeypatch.setattr(sys.modules["cupy"], "isfinite", np.isfinite, raising=False)
    monkeypatch.setattr(sys.modules["cupy"], "isinf", np.isinf, raising=False)
    sanitize = importlib.import_module("sanitize")
    del sys.modules["sanitize"]  # it holds this CuPy
    case = "window, ragged"
    monkeypatch.setattr(sanitize, "CASES", {case: sanitize.CASES[case]})
    argv = ["--backend", backend] if backend else []
    sanitize.main([*argv, "--head-dim", "8", "300"])
    assert set(asked) == {backend}
    dtypes, families = ["float16", "float32", "float64"], config.families(backend)
    lines = capsys.readouterr().out.splitlines()
    ran = [x.split(f", {case}")[0] for x in lines if x.endswith(f", {case}: done")]
    left_out = [x.split(":")[0] for x in lines if x.endswith(f": not for {backend}")]
    taken = lambda dtype, dim: any(dtype in f.dtypes and dim <= f.head_dim for f in families)
    everything = [(dtype, dim) for dtype in dtypes for dim in (8, 300)]
    expected = [f"{d}, head_dim {n}" for d, n in everything if not families or taken(d, n)]
    assert ran == expected and len(ran) + len(left_out) == len(lines) == len(everything)
    asked.clear()
    sanitize.main([*argv, "--forward", "--dtype", "float16", "--head-dim", "8"])
    assert asked == [backend] * 2
