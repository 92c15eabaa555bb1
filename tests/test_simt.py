"""The SIMT kernels against the pass rule: small in the simulator, the full grid on a GPU.

Every output starts as NaN here, so whatever a kernel fails to write is seen. The simulator's tiles
are 16 x 16 scores and 32 output columns.
"""

import dataclasses
import functools
import importlib
import inspect
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from calls import DTYPES, MASKS, RESULTS, assert_same_bits, check, masks, problem, run
from conftest import GPU

import flashnumba as fn
from flashnumba import config, launches, simulate
from flashnumba.device import tile as tile_module
from flashnumba.kernels import simt

attention = importlib.import_module("flashnumba.attention")  # the package's name is the function

OUTPUTS = {
    "forward": slice(3, 5),
    "delta": slice(3, 4),
    "backward_dkdv": slice(6, 8),
    "backward_dq": slice(6, 7),
}
KERNELS = pytest.mark.parametrize("backend", ["simulator", GPU])


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Fill what a kernel is to write with NaN before it starts."""
    launch = attention._launch

    def poison_and_launch(p, name, blocks, *args):
        for x in args[OUTPUTS[name]]:
            x.fill(np.nan)
        launch(p, name, blocks, *args)

    monkeypatch.setattr(attention, "_launch", poison_and_launch)


# --- the rule, in the simulator -------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv"),
    [
        *((0, 0), (0, 17), (17, 0), (1, 1), (1, 16), (16, 1), (1, 33)),
        *((15, 17), (16, 16), (17, 15), (17, 16), (31, 33), (33, 48)),
    ],
)
def test_lengths_around_a_tile(seqlen_q, seqlen_kv, causal):
    """None, one, a tile and one less or more, several tiles; full and causal."""
    check("simulator", problem(seqlen_q, seqlen_kv), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_dtypes(mask, dtype):
    """Every kind of mask in every dtype: in float32 over 2 x 3 tiles, in the others over 1 x 2."""
    lengths = (18, 35) if dtype == "float32" else (5, 19)
    check("simulator", problem(*lengths, batch=2, dtype=dtype), **masks(*lengths)[mask])


@pytest.mark.parametrize("mask", ["causal", "wide", "ragged_causal_window"])
def test_more_queries_than_keys(mask):
    """Three tiles of queries, two of keys, in groups of two heads."""
    check("simulator", problem(37, 20, batch=2, heads=2, heads_kv=1), **masks(37, 20)[mask])


@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 2), (3, 1), (3, 3)])
def test_grouped_heads(heads, heads_kv):
    """Groups of two and three, and none; a batch of 2 tells heads from batch entries."""
    check("simulator", problem(5, 7, batch=2, heads=heads, heads_kv=heads_kv))


@pytest.mark.parametrize(
    ("dim", "dim_v"), [(1, 1), (1, 17), (17, 1), (16, 33), (33, 16), (40, 8), (31, 70), (65, 32)]
)
def test_head_dimensions_and_slices(dim, dim_v):
    """One to three slices of 32 columns, of q more or fewer than of v; ragged chunks of 16."""
    check("simulator", problem(5, 19, dim=dim, dim_v=dim_v), causal=True)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_scale(scale):
    """A scale of 0, below 0, and one that makes softmax sharp."""
    check("simulator", problem(5, 19), scale=scale)


@pytest.mark.parametrize("axes", [3, 2])
def test_missing_axes(axes):
    """(seqlen, heads, dim) and (seqlen, dim) in, the same out, the bits of the full form."""
    p = problem(5, 7)
    rows = {3: (0,), 2: (0, slice(None), 0)}[axes]
    index = {n: (0,) * (4 - axes) if n == "lse" else rows for n in RESULTS}
    inputs = [x[rows] for x in (p.q, p.k, p.v, p.do)]
    got = run("simulator", *inputs, p.dlse[index["lse"]])
    full = run("simulator", p.q, p.k, p.v, p.do, p.dlse)
    full = SimpleNamespace(**{n: getattr(full, n)[index[n]] for n in RESULTS})
    assert_same_bits(got, full)


# --- what holds to the bit ------------------------------------------------------------------------


@KERNELS
def test_both_layouts_give_the_same_bits(backend):
    """(batch, heads, seqlen, dim) in and out, contiguous as the caller would have made it."""
    p = problem(18, 21, batch=2, heads=2, heads_kv=1, dim_v=8)
    expected = run(backend, p.q, p.k, p.v, p.do, p.dlse, causal=True)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (p.q, p.k, p.v, p.do)]
    got = run(backend, *swapped, p.dlse, causal=True, layout="bhsd")
    for name in RESULTS:
        x = getattr(got, name)
        assert x.flags.c_contiguous, name
        y = getattr(expected, name)
        assert x.tobytes() == (y if name == "lse" else y.swapaxes(1, 2)).tobytes(), name


@pytest.mark.parametrize("mask", ["full", "ragged_causal_window"])
def test_any_schedule_gives_the_same_bits(mask, monkeypatch):
    """Threads that run in any order between barriers: no result depends on a race."""
    p = problem(18, 19, batch=2, dim=20)
    inputs = (p.q, p.k, p.v, p.do, p.dlse)
    expected = run("simulator", *inputs, **masks(18, 19)[mask])
    launch = simulate.launch
    for seed in (1, 2):
        monkeypatch.setattr(simulate, "launch", functools.partial(launch, seed=seed))
        assert_same_bits(run("simulator", *inputs, **masks(18, 19)[mask]), expected)


@KERNELS
def test_lengths_out_of_range_are_clamped(backend):
    """Lengths in GPU memory are not read back to be checked: -3 counts as 0, 99 as the sequence."""
    p = problem(18, 21, batch=2)
    results = []
    for q_lengths, kv_lengths in (([99, 7], [20, 99]), ([18, 7], [20, 21]), ([18, -3], [20, -1])):
        prepared = attention.prepare(p.q, p.k, p.v, causal=True, backend="numpy")
        lengths = {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
        prepared = dataclasses.replace(
            prepared,
            backend="simt" if backend == "gpu" else backend,
            **{n: np.array(x) for n, x in lengths.items()},
        )
        o, lse = attention._forward(attention._resident(prepared))
        results.append([x.get() if backend == "gpu" else x for x in (o, lse)])
    long, right, negative = results
    for x, y, z in zip(long, right, negative, strict=True):
        assert x.tobytes() == y.tobytes()
        assert x[0].tobytes() == z[0].tobytes()
    assert not negative[0][1].any() and (negative[1][1] == -np.inf).all()


@KERNELS
def test_the_same_entry_in_any_batch(backend):
    """A batch entry's bits do not depend on the entries beside it."""
    p = problem(18, 21, batch=3, heads=2)
    together = run(backend, p.q, p.k, p.v, p.do, p.dlse, causal=True)
    alone = run(backend, *(x[1:2] for x in (p.q, p.k, p.v, p.do, p.dlse)), causal=True)
    assert_same_bits(SimpleNamespace(**{n: getattr(together, n)[1:2] for n in RESULTS}), alone)


