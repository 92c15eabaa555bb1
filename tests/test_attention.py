"""The public functions: shapes, layouts, dtypes, what is refused and how, and which backend runs.

That the numbers are right is the business of test_cases.py and of the kernels' tests; here the same
problem is put in different ways, which must give the same bits.
"""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from calls import DTYPES, check, named, on_gpu, problem, taken, tensor_cores
from conftest import GPU

import flashnumba as fn
from flashnumba import runtime
from flashnumba.config import Machine, choose_simt, choose_wgmma, choose_wgmma_backward
from flashnumba.problem import NOT_BUILT, prepare

RESULTS = ("o", "lse", "dq", "dk", "dv")
NO_TENSOR_CORES = pytest.mark.parametrize("backend", ["numpy", "simulator", GPU])  # backward only


def off_tile(backend):
    """Head dimensions less than a tile; different where that is possible."""
    if tensor_cores(backend):
        return {"dim": 40, "dtype": taken(backend, "float16")}
    return {"dim": 5, "dim_v": 3}


def there(backend, x):
    """A NumPy array where the backend takes it from."""
    if not on_gpu(backend) or x is None:
        return x
    import cupy

    return cupy.asarray(x)


def here(x):
    return x if isinstance(x, np.ndarray) else x.get()


def call(backend, p, **options):
    """All five results by `attention` and `attention_backward`, as NumPy arrays."""
    options = {"backend": named(backend), **options}
    q, k, v, do, dlse = (there(backend, x) for x in (p.q, p.k, p.v, p.do, p.dlse))
    o, lse = fn.attention(q, k, v, return_lse=True, **options)
    more = {"dlse": dlse, "deterministic": True, **options}
    grads = fn.attention_backward(do, q, k, v, o, lse, **more)
    return SimpleNamespace(**dict(zip(RESULTS, map(here, (o, lse, *grads)), strict=True)))


def rearranged(p, rows, lse):
    """Problem `p`, or its results, with its arrays put in another form."""
    return SimpleNamespace(
        **{n: (lse if "lse" in n else rows)(x) for n, x in vars(p).items() if x is not None}
    )


def assert_same_bits(got, expected):
    for name in RESULTS:
        x, y = getattr(got, name), getattr(expected, name)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert x.tobytes() == y.tobytes(), name


# --- forms of the same problem --------------------------------------------------------------------


MASK = {"window": (2, 1), "kv_lengths": 6}  # not symmetric, aligned by a length of its own


def heads_first(x):
    """(batch, seqlen, heads, dim) -> (batch, heads, seqlen, dim), as an array of its own."""
    return np.ascontiguousarray(x.swapaxes(-3, -2))


def test_layouts_give_the_same_bits(backend):
    """Two query heads on one key head, padded keys; o and gradients come in the layout."""
    p = problem(5, 7, batch=2, heads=2, heads_kv=1, **off_tile(backend))
    mask = {"window": (2, 1), "kv_lengths": [6, 7]}
    expected = call(backend, p, **mask)
    dim_v = p.v.shape[3]
    assert expected.o.shape == (2, 5, 2, dim_v)
    assert expected.lse.shape == (2, 2, 5)
    assert (expected.dq.shape, expected.dk.shape) == (p.q.shape, p.k.shape)
    assert expected.dv.shape == p.v.shape
    got = call(backend, rearranged(p, heads_first, np.copy), layout="bhsd", **mask)
    assert got.o.shape == (2, 2, 5, dim_v)
    assert_same_bits(rearranged(got, heads_first, np.copy), expected)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_a_missing_batch_axis_gives_the_same_bits(backend, layout):
    """Batch 1 with and without its axis, in both layouts."""
    p = problem(5, 7, heads=2, heads_kv=1, **off_tile(backend))
    dim_v = p.v.shape[3]
    if layout == "bhsd":
        p = rearranged(p, heads_first, np.copy)
    expected = call(backend, p, layout=layout, **MASK)
    first = lambda x: x[0]
    got = call(backend, rearranged(p, first, first), layout=layout, **MASK)
    assert got.lse.shape == (2, 5)
    assert got.o.shape == ((5, 2, dim_v) if layout == "bshd" else (2, 5, dim_v))
    assert_same_bits(got, rearranged(expected, first, first))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_bare_matrices_give_the_same_bits(backend, layout):
    """One head of one sequence as (seqlen, dim), for which the layouts are one."""
    p = problem(5, 7, **off_tile(backend))
    rows, lse = lambda x: x[0, :, 0], lambda x: x[0, 0]
    got = call(backend, rearranged(p, rows, lse), layout=layout, **MASK)
    assert (got.o.shape, got.lse.shape) == ((5, p.v.shape[3]), (5,))
    assert_same_bits(got, rearranged(call(backend, p, **MASK), rows, lse))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_inputs_dtype(backend, dtype):
    """lse is float32, and float64 only for float64 inputs."""
    if taken(backend, dtype) != dtype:
        pytest.skip(f"{backend} does not take {dtype}")
    got = call(backend, problem(3, 4, **{**off_tile(backend), "dtype": dtype}))
    assert got.o.dtype == got.dq.dtype == got.dk.dtype == got.dv.dtype == DTYPES[dtype]
    assert got.lse.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_lse_is_returned_only_on_request(backend):
    """`return_lse` adds lse and changes nothing about o."""
    p = problem(5, 7, **off_tile(backend))
    q, k, v = (there(backend, x) for x in (p.q, p.k, p.v))
    options = {"backend": named(backend)}
    both = fn.attention(q, k, v, return_lse=True, **options)
    assert type(both) is tuple and len(both) == 2
    for alone in (fn.attention(q, k, v, **options), fn.attention_vjp(q, k, v, **options)[0]):
        assert type(alone) is type(q)
        assert here(alone).tobytes() == here(both[0]).tobytes()
    (_, lse), _ = fn.attention_vjp(q, k, v, return_lse=True, **options)
    assert here(lse).tobytes() == here(both[1]).tobytes()


