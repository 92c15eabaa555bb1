"""The quickstart, the CPU benchmark and the dense attention that they compare with."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from calls import problem

from flashnumba import reference

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_numpy
import dense
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
