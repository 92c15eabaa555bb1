"""The fuzzer: what it draws, and that it finds what is wrong and says how to get there."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from rule import assert_within_rule

import flashnumba as fn
from flashnumba import config

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import fuzz

SMALL = ["--backend", "numpy", "--max-seqlen", "60"]
ALL = ["--dtype", *fuzz.DTYPES]


def failures(c, backend="numpy", **options):
    """What is wrong with a configuration, in sentences."""
    text, call = fuzz.program(c, backend=backend, **options)
    return [sentence for sentence, _ in fuzz.failures(c, text, call, {})]


def first(condition):
    """The first small configuration that fulfils a condition."""
    return next(c for c in (fuzz.draw(0, i, longest=40) for i in range(9999)) if condition(c))


def some(c):
    """There are queries and keys."""
    return c.seqlen_q > 0 and c.seqlen_kv > 0


def padded(c):
    """There are keys that no query sees, and queries that see no key."""
    lengths = c.mask.get("kv_lengths", [])
    return c.seqlen_q > 0 and 0 in lengths and 0 < max(lengths) < c.seqlen_kv


# --- what passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--backward", *ALL]], ids=["forward", "backward"])
def test_random_problems_pass_on_numpy(options, capsys):
    """The command without a GPU: exit code 0, one line of summary, the kernels that ran."""
    assert fuzz.main([*SMALL, "--count", "25", "--seed", "4", "--kernels", *options]) == 0
    summary, kernels = capsys.readouterr().out.splitlines()
    assert summary == "25 configurations, seed 4: 0 failed"
    assert kernels.split(" x ")[0].strip() == "25" and "numpy" in kernels


def test_random_problems_pass_in_the_simulator(capsys):
    """The kernels themselves, in Python, forward and backward."""
    small = ["--backend", "simulator", "--max-seqlen", "9", "--max-head-dim", "5", *ALL]
    assert fuzz.main([*small, "--count", "6", "--backward"]) == 0
    assert "6 configurations, seed 0: 0 failed" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], ["--backward", *ALL]], ids=["forward", "backward"])
def test_random_problems_pass_on_the_gpu(options, capsys):
    """CuPy arrays of any strides, and a reference that runs on the GPU too."""
    assert fuzz.main(["--count", "40", "--max-seqlen", "400", *options]) == 0
    assert "40 configurations, seed 0: 0 failed" in capsys.readouterr().out


# --- what is drawn ----------------------------------------------------------------------------


def test_a_configuration_is_a_function_of_seed_and_index():
    """Whatever was drawn before: the same configuration, text and values; else others."""
    c, again = fuzz.draw(7, 123), fuzz.draw(7, 123)
    assert c == again and c != fuzz.draw(7, 124) and c != fuzz.draw(8, 123)
    texts = [fuzz.program(x, backward=True)[0] for x in (c, again)]
    names = {}, {}
    for text, x in zip(texts, names, strict=True):
        exec(text, x)
    assert all(fuzz.bits(names[0][x]) == fuzz.bits(names[1][x]) for x in ("q", "k", "v", "do"))


def test_everything_is_drawn():
    """300 draws: every kind of everything, and the sizes stay within what is allowed."""
    drawn = [fuzz.draw(0, index) for index in range(300)]
    kinds = lambda get: {get(c) for c in drawn}
    assert kinds(lambda c: c.dtype) == set(fuzz.USUAL)
    assert kinds(lambda c: fuzz.draw(0, c.index, fuzz.DTYPES).dtype) == set(fuzz.DTYPES)
    assert kinds(lambda c: c.mask.get("causal")) == {None, True, "upper_left"}
    assert kinds(lambda c: c.layout) == set(fuzz.LAYOUTS)
    assert kinds(lambda c: c.factor) == {0.01, 1, 3}
    assert kinds(lambda c: c.heads_q // c.heads_kv) == {1, 2, 3, 4, 8}
    assert kinds(lambda c: c.batch) == {1, 2, 3}
    assert kinds(lambda c: c.hidden) == {None, "np.nan", "np.inf", "-np.inf"}
    assert {None, 0, -0.125} < kinds(lambda c: c.scale)
    assert kinds(lambda c: c.head_dim == c.head_dim_v) == {True, False}
    assert set(fuzz.WIDTHS) < kinds(lambda c: c.head_dim)
    for x in ("q", "k", "v", "do"):
        assert kinds(lambda c, x=x: c.strides[x]) == set(fuzz.STRIDES)
    for name in ("seqlen_q", "seqlen_kv"):
        assert {0, 1, 63, 64, 65, 127, 128, 129} < kinds(lambda c, name=name: getattr(c, name))
    for i in range(2):
        sides = kinds(lambda c, i=i: c.mask["window"][i] if "window" in c.mask else -1)
        assert {None, 0, -1} < sides and max(x for x in sides if x is not None) > 100
    for name in ("q_lengths", "kv_lengths"):
        given = [c.mask[name] for c in drawn if name in c.mask]
        assert 50 < len(given) < 150 and any(0 in x for x in given)
    for c in drawn:
        assert c.batch * c.heads_q * c.seqlen_q * c.seqlen_kv <= fuzz.MOST_SCORES
        assert max(c.seqlen_q, c.seqlen_kv) <= fuzz.LONGEST
        assert max(c.head_dim, c.head_dim_v) <= fuzz.WIDEST


@pytest.mark.parametrize("layout", fuzz.LAYOUTS)
@pytest.mark.parametrize("kind", fuzz.STRIDES)
def test_strides_are_what_they_are_called(kind, layout):
    """The values stay, up to those that a broadcast repeats; the memory is another."""
    x = np.random.default_rng(0).standard_normal((2, 5, 4, 3)).astype(np.float16)
    c = fuzz.draw(0, 0)
    c.strides, c.layout, c.hidden = dict.fromkeys("qkv", kind), layout, None
    names = {}
    exec(fuzz.program(c)[0], names)
    names.update(q=x, k=x, v=x)
    exec(fuzz.write_arrays(c, ("q", "k", "v")), names)
    got, wanted = names["q"], x if layout == "bshd" else x.swapaxes(1, 2)
    s, h = fuzz.LAYOUTS[layout]["s"], fuzz.LAYOUTS[layout]["h"]
    if kind in ("one head", "one batch"):
        axis = h if kind == "one head" else 0
        wanted = np.broadcast_to(np.take(wanted, [0], axis), wanted.shape)
        assert got.strides[axis] == 0
    assert np.array_equal(got, wanted) and not np.shares_memory(got, x)
    assert got.flags.c_contiguous == (kind in ("contiguous", "one element off"))
    assert (got.strides[s] < 0) == (kind == "reversed")
    assert (got.strides[3] != 2) == (kind == "columns apart")
    assert (got.ctypes.data % 16 == 0) or kind not in ("contiguous", "other layout")
    if kind == "one element off":
        assert got.ctypes.data % 4 == 2


# --- which backend runs it --------------------------------------------------------------------


def fits(family, c):
    return c.head_dim == c.head_dim_v <= family.head_dim


def machines(monkeypatch, capability):
    """A GPU that is asked for nothing but what it can do."""
    machine = config.Machine(capability, 227 << 10)
    monkeypatch.setattr(fuzz.runtime, "gpu_available", lambda: True)
    monkeypatch.setattr(fuzz.runtime, "machine", lambda device=None: machine)
    return machine


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 6), (9, 0), (12, 0)])
def test_backends_are_drawn_that_take_the_problem(monkeypatch, capability):
    """All of those by flashnumba's table, no others, and the same ones again."""
    machine, seen, expected = machines(monkeypatch, capability), {}, {}
    for i in range(200):
        c = fuzz.draw(0, i, fuzz.DTYPES)
        able = {f.name for f in config.FAMILIES if f.runs_on(machine, c.dtype) and fits(f, c)}
        expected[c.dtype] = expected.get(c.dtype, set()) | able | {"simt"}
        backend = fuzz.draw_backend(c, fuzz.GROUPS["all"])
        assert backend in able | {"simt"}
        seen.setdefault(c.dtype, set()).add(backend)
        again = fuzz.draw(0, i, [c.dtype])  # as a report asks for it
        assert fuzz.draw_backend(again, [backend]) == backend and again == c
        assert fuzz.draw_backend(again, fuzz.GROUPS["all"]) == backend
    assert seen == expected