# --- the pullback ---------------------------------------------------------------------------------


@pytest.mark.parametrize("with_dlse", [False, True], ids=["do", "do_dlse"])
def test_the_pullback_is_attention_backward(backend, with_dlse):
    """Bit for bit, the second time too, and with deterministic given either way."""
    p = problem(5, 7, **off_tile(backend))
    p.dlse = p.dlse if with_dlse else None
    options = {"backend": named(backend), **MASK}
    q, k, v, do, dlse = (there(backend, x) for x in (p.q, p.k, p.v, p.do, p.dlse))
    expected = call(backend, p, **MASK)
    for deterministic in (False, True):
        o, pullback = fn.attention_vjp(q, k, v, deterministic=deterministic, **options)
        lse = there(backend, expected.lse)
        gradients = [pullback(do, dlse), pullback(do, dlse=dlse)] if deterministic else []
        gradients.append(
            fn.attention_backward(
                do, q, k, v, o, lse, dlse=dlse, deterministic=deterministic, **options
            )
        )
        for grads in gradients:
            got = SimpleNamespace(**dict(zip(RESULTS, map(here, (o, lse, *grads)), strict=True)))
            assert_same_bits(got, expected)


@NO_TENSOR_CORES
def test_dlse_reaches_dq_and_dk_only(backend):
    """Zero dlse is no dlse; another one changes dq and dk, while dv = p^T do keeps its bits."""
    p = problem(5, 7, **off_tile(backend))
    given = call(backend, p)
    p.dlse = np.zeros_like(p.dlse)
    zero = call(backend, p)
    p.dlse = None
    assert_same_bits(call(backend, p), zero)
    assert given.dv.tobytes() == zero.dv.tobytes()
    assert not np.allclose(given.dq, zero.dq) and not np.allclose(given.dk, zero.dk)


@NO_TENSOR_CORES
def test_a_pullback_survives_other_calls(backend):
    """Two pullbacks of different problems, used in turn, do not share memory."""
    problems = [problem(5, 7, seed=seed, **off_tile(backend)) for seed in (1, 2)]
    options = {"backend": named(backend)}
    pullbacks = [
        fn.attention_vjp(*(there(backend, x) for x in (p.q, p.k, p.v)), **options)[1]
        for p in problems
    ]
    first = [here(x) for x in pullbacks[0](there(backend, problems[0].do))]
    kept = [x.copy() for x in first]
    pullbacks[1](there(backend, problems[1].do))
    again = [here(x) for x in pullbacks[0](there(backend, problems[0].do))]
    for x, y, z in zip(first, kept, again, strict=True):
        assert x.tobytes() == y.tobytes() == z.tobytes()