# --- errors that the tests above have to see ------------------------------------------------------

FACTORIES = ("make_forward", "make_delta", "make_backward_dkdv", "make_backward_dq")


def mutant(old, new, occurrence=0):
    """The kernels with one occurrence of `old` in their source replaced."""
    functions = [simt.products, simt.tile, *(getattr(simt, name) for name in FACTORIES)]
    source = "\n".join(inspect.getsource(f) for f in functions)
    parts = source.split(old)
    assert len(parts) > occurrence + 1, f"the kernels no longer contain {old!r}"
    head, tail = parts[: occurrence + 1], parts[occurrence + 1 :]
    source = new.join((old.join(head), old.join(tail)))
    namespace = {**vars(tile_module), **vars(simt)}
    exec(compile(source, "mutant of simt.py", "exec"), namespace)
    return SimpleNamespace(**{name: namespace[name] for name in FACTORIES})


BARRIER = ("cuda.syncthreads()", "pass")
MUTANTS = {
    "unchanged": ("ZERO", "ZERO", 0),
    "no_barrier_before_product_nt": (*BARRIER, 0),
    "no_barrier_after_product_nt": (*BARRIER, 1),
    "no_barrier_before_product_nn": (*BARRIER, 2),
    "no_barrier_after_product_nn": (*BARRIER, 3),
    "l_not_rescaled": ("a * l[i] + row_sum(p_sum)", "l[i] + row_sum(p_sum)"),
    "acc_not_rescaled": ("acc[i, x] *= a", "acc[i, x] *= ONE"),
    "row_sum_of_one_thread": ("row_sum(p_sum)", "p_sum"),
    "row_max_of_one_thread": ("m_new = row_max(m_new)", "m_new = m_new"),
    "one_key_too_many": ("lo[i] <= kv_row0 + tx + LANES_N * j < hi[i]", "j < 0"),
    "one_key_too_few": ("full_begin <= n_block < full_end", "full_begin <= n_block <= full_end"),
    "last_tile_not_visited": ("range(begin, end)", "range(begin, end - 1)"),
    "padded_rows_not_written": ("if row < x.shape[0]", "if row < rows"),
    "lse_without_m": ("m[i] + math.log(l[i])", "math.log(l[i])"),
    "delta_without_dlse": ("total -= dlse[b, h, row]", "pass"),
    "delta_left_out": ("s[i, j] * (dp[i, j] - delta_j)", "s[i, j] * dp[i, j]"),
    "dk_without_scale": ("factor[i] = REAL(scale)", "factor[i] = ONE"),
    "dq_without_scale": ("lse_frag[i] = REAL(scale)", "lse_frag[i] = ONE"),
    "first_head_of_a_group_only": ("kv_head * group + group", "kv_head * group + 1"),
    "wrong_key_head": ("h // (q.shape[2] // k.shape[2])", "h % k.shape[2]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_caught(name, monkeypatch):
    """A missing barrier reads what is not written yet; wrong arithmetic breaks the rule."""
    monkeypatch.setitem(sys.modules, simt.__name__, mutant(*MUTANTS[name]))
    p = problem(18, 19, heads=4, heads_kv=2, dim=20)
    verify = functools.partial(check, "simulator", p, causal=True, q_lengths=[17])
    if name == "unchanged":
        verify()
        return
    message = "are not finite" if name.startswith("no_barrier_before") else "^(o|lse|dq|dk|dv): "
    with pytest.raises(AssertionError, match=message):
        verify()


# --- the configurations that a GPU runs -----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "lengths"),
    [
        (16, (65, 67)),
        pytest.param(32, (65, 67), marks=pytest.mark.slow),
        pytest.param(64, (3, 67), marks=pytest.mark.slow),
        pytest.param(128, (3, 5), marks=pytest.mark.slow),
    ],
)
def test_shipped_configurations_in_the_simulator(dtype, dim, lengths, monkeypatch):
    """The tiles of the GPU, one configuration for each slice width and dtype."""

    def choose(dtype, head_dim, head_dim_v, simulated):
        assert simulated
        return config.choose_simt(dtype, head_dim, head_dim_v)

    monkeypatch.setattr(launches, "choose_simt", choose)
    check("simulator", problem(*lengths, dim=dim, dtype=dtype), causal=True)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 8, 40, 64, 96, 111, 128, 256, 512])