def test_a_backend_alone_gets_problems_that_it_takes(monkeypatch):
    """v as wide as q, neither too wide, and those of the dtypes that the table has."""
    machines(monkeypatch, (9, 0))
    for name in config.names_of_families():
        taken = {d for family in config.families(name) for d in family.dtypes}
        for backend in (name, f"simulator-{name}"):
            args = fuzz.parse(["--backend", backend, *ALL])
            assert set(args.dtype) == taken
            for i in range(40):
                c = fuzz.draw(0, i, args.dtype)
                assert fuzz.draw_backend(c, args.backends) == backend
                assert fuzz.obstacle(backend, c.dtype, c.head_dim, c.head_dim_v) is None
    c = fuzz.draw(0, 0, ["float16"], widest=300)
    c.head_dim, c.head_dim_v = 300, 20
    assert fuzz.draw_backend(c, ["wgmma"]) == "wgmma" and c.head_dim == c.head_dim_v == 256
    c = first(lambda c: c.head_dim != c.head_dim_v)
    for backend in ("simt", "simulator", "numpy", None):
        width = c.head_dim_v
        assert fuzz.draw_backend(c, [backend]) == backend and c.head_dim_v == width


def test_what_runs_by_default(monkeypatch, capsys):
    """All backends of a GPU, flashnumba's choice without one; names that cannot run are refused."""
    monkeypatch.setattr(fuzz.runtime, "gpu_available", lambda: False)
    args = fuzz.parse([])
    assert args.backends == (None,) and tuple(args.dtype) == fuzz.USUAL
    refused = ["--backend", "all"], ["--backend", "mma"], ["--backend", "nothing"]
    for argv in (*refused, ["--backend", "simulator-wgmma", "--dtype", "float64"]):
        with pytest.raises(SystemExit):
            fuzz.parse(argv)
    printed = capsys.readouterr().err
    assert "needs a GPU" in printed and "not q.dtype=float64" in printed
    machines(monkeypatch, (7, 5))
    args = fuzz.parse([])
    assert args.backends == fuzz.GROUPS["all"] and tuple(args.dtype) == fuzz.USUAL
    assert fuzz.parse(["--backend", "mma"]).dtype == ["float16"]