# --- lengths --------------------------------------------------------------------------------------


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
LENGTHS = {
    "int": 4,
    "list": [4],
    "tuple": (4,),
    "axisless": np.array(4),
    "big-endian": np.array([4], ">i4"),
    "strided": np.array([4, 9, 9])[::3],
    **{name: np.array([4], name) for name in INTEGERS},
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", ["q_lengths", "kv_lengths"])
def test_lengths_may_be_any_integers(name, lengths):
    """One sequence: a number, a list, a tuple, or an array of any integer type."""
    p = problem(5, 7, **off_tile("numpy"))
    got = call("numpy", p, **{name: lengths})
    assert_same_bits(got, call("numpy", p, **{name: np.array([4], np.int64)}))
    assert got.o.tobytes() != call("numpy", p).o.tobytes()


def test_lengths_of_a_batch():
    """A list for two sequences; the whole length is the same as none."""
    p = problem(5, 7, batch=2, **off_tile("numpy"))
    got = call("numpy", p, q_lengths=[5, 2], kv_lengths=(3, 7))
    assert (got.o[1, 2:] == 0).all() and (got.o[1, :2] != 0).any()
    assert (got.dk[0, 3:] == 0).all() and (got.dk[1, 3:] != 0).any()
    whole = call("numpy", p, q_lengths=[5, 5], kv_lengths=np.array([7, 7], np.uint8))
    assert_same_bits(whole, call("numpy", p))


# --- what is refused ------------------------------------------------------------------------------


P = problem(5, 7, batch=2, heads=4, heads_kv=2, dim=6, dim_v=3)
K_FORM = r"\(batch, seqlen_kv, heads_kv, head_dim\)"
V_FORM = r"\(batch, seqlen_kv, heads_kv, head_dim_v\)"

# What is changed in a good call of `attention`, the exception, and what its message says.
REFUSED = {
    "q with 1 axis": (
        {"q": P.q[0, 0, 0]},
        ValueError,
        r"q\.shape=\(6,\) must be \(batch, seqlen_q, heads_q, head_dim\), or the same without",
    ),
    "q with 5 axes": ({"q": P.q[None]}, ValueError, r"q\.shape=\(1, 2, 5, 4, 6\) must be \(batch"),
    "q in bhsd with 1 axis": (
        {"q": P.q[0, 0, 0], "layout": "bhsd"},
        ValueError,
        r"must be \(batch, heads_q, seqlen_q, head_dim\)",
    ),
    "k with other axes": (
        {"k": P.k[0]},
        ValueError,
        rf"k\.shape=\(7, 2, 6\) must be {K_FORM}, with as many axes as q\.shape=\(2, 5, 4, 6\)",
    ),
    "v with other axes": (
        {"v": P.v[0]},
        ValueError,
        rf"v\.shape=\(7, 2, 3\) must be {V_FORM}, with as many axes as q\.shape=\(2, 5, 4, 6\)",
    ),
    "k of another batch": (
        {"k": P.k[:1]},
        ValueError,
        rf"k\.shape=\(1, 7, 2, 6\) must be {K_FORM} with batch 2, as in q\.shape=\(2, 5, 4, 6\)",
    ),
    "k of another head_dim": (
        {"k": P.k[..., :5]},
        ValueError,
        rf"k\.shape=\(2, 7, 2, 5\) must be {K_FORM} with head_dim 6, as in q\.shape",
    ),
    "v of another batch": (
        {"v": P.v[:1]},
        ValueError,
        rf"v\.shape=\(1, 7, 2, 3\) must be {V_FORM} with batch 2, seqlen_kv 7 and heads_kv 2, as "
        r"in k\.shape=\(2, 7, 2, 6\)",
    ),
    "v of another length": ({"v": P.v[:, :6]}, ValueError, rf"v\.shape.*{V_FORM}.*seqlen_kv 7"),
    "v of other heads": ({"v": P.v[:, :, :1]}, ValueError, rf"v\.shape.*{V_FORM}.*heads_kv 2"),
    "k in the other layout": (
        {"layout": "bhsd"},
        ValueError,
        r"heads_q 5 in q\.shape=\(2, 5, 4, 6\) must be a positive multiple of heads_kv 7",
    ),
    "matrices of unequal head_dim": (
        {"q": P.q[0, :, 0], "k": P.k[0, :, 0, :5], "v": P.v[0, :, 0]},
        ValueError,
        r"k\.shape=\(7, 5\) must be \(seqlen_kv, head_dim\) with head_dim 6, as in q\.shape=\(5, ",
    ),
    "heads_q no multiple": (
        {"q": P.q[:, :, :3]},
        ValueError,
        r"heads_q 3 in q\.shape=\(2, 5, 3, 6\) must be a positive multiple of heads_kv 2",
    ),
    "heads_q 0": ({"q": P.q[:, :, :0]}, ValueError, "heads_q 0 in .* positive multiple"),
    "heads_kv 0": (
        {"k": P.k[:, :, :0], "v": P.v[:, :, :0]},
        ValueError,
        r"multiple of heads_kv 0 in k\.shape=\(2, 7, 0, 6\)",
    ),
    "head_dim 0": (
        {"q": P.q[..., :0], "k": P.k[..., :0]},
        ValueError,
        r"head dimensions must be at least 1, not q\.shape=\(2, 5, 4, 0\)",
    ),
    "head_dim_v 0": ({"v": P.v[..., :0]}, ValueError, r"at least 1, .*v\.shape=\(2, 7, 2, 0\)"),
    "integers": (
        {n: getattr(P, n).astype(int) for n in "qkv"},
        TypeError,
        r"q\.dtype=int64 must be one of float16, bfloat16, float32, float64",
    ),
    "complex": (
        {n: getattr(P, n).astype(complex) for n in "qkv"},
        TypeError,
        r"q\.dtype=complex128 must be one of float16",
    ),
    "objects": ({n: getattr(P, n).astype(object) for n in "qkv"}, TypeError, r"q\.dtype=object"),
    "foreign byte order": (
        {n: getattr(P, n).astype(">f4") for n in "qkv"},
        TypeError,
        r"q\.dtype=>f4 must be one of",
    ),
    "k of another dtype": (
        {"k": P.k.astype(np.float16)},
        TypeError,
        r"k\.dtype=float16 must be that of q, float32",
    ),
    "v of another dtype": (
        {"v": P.v.astype(np.float64)},
        TypeError,
        r"v\.dtype=float64 must be that of q, float32",
    ),
    "layout": ({"layout": "BSHD"}, ValueError, r"layout='BSHD' must be one of .*bshd.*bhsd"),
    "layout None": ({"layout": None}, ValueError, "layout=None must be one of"),
    "causal text": (
        {"causal": "lower_right"},
        ValueError,
        r'causal=\'lower_right\' must be True \(lower right\), False or "upper_left"',
    ),
    "causal number": ({"causal": 1}, ValueError, "causal=1 must be"),
    "causal None": ({"causal": None}, ValueError, "causal=None must be"),
    "window number": (
        {"window": 3},
        ValueError,
        r"window=3 must be None or a pair \(left, right\)",
    ),
    "window of 1": ({"window": (3,)}, ValueError, r"window=\(3,\) must be None or a pair"),
    "window of 3": ({"window": (3, 0, 0)}, ValueError, r"window=\(3, 0, 0\) must be .* a pair"),
    "window text": ({"window": "ab"}, ValueError, "window='ab' must be None or a pair"),
    "window negative": (
        {"window": (-1, 0)},
        ValueError,
        r"window=\(-1, 0\) must hold integers of at least 0, or None for unbounded",
    ),
    "window fraction": ({"window": (None, 1.5)}, ValueError, r"window=\(None, 1.5\) must hold"),
    "window bool": ({"window": (True, 0)}, ValueError, r"window=\(True, 0\) must hold integers"),
    "scale text": ({"scale": "1"}, TypeError, "scale must be a real number, not str"),
    "scale bool": ({"scale": True}, TypeError, "scale must be a real number, not bool"),
    "scale array": ({"scale": np.ones(1)}, TypeError, "scale must be a real number, not ndarray"),
    "scale complex": ({"scale": 1j}, TypeError, "scale must be a real number, not complex"),
    "scale infinite": ({"scale": -np.inf}, ValueError, "scale=-inf must be finite"),
    "scale nan": ({"scale": np.float32("nan")}, ValueError, "scale=.*nan.* must be finite"),
    "backend": (
        {"backend": "cuda"},
        ValueError,
        r"backend='cuda' must be one of .*numpy.*simt.*simulator.*, or None",
    ),
    "lengths of fractions": (
        {"kv_lengths": [7.0, 7.0]},
        TypeError,
        "kv_lengths must hold integers, not float64",
    ),
    "lengths of bools": ({"q_lengths": [True, False]}, TypeError, "q_lengths must hold integers"),
    "lengths of text": ({"q_lengths": "57"}, TypeError, "q_lengths must be a NumPy .* not str"),
    "one length for two": (
        {"kv_lengths": 7},
        ValueError,
        r"kv_lengths\.shape=\(1,\) must be \(batch,\), \(2,\)",
    ),
    "three lengths for two": ({"q_lengths": [5] * 3}, ValueError, r"q_lengths\.shape=\(3,\)"),
    "matrix of lengths": ({"q_lengths": [[5, 5]]}, ValueError, r"q_lengths\.shape=\(1, 2\)"),
    "q length too long": (
        {"q_lengths": [5, 6]},
        ValueError,
        r"q_lengths\[1\]=6 must be from 0 to seqlen_q, which is 5",
    ),
    "kv length too long": (
        {"kv_lengths": np.array([8, 7], np.uint8)},
        ValueError,
        r"kv_lengths\[0\]=8 must be from 0 to seqlen_kv, which is 7",
    ),
    "length past 63 bits": (
        {"kv_lengths": np.array([0, 2**63 + 1], np.uint64)},
        ValueError,
        r"kv_lengths\[1\]=9223372036854775809 must be from 0 to",
    ),
    "length negative": ({"q_lengths": [0, -1]}, ValueError, r"q_lengths\[1\]=-1 must be from 0"),
    "dropout 1": ({"dropout": 1.0}, ValueError, "dropout=1.0 must be at least 0 and below 1"),
    "dropout negative": ({"dropout": -0.1}, ValueError, "dropout=-0.1 must be at least 0"),
    "dropout nan": ({"dropout": float("nan")}, ValueError, "dropout=nan must be at least 0"),
}

FUNCTIONS = ("attention", "attention_backward", "attention_vjp", "explain")
GOOD = {"q": P.q, "k": P.k, "v": P.v}
O, LSE = fn.attention(P.q, P.k, P.v, return_lse=True, backend="simulator")


def invoke(function, **options):
    """Call a public function with the arguments of `attention`."""
    q, k, v = (options.pop(n, GOOD[n]) for n in "qkv")
    options = {"backend": "numpy", **options}
    if function == "attention_backward":
        return fn.attention_backward(P.do, q, k, v, O, LSE, **options)
    return getattr(fn, function)(q, k, v, **options)


@pytest.fixture
def nothing_runs(monkeypatch):
    """Computing or allocating anything is an error, and so is any change of an input."""
    module = sys.modules["flashnumba.attention"]
    run = lambda *_: pytest.fail("computed before everything was checked")
    monkeypatch.setattr(module, "_forward", run)
    monkeypatch.setattr(module, "_backward", run)
    arrays = (P.q, P.k, P.v, P.do, P.dlse, O, LSE)
    before = [x.tobytes() for x in arrays]
    yield
    assert [x.tobytes() for x in arrays] == before


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("change, exception, message", REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused_by_name(function, change, exception, message):
    """Before anything is computed, by all four functions alike."""
    with pytest.raises(exception, match=message):
        invoke(function, **change)


REFUSED_BACKWARD = {
    "do of another shape": (
        {"do": P.do[:, :4]},
        ValueError,
        r"do\.shape=\(2, 4, 4, 3\) must be that of the output, \(2, 5, 4, 3\)",
    ),
    "do as wide as q": ({"do": P.q}, ValueError, r"do\.shape=\(2, 5, 4, 6\) must be .*, 3\)"),
    "do with 3 axes": ({"do": P.do[0]}, ValueError, r"do\.shape=\(5, 4, 3\) must be that of"),
    "do of another dtype": (
        {"do": P.do.astype(np.float64)},
        TypeError,
        r"do\.dtype=float64 must be that of q, float32",
    ),
    "do None": ({"do": None}, TypeError, "do must be a NumPy or CuPy array .* not NoneType"),
    "do a list": ({"do": P.do.tolist()}, TypeError, "do must be a NumPy or CuPy array .* not list"),
    "o of another shape": ({"o": O[..., :2]}, ValueError, r"o\.shape=\(2, 5, 4, 2\) must be"),
    "o of another dtype": ({"o": O.astype(np.float16)}, TypeError, r"o\.dtype=float16 must be"),
    "lse transposed": (
        {"lse": LSE.swapaxes(1, 2)},
        ValueError,
        r"lse\.shape=\(2, 5, 4\) must be \(batch, heads_q, seqlen_q\), \(2, 4, 5\)",
    ),
    "lse in float64": (
        {"lse": LSE.astype(np.float64)},
        TypeError,
        r"lse\.dtype=float64 must be float32, as lse is",
    ),
    "lse None": ({"lse": None}, TypeError, "lse must be a NumPy or CuPy array"),
    "dlse of another shape": ({"dlse": P.dlse[0]}, ValueError, r"dlse\.shape=\(4, 5\) must be"),
    "dlse in float16": ({"dlse": P.dlse.astype(np.float16)}, TypeError, r"dlse\.dtype=float16"),
    "dlse a number": ({"dlse": 0.0}, TypeError, "dlse must be a NumPy or CuPy array .* not float"),
}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "change, exception, message", REFUSED_BACKWARD.values(), ids=REFUSED_BACKWARD
)
def test_bad_gradients_are_refused_by_name(change, exception, message):
    """Results and gradients that do not belong to the problem, by `attention_backward`."""
    given = {"do": P.do, "o": O, "lse": LSE, "dlse": P.dlse, **change}
    do, o, lse, dlse = (given[n] for n in ("do", "o", "lse", "dlse"))
    with pytest.raises(exception, match=message):
        fn.attention_backward(do, P.q, P.k, P.v, o, lse, dlse=dlse, backend="numpy")


@pytest.mark.parametrize("name", ["do of another shape", "do of another dtype", "do None"])
def test_a_pullback_refuses_bad_gradients_by_name(name):
    """The same messages, and the pullback works afterwards."""
    change, exception, message = REFUSED_BACKWARD[name]
    _, pullback = fn.attention_vjp(P.q, P.k, P.v, backend="numpy")
    with pytest.raises(exception, match=message):
        pullback(change["do"])
    with pytest.raises(ValueError, match=r"dlse\.shape=\(4, 5\)"):
        pullback(P.do, P.dlse[0])
    assert pullback(P.do)[0].shape == P.q.shape


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_do_must_have_the_axes_of_q(layout):
    """q without a batch axis, do with one: not the shape of o, in either layout."""
    q, k, v = P.q[0], P.k[0], P.v[0]
    if layout == "bhsd":
        q, k, v = map(heads_first, (q, k, v))
    _, pullback = fn.attention_vjp(q, k, v, layout=layout, backend="numpy")
    with pytest.raises(ValueError, match=r"do\.shape=\(1, 5, 4, 3\) must be that of the output"):
        pullback(P.do[:1])


VALUES = {"dropout": 0.1, "seed": 0, "aux": (1,), "bias": np.zeros((5, 7), np.float32)}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", NOT_BUILT)
def test_what_is_not_built_says_so(function, name):
    """Every reserved keyword, in all four functions; 0 and arrays are values like any other."""
    for value in (VALUES.get(name, 1.0), VALUES.get(name, np.ones(4))):
        with pytest.raises(NotImplementedError, match=f"^{name} is not built yet"):
            invoke(function, **{name: value})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_reserved_keywords_may_be_left_at_their_defaults(function):
    """Spelled out, they change nothing."""
    assert set(NOT_BUILT) >= {"softcap", "alibi_slopes", "bias", "sinks", "dropout", "seed"}
    got, expected = invoke(function, **NOT_BUILT), invoke(function)
    if function == "attention_vjp":
        got, expected = got[0], expected[0]
    if function == "explain":
        assert got == expected
    else:
        assert np.array_equal(got[0], expected[0])


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["casual", "sm_scale", "attn_mask"])
def test_an_unknown_keyword_is_named(function, name):
    """A misspelt one, and those of other libraries."""
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        invoke(function, **{name: True})