def test_grid_on_a_gpu(dim, dtype, mask):
    """Every width, dtype and mask, at lengths of several ragged tiles, in groups of two heads."""
    p = problem(217, 331, batch=2, heads=4, heads_kv=2, dim=dim, dtype=dtype)
    check("gpu", p, **masks(217, 331)[mask])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 128), (128, 64), (1, 257), (257, 1), (40, 111)])
def test_two_head_dimensions_on_a_gpu(dim, dim_v, dtype):
    """head_dim_v unlike head_dim, in other numbers of slices."""
    p = problem(331, 217, batch=2, heads=2, heads_kv=1, dim=dim, dim_v=dim_v, dtype=dtype)
    check("gpu", p, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_kv"),
    [(0, 65), (65, 0), (1, 1), (1, 1025), (63, 65), (64, 64), (65, 63), (1025, 1)],
)
def test_lengths_around_a_tile_on_a_gpu(seqlen_q, seqlen_kv, causal):
    """None, one, a tile of 64 and one less or more."""
    check("gpu", problem(seqlen_q, seqlen_kv, heads=2, dtype="float16"), causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_numpy_arrays_on_a_gpu(dtype):
    """NumPy in, NumPy out: copied there and back, the bits of the CuPy call."""
    p = problem(33, 65, heads=2, dtype=dtype)
    here = fn.attention(p.q, p.k, p.v, backend="simt", causal=True)
    assert isinstance(here, np.ndarray)
    assert here.tobytes() == run("gpu", p.q, p.k, p.v, causal=True).o.tobytes()