def test_a_report_names_the_backend_that_was_drawn(monkeypatch, capsys):
    """In its program and in its command, which runs the same problem by that backend alone."""
    right, asked = fn.attention, []

    def wrong(q, k, v, backend, **options):
        asked.append(backend)
        o, lse = right(q, k, v, backend="numpy", **options)
        return o, lse + 1

    monkeypatch.setattr(fn, "attention", wrong)
    small = ["--max-seqlen", "9", "--max-head-dim", "9", "--count", "20"]
    assert fuzz.main(["--backend", "simulators", *small]) == 1
    *_, summary = reports = capsys.readouterr().out.split("# FAILED: ")
    summary, counts = summary.splitlines()[-2:]
    assert summary == f"20 configurations, seed 0: {len(reports) - 1} failed"
    assert all(f" by {name}" in counts for name in fuzz.SIMULATED)
    assert set(asked) == set(fuzz.SIMULATED)
    for text in reports[1:6]:
        command, text = text.split("\n", 1)
        backend = command.rpartition("--backend ")[2]
        assert f", backend='{backend}', " in text
        asked.clear()
        assert fuzz.main(command.split()[2:]) == 1 and set(asked) == {backend}
        program = text[text.index("import ml_dtypes") : text.index("print(")]
        assert program in capsys.readouterr().out


# --- what is found ----------------------------------------------------------------------------