@pytest.mark.parametrize("function", ["attention_backward", "explain"])
def test_every_function_takes_the_keywords_of_attention(function):
    """`explain` takes the arguments of `attention`; `attention_backward`, its keywords."""
    invoke(function, return_lse=True)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "change",
    [
        {"dropout": "0.1"},
        {"dropout": None},
        {"causal": np.ones(3)},
        {"layout": np.ones(3)},
        {"kv_lengths": [[1], [2, 3]]},
    ],
    ids=["dropout text", "dropout None", "causal array", "layout array", "ragged lengths"],
)
def test_values_of_a_wrong_type_are_refused_by_name(change):
    """What Python cannot compare to the values that are allowed."""
    (name,) = change
    with pytest.raises((TypeError, ValueError), match=name):
        invoke("attention", **change)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_read_only_inputs_are_enough(function):
    """No function writes to what it is given, nor needs to be allowed to."""
    given = [x.copy() for x in (P.q, P.k, P.v)]
    for x in given:
        x.flags.writeable = False
    q, k, v = given
    for backend in ("numpy", "simulator"):
        got = invoke(function, q=q, k=k, v=v, backend=backend, kv_lengths=[7, 3], causal=True)
        if function == "attention_vjp":
            got[1](P.do, P.dlse)
    for x, y in zip(given, (P.q, P.k, P.v), strict=True):
        assert x.tobytes() == y.tobytes()


def test_results_do_not_share_memory_with_inputs(backend):
    """One key: o is v, yet not a view of it; writing to o leaves v as it was."""
    p = problem(1, 1, **off_tile(backend))
    q, k, v = (there(backend, x) for x in (p.q, p.k, p.v))
    o = fn.attention(q, k, v, backend=named(backend))
    assert here(o).tobytes() == p.v.tobytes()
    o[...] = 7
    assert here(v).tobytes() == p.v.tobytes()


# --- which backend --------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu, expected", [(True, "simt"), (False, "numpy")])
def test_numpy_arrays_go_to_the_gpu_if_there_is_one(monkeypatch, gpu, expected):
    """The default, resolved on a machine with a GPU and on one without."""
    monkeypatch.setattr(runtime, "gpu_available", lambda: gpu)
    monkeypatch.setattr(runtime, "machine", lambda device: Machine((7, 0), 96 << 10))
    assert prepare(P.q, P.k, P.v).backend == expected
    for name in ("numpy", "simulator"):
        assert prepare(P.q, P.k, P.v, backend=name).backend == name


def test_the_default_without_a_gpu_is_the_numpy_backend(monkeypatch):
    """The same bits as by name, forward and backward, and explain says so."""
    monkeypatch.setattr(runtime, "gpu_available", lambda: False)
    (o, lse), pullback = fn.attention_vjp(P.q, P.k, P.v, return_lse=True)
    got = SimpleNamespace(**dict(zip(RESULTS, (o, lse, *pullback(P.do, P.dlse)), strict=True)))
    assert_same_bits(got, call("numpy", P))
    assert fn.explain(P.q, P.k, P.v).rows[0][1].startswith("numpy")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", ["simt", "mma", "wgmma"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_asking_for_a_gpu_where_there_is_none_says_why(monkeypatch, function, name):
    """RuntimeError with the runtime's reason."""
    monkeypatch.setattr(runtime, "gpu_available", lambda: False)
    monkeypatch.setattr(runtime, "gpu_problem", lambda: "the cat sat on the GPU")
    with pytest.raises(RuntimeError, match=f"backend='{name}' needs a GPU: the cat sat on the GPU"):
        invoke(function, backend=name)