def test_a_wrong_attention_is_found_and_its_report_runs(monkeypatch, capsys):
    """The window is ignored: exit code 1, and every program that was printed shows it."""
    right = fn.attention
    wrong = lambda *arrays, window=None, **options: right(*arrays, **options)
    monkeypatch.setattr(fn, "attention", wrong)
    assert fuzz.main([*SMALL, "--count", "12", "--seed", "3"]) == 1
    *_, summary = reports = capsys.readouterr().out.split("# FAILED: ")
    reports, summary = reports[1:], summary.splitlines()[-1]
    assert summary == f"12 configurations, seed 3: {len(reports)} failed" and reports
    for text in reports:
        command, text = text.removesuffix(summary + "\n").split("\n", 1)
        assert "window=" in text and "off by" in text
        names = {}
        exec(text, names)
        assert fuzz.outside(names["o"], names["o_exact"], names["o_low"])
        assert len(capsys.readouterr().out.split()) in (2, 4)  # got, exact; of o, and of lse
        assert fuzz.main(command.split()[2:]) == 1
        assert "1 configurations, seed 3: 1 failed" in capsys.readouterr().out
        with monkeypatch.context() as inner:
            inner.setattr(fn, "attention", right)
            exec(text, names)
            assert not fuzz.outside(names["o"], names["o_exact"], names["o_low"])
            capsys.readouterr()


def leak(o, lse, q, k, v):
    if np.isnan(v.astype(np.float32)).any():
        o[...] = np.nan


def empty_row(o, lse, q, k, v):
    o[(lse == -np.inf).swapaxes(1, 2)] = 1e-7


def finite(o, lse, q, k, v):
    lse[lse == -np.inf] = np.finfo(np.float32).min


def unstable(o, lse, q, k, v, turn=itertools.cycle([0, 1])):  # noqa: B008
    o.view(np.uint16)[0, 0, 0, 0] ^= next(turn)


def modify(o, lse, q, k, v):
    k[:, 0] = 1


def raises(o, lse, q, k, v):
    raise MemoryError("too little")


BROKEN = {
    "NaN leaks": (leak, lambda c: padded(c) and c.hidden == "np.nan", "o[0, 0, 0, 0]: nan"),
    "empty rows": (empty_row, padded, "o is not 0 in a row that sees no key"),
    "no infinity": (finite, padded, "-3.4028234663852886e+38, exact -inf: off by inf"),
    "other bits": (unstable, some, "o has other bits on a second call"),
    "modified": (modify, lambda c: some(c) and "one" not in c.strides["k"], "the call changed k"),
    "error": (raises, some, "MemoryError: too little"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_check_finds_what_it_is_for(monkeypatch, name):
    """One small thing goes wrong at a time; without it the same configuration passes."""
    broken, condition, sentence = BROKEN[name]
    right = fn.attention

    def wrong(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        broken(o, lse, q, k, v)
        return o, lse

    empty = lambda c: 0 in c.mask.get("kv_lengths", [])
    c = first(
        lambda c: c.layout == "bshd" and condition(c) and (condition is not padded or empty(c))
    )
    assert failures(c) == []
    monkeypatch.setattr(fn, "attention", wrong)
    assert any(sentence in found for found in failures(c))


def test_wrong_gradients_are_found(monkeypatch):
    """dk for dv, where both have one shape: with --backward, and only then."""
    right = fn.attention_backward

    def wrong(*arrays, **options):
        dq, dk, _ = right(*arrays, **options)
        return dq, dk, dk

    monkeypatch.setattr(fn, "attention_backward", wrong)
    c = first(lambda c: some(c) and c.head_dim == c.head_dim_v and not c.mask)
    assert failures(c) == []
    (sentence,) = failures(c, backward=True)
    assert sentence.startswith("dv[")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_rule_is_that_of_the_tests(dtype):
    """Results ever farther from exact, or infinite where they should not be: one verdict."""
    rng = np.random.default_rng(0)
    verdicts = []
    for factor in np.linspace(0, 4, 81):
        exact = rng.standard_normal((2, 3, 4))
        exact[0, 0, 0] = -np.inf
        low, got = (
            (exact + x * 1e-2 * rng.standard_normal(exact.shape)).astype(dtype) for x in (1, factor)
        )
        if factor == 0.5:
            got[1, 1, 1] = np.inf
        try:
            assert_within_rule(got, exact, low, got.dtype)
            verdicts.append(True)
        except AssertionError:
            verdicts.append(False)
        assert (fuzz.outside(got, exact, low) is None) == verdicts[-1]
    assert 20 < sum(verdicts) < 60 and not verdicts[10]
    assert fuzz.outside(got[:1], exact, low)[1] == "shape (1, 3, 4), not (2, 3, 4)"