def virtual(*shape, dtype="float16"):
    """An array of any size, made of one number."""
    return np.broadcast_to(DTYPES[dtype](0), shape)


def inputs(seqlen_q=5, seqlen_kv=7, batch=2, heads=4, dim=64, dim_v=None, dtype="float16"):
    lengths = (seqlen_q, dim), (seqlen_kv, dim), (seqlen_kv, dim_v or dim)
    return [virtual(batch, seqlen, heads, d, dtype=dtype) for seqlen, d in lengths]


MANY = (1 << 30) - 1
# The fewest tiles that are too many: 64 queries each, over batch and heads.
TILES = {"seqlen_q": 1 << 26, "batch": 1 << 5, "heads": 1 << 5}
WGMMA = {
    "float16": {},
    "bfloat16": {"dtype": "bfloat16"},
    "one of each": {"seqlen_q": 1, "seqlen_kv": 1, "batch": 1, "heads": 1, "dim": 1},
    "float32": {"dtype": "float32", "dim": 128},
    "wide": {"dim": 256},
    "many queries": {"seqlen_q": MANY, "batch": 1, "heads": 1},
    "many keys": {"seqlen_kv": MANY},
    "many tiles": {**TILES, "heads": 31},
}
NOT_ON_TENSOR_CORES = {
    "float64": ({"dtype": "float64"}, r"float16 or bfloat16 or float32, not q\.dtype=float64"),
    "wide float32": ({"dtype": "float32", "dim": 129}, "at most 128, not head_dim=129"),
    "too wide": ({"dim": 257}, "at most 256, not head_dim=257, head_dim_v=257"),
    "wider values": ({"dim_v": 65}, "equal to head_dim .* not head_dim=64, head_dim_v=65"),
    "too many queries": ({"seqlen_q": MANY + 1}, r"fewer than 2\*\*30 .* seqlen_q=1073741824"),
    "too many keys": ({"seqlen_kv": MANY + 1}, r"fewer than 2\*\*30 .* seqlen_kv=1073741824"),
    "too many tiles": (TILES, r"2\*\*30 .* tiles .* batch=32, heads_q=32, seqlen_q=67108864"),
}
EMPTY = {"no queries": {"seqlen_q": 0}, "no keys": {"seqlen_kv": 0}, "no batch": {"batch": 0}}


@pytest.fixture
def hopper(monkeypatch):
    """As if there were a Hopper GPU, for what only looks."""
    pretend(monkeypatch, (9, 0))


def pretend(monkeypatch, capability, shared_bytes=227 << 10):
    monkeypatch.setattr(runtime, "gpu_available", lambda: True)
    machine = Machine(capability, shared_bytes)
    monkeypatch.setattr(runtime, "machine", lambda device=None: machine)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", WGMMA)
def test_what_wgmma_computes(case):
    """Halves with one head_dim up to 256, float32 up to 128: by default on Hopper, and by name."""
    q, k, v = inputs(**WGMMA[case])
    assert prepare(q, k, v).backend == "wgmma"
    for name in ("wgmma", "mma", "simt", "simulator-wgmma", "simulator-mma", "simulator"):
        assert prepare(q, k, v, backend=name).backend == name


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", NOT_ON_TENSOR_CORES)
def test_what_tensor_cores_do_not_compute(case):
    """By default simt does; by name it is refused, with what is needed and what was given."""
    shape, message = NOT_ON_TENSOR_CORES[case]
    q, k, v = inputs(**shape)
    assert prepare(q, k, v).backend == "simt"
    for name in ("wgmma", "mma"):
        for backend in (name, f"simulator-{name}"):
            with pytest.raises(ValueError, match=f"^the {name} backends need .*" + message):
                prepare(q, k, v, backend=backend)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("case", EMPTY)
def test_nothing_to_compute_is_left_to_simt(case):
    """Zeros and -inf, the same from either."""
    q, k, v = inputs(**EMPTY[case])
    for name in (None, "wgmma", "mma"):
        assert prepare(q, k, v, backend=name).backend == "simt"
    for name in ("simulator-wgmma", "simulator-mma"):
        assert prepare(q, k, v, backend=name).backend == "simulator"


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_wgmma_is_for_hopper_only(monkeypatch, capability):
    """Its instructions exist on compute capability 9.0 alone; the simulator is on none."""
    pretend(monkeypatch, capability)
    assert prepare(*inputs()).backend == "mma"
    assert prepare(*inputs(), backend="simulator-wgmma").backend == "simulator-wgmma"
    message = "capability 9.0 (float16, bfloat16), 9.0 (float32), not {}.{} with q.dtype=float16"
    with pytest.raises(RuntimeError, match=re.escape(message.format(*capability))):
        prepare(*inputs(), backend="wgmma")


def test_mma_is_for_turing_and_later(monkeypatch):
    """bfloat16 from Ampere on; what it does not take is for simt, unless asked for by name."""
    message = "capability 8.0 or more (float16, bfloat16), 7.5 (float16), 8.0 or more (float32), "
    message += "not {}.{} with q.dtype={}"
    for capability, dtype in (((7, 5), "bfloat16"), ((7, 0), "float16"), ((6, 1), "float16")):
        pretend(monkeypatch, capability)
        assert prepare(*inputs(dtype=dtype)).backend == "simt"
        with pytest.raises(RuntimeError, match=re.escape(message.format(*capability, dtype))):
            prepare(*inputs(dtype=dtype), backend="mma")


def test_mma_needs_room_in_shared_memory(monkeypatch):
    """A machine that does not exist: 16 KB a block."""
    pretend(monkeypatch, (8, 0), 16 << 10)
    assert prepare(*inputs()).backend == "simt"
    with pytest.raises(RuntimeError, match="no tile .* head_dim=64 fits the 16384 bytes"):
        prepare(*inputs(), backend="mma")


def test_the_gpu_that_counts_is_the_one_that_holds_q(fake_gpu):
    """A Hopper GPU beside another."""
    import cupy

    fake_gpu.capability = {0: "80", 1: "90"}
    for device, expected in ((0, "mma"), (1, "wgmma")):
        with cupy.cuda.Device(device):
            on_it = [cupy.asarray(x) for x in inputs()]
            assert prepare(*inputs()).backend == expected
        assert prepare(*on_it).backend == expected


@pytest.mark.parametrize("scale", [0.0, -0.5, 1e-60])
def test_scales_that_need_care(scale):
    """Zero, where -inf times scale is not -inf, and a negative one, where the maximum turns."""
    for name in ("simulator-wgmma", "simulator-mma"):
        check(name, problem(5, 7, dim=8, dtype="float16"), scale=scale, causal=True)


# --- explain --------------------------------------------------------------------------------------


def large():
    """A problem that would take minutes, made of one number."""
    q = np.broadcast_to(np.float32(0), (2, 4096, 8, 64))
    return q, q[:, :, :2], q[:, :, :2, :32]


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", ["numpy", "simulator"])
def test_explain_says_what_would_run(name):
    """Backend, problem, tiles and the memory of dense scores; nothing is computed."""
    got = fn.explain(*large(), causal=True, backend=name)
    rows = dict(got.rows)
    assert len(rows) == len(got.rows)
    assert list(rows)[:3] == ["backend", "problem", "tiles"]
    assert rows["backend"].startswith(f"{name} (")
    for part in ("float32", "batch 2", "4096 x 4096", "8 x 2", "head_dim 64", "head_dim_v 32"):
        assert part in rows["problem"]
    assert re.search(r"\d+.* x \d+", rows["tiles"])
    assert "1024.0 MiB" in rows["not stored"]  # 2 * 8 * 4096^2 float32
    text = str(got)
    assert len(text.splitlines()) == len(rows)
    assert all(re.search(f"^{re.escape(n)} +{re.escape(t)}$", text, re.M) for n, t in got.rows)


@pytest.mark.usefixtures("nothing_runs")
def test_explain_counts_float64_scores_as_float64():
    """Twice the bytes of float32."""
    q, k, v = (np.broadcast_to(np.float64(0), x.shape) for x in large())
    assert "2048.0 MiB" in dict(fn.explain(q, k, v, backend="numpy").rows)["not stored"]


@pytest.mark.usefixtures("nothing_runs")
def test_explain_names_the_simulated_kernels_and_their_tiles():
    """Tiles, threads and shared memory of the configuration that runs; all four kernels."""
    rows = dict(fn.explain(*large(), backend="simulator").rows)
    config = choose_simt("float32", 64, 32, simulated=True)
    assert rows["tiles"] == (
        f"{config.block_m} x {config.block_n} scores, {config.threads} threads, "
        f"{config.shared_bytes} bytes of shared memory"
    )
    for name in ("forward", "delta", "backward_dkdv", "backward_dq"):
        assert rows[name].endswith(f"make_{name}")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(("dim", "moved"), [(64, "^TMA$"), (60, "^threads, since TMA needs .* 16")])
def test_explain_names_the_kernels_for_hopper(dim, moved):
    """Tiles and registers of both machines, for the forward and for the backward; who moves."""
    q = np.zeros((1, 1, 4, dim), np.float16)
    rows = dict(fn.explain(q, q[:, :, :2], q[:, :, :2], backend="simulator-wgmma").rows)
    config = choose_wgmma("float16", dim, dim == 64)
    backward = choose_wgmma_backward("float16", dim)
    for name, c in (("tiles", config), ("backward tiles", backward)):
        assert rows[name] == (
            f"{c.block_m} x {c.block_n} scores, {c.threads} threads, "
            f"{c.shared_bytes} bytes of shared memory"
        )
    assert re.search(moved, rows["moved by"])
    assert [int(n) for n in re.findall(r"\d+", rows["registers"])] == [*config.registers]
    assert rows["forward"] == "kernels/forward_wgmma.py, make_forward"
    assert rows["backward"] == "kernels/backward_wgmma.py, make_backward"
    for name in ("prepare", "convert"):
        assert rows[name] == f"kernels/backward_passes.py, make_{name}"


def test_explain_says_what_a_copy_on_the_gpu_allows(fake_gpu):
    """NumPy arrays are copied without gaps, whatever their strides; CuPy arrays are used as is."""
    import cupy

    x = np.zeros((1, 5, 2, 64), np.float16)
    for given, moved in ((x[:, ::-1], "TMA"), (x[..., :60], "threads")):
        assert dict(fn.explain(given, given, given).rows)["moved by"].startswith(moved)
        o = fn.attention(given, given, given)
        assert f"tma={moved == 'TMA'}" in fake_gpu.launches[-1][0]
        assert isinstance(o, np.ndarray)
    backwards = cupy.asarray(x)[:, ::-1]
    rows = dict(fn.explain(backwards, backwards, backwards).rows)
    assert rows["moved by"].startswith("threads")
    assert rows["forward"].endswith("make_forward: 40 registers, 0 bytes spilled")


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.usefixtures("nothing_runs")
def test_explain_reports_registers_on_hopper():
    """What the compiler gave a thread before producers hand registers to consumers; no spills."""
    q = np.zeros((1, 1, 4, 64), np.float16)
    rows = dict(fn.explain(q, q, q, backend="wgmma").rows)
    assert rows["backend"].startswith("wgmma (")
    assert re.search(r": \d+ registers, 0 bytes spilled$", rows["forward"])


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_runs")
def test_explain_reports_registers_on_a_gpu():
    """Compiled for this GPU: registers, and not one byte spilled."""
    rows = dict(fn.explain(*large(), backend="simt").rows)
    assert rows["backend"].startswith("simt (")
    for name in ("forward", "delta", "backward_dkdv", "backward_dq"):
        assert re.search(r": \d+ registers, 0 bytes spilled$", rows[name])


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_an_output_larger_than_the_gpu_is_a_memory_error():
    """Zero strides make 2^36 queries out of one; o would be 4 TiB. Afterwards all works."""
    import cupy

    seed = cupy.arange(16, dtype=np.float32).reshape(1, 1, 1, 16)
    q = cupy.broadcast_to(seed, (1 << 20, 1 << 16, 1, 16))
    k = cupy.broadcast_to(seed, (1 << 20, 1, 1, 16))
    for function in (fn.attention, fn.attention_vjp):
        with pytest.raises(MemoryError, match="the GPU's memory is not enough.*untouched"):
            function(q, k, k)
    np.testing.assert_array_equal(seed.get().ravel(), np.arange(16))
    o = fn.attention(q[:1, :5], k[:1], k[:1])
    np.testing.assert_allclose(o.get()[0, :, 0], np.tile(np.arange(16), (5, 1)), rtol=2**-22)
