"""A call that is repeated takes a plan: nothing is checked or decided again, and nothing is wrong.

All of it on a GPU that is not there (fake_gpu.py), whose kernels the simulator runs.
"""

import importlib
import re
import threading

import numpy as np
import pytest
from calls import problem

import flashnumba as fn
from flashnumba import plans
from flashnumba import workspace as kept

attention = importlib.import_module("flashnumba.attention")  # the package's name is the function
SMALL = {"dim": 8, "dtype": "float16"}


@pytest.fixture
def gpu(fake_gpu):
    """It only records launches; a test that looks at numbers lets it run."""
    fake_gpu.run = False
    return fake_gpu


@pytest.fixture
def nothing_checked(monkeypatch):
    """From when it is called, a call without a plan is an error."""
    fail = lambda *_, **__: pytest.fail("checked again")
    return lambda: monkeypatch.setattr(attention, "prepare", fail)


def arrays(seqlen_q=5, seqlen_kv=7, like=None, **options):
    import cupy

    p = problem(seqlen_q, seqlen_kv, **{**SMALL, **options})
    return [cupy.asarray(x) for x in (p.q, p.k, p.v)]


def bits(*results):
    return [x.get().tobytes() for x in results]


LAYOUTS = {
    "bshd": {},
    "bhsd": {"layout": "bhsd"},
    "no_batch": {},
    "bare": {},
}


def arranged(x, form):
    """(batch 1, seqlen, heads, dim) in another form; "bare" has one head only."""
    if form == "bhsd":
        return type(x)(None, host=np.ascontiguousarray(x.host.swapaxes(1, 2)))
    return {"bshd": x, "no_batch": x[0], "bare": x[0, :, 0]}[form]


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("name", ["simt", "wgmma"])
def test_the_second_call_takes_a_plan(gpu, nothing_checked, name, form):
    """Its results are those of a call that checks everything, in the caller's form, to the bit."""
    gpu.run = name == "wgmma" or form == "bhsd"
    heads = {"heads": 1} if form == "bare" else {"heads": 2, "heads_kv": 1}
    first, other = ([arranged(x, form) for x in arrays(seed=i, **heads)] for i in (0, 1))
    options = {"causal": True, "backend": name, **LAYOUTS[form]}
    expected, _ = fn.attention_vjp(*other, return_lse=True, **options)
    plans._plans.clear()
    fn.attention(*first, **options)
    assert len(plans._plans) == 1
    nothing_checked()
    got = fn.attention(*other, return_lse=True, **options)
    for x, y in zip(got, expected, strict=True):
        assert (type(x), x.shape, x.dtype) == (type(y), y.shape, y.dtype)
        assert x.flags.c_contiguous
    if gpu.run:
        assert bits(*got) == bits(*expected)
    assert type(fn.attention(*other, **options)) is type(got[0])


@pytest.mark.parametrize("dim", [8, 5])
def test_the_driver_gets_what_the_simulator_gets(gpu, dim):
    """Through descriptions of arrays, and without where TMA cannot address them: the same bits."""
    gpu.run = True
    given = arrays(heads=2, heads_kv=1, dim=dim)
    options = {"return_lse": True, "window": (2, 1)}
    got = fn.attention(*given, **options)
    expected = fn.attention(*(x.get() for x in given), **options, backend="simulator-wgmma")
    assert bits(*got) == [x.tobytes() for x in expected]


def test_a_plan_made_with_one_array_three_times(gpu, nothing_checked):
    """q, k and v were one object; the next call has three."""
    gpu.run = True
    q, k, v = arrays(5, 5)
    expected = bits(fn.attention_vjp(q, k, v)[0])
    fn.attention(q, q, q)
    nothing_checked()
    assert bits(fn.attention(q, k, v)) == expected
    assert bits(fn.attention(q, k, v)) != bits(fn.attention(q, q, q))


def test_results_are_new_arrays(gpu):
    """A plan does not hand out the same memory twice, and holds none."""
    q, k, v = arrays()
    given = [fn.attention(q, k, v, return_lse=True) for _ in range(3)]
    addresses = [x.data.ptr for pair in given for x in pair]
    assert len(set(addresses)) == len(addresses)


def strided(x):
    """The same values in every other row of an array."""
    return type(x)(None, host=np.repeat(x.host, 2, axis=1)[:, ::2])


def misaligned(x, by):
    """The same values, so many numbers after a multiple of 16 bytes."""
    memory = type(x)((x.size + by,), x.dtype)
    return memory[by:]._of(memory.host[by:].reshape(x.shape)).filled(x.host)


DIFFERENT = {
    "q longer": lambda q, k, v: (arrays(6)[0], k, v),
    "keys longer": lambda q, k, v: (q, *arrays(5, 8)[1:]),
    "a batch": lambda q, k, v: arrays(batch=2),
    "heads": lambda q, k, v: arrays(heads=2),
    "key heads": lambda q, k, v: arrays(heads=2, heads_kv=1),
    "head_dim": lambda q, k, v: arrays(dim=16),
    "bfloat16": lambda q, k, v: arrays(dtype="bfloat16"),
    "float32": lambda q, k, v: arrays(dtype="float32"),
    "q strided": lambda q, k, v: (strided(q), k, v),
    "k strided": lambda q, k, v: (q, strided(k), v),
    "v strided": lambda q, k, v: (q, k, strided(v)),
    "q misaligned": lambda q, k, v: (misaligned(q, 1), k, v),
    "k misaligned": lambda q, k, v: (q, misaligned(k, 2), v),
    "v misaligned": lambda q, k, v: (q, k, misaligned(v, 4)),
}
OPTIONS = {
    "causal": {"causal": True},
    "upper_left": {"causal": "upper_left"},
    "window": {"window": (1, 2)},
    "another window": {"window": (2, 1)},
    "scale": {"scale": 0.5},
    "negative scale": {"scale": -0.5},
    "backend": {"backend": "simt"},
}


def last_launch(gpu):
    return [launch for launch in gpu.launches if "forward" in launch[0]][-1]


def test_whatever_differs_has_a_plan_of_its_own(gpu):
    """Form and place of any array, and every option; each plan again gives the same launch."""
    q, k, v = arrays()
    calls = [((q, k, v), {})]
    calls += [(change(q, k, v), {}) for change in DIFFERENT.values()]
    calls += [((q, k, v), options) for options in OPTIONS.values()]
    calls.append((arrays(dtype="float32"), {"precision": "tf32"}))
    seen = []
    for given, options in calls:
        fn.attention(*given, **options)
        seen.append(last_launch(gpu))
        assert len(plans._plans) == len(seen)
    for (given, options), launch in zip(calls, seen, strict=True):
        fn.attention(*given, **options)
        assert last_launch(gpu) == launch
    assert len(plans._plans) == len(seen)
    of_tma = ["tma=True" in kernel for kernel, _, _ in seen]
    names = ["as it was", *DIFFERENT, *OPTIONS, "precision"]
    by_threads = {name for name, tma in zip(names, of_tma, strict=True) if not tma}
    assert by_threads == {"backend", "q misaligned", "k misaligned", "v misaligned"}


SAME = {
    "defaults by name": ({}, {"causal": False, "window": None, "layout": "bshd", "softcap": None}),
    "lse": ({}, {"return_lse": True}),
    "equal numbers": ({"window": (1, 2), "scale": 0.5}, {"window": (1, 2), "scale": 0.5}),
}


@pytest.mark.parametrize("case", SAME)
def test_calls_that_are_the_same(gpu, nothing_checked, case):
    """One plan serves both ways to say it."""
    first, second = SAME[case]
    fn.attention(*arrays(), **first)
    nothing_checked()
    fn.attention(*arrays(), **second)


# A good call, and one that compares equal to it and is refused all the same.
REFUSED = {
    "causal 1": ({"causal": True}, {"causal": 1}, ValueError),
    "causal 0": ({"causal": False}, {"causal": 0}, ValueError),
    "window True": ({"window": (1, 0)}, {"window": (True, 0)}, ValueError),
    "window 1.0": ({"window": (1, 0)}, {"window": (1.0, 0)}, ValueError),
    "scale True": ({"scale": 1}, {"scale": True}, TypeError),
    "scale complex": ({"scale": 1.0}, {"scale": 1 + 0j}, TypeError),
    "dropout complex": ({"dropout": 0.0}, {"dropout": 0j}, ValueError),
    "a bias": ({}, {"bias": np.zeros((5, 7), np.float32)}, NotImplementedError),
    "a window of an array": ({"window": (1, 0)}, {"window": np.array([1, 0])}, ValueError),
    "a window without end": ({"window": (1, 0)}, {"window": 1}, ValueError),
    "causal of a list": ({"causal": True}, {"causal": [True]}, ValueError),
    "a backend of arrays": ({}, {"backend": "numpy"}, ValueError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_does_not_admit_what_is_refused(gpu, case):
    """True == 1 == 1.0, but not every one of them is allowed; arrays compare to nothing."""
    good, bad, error = REFUSED[case]
    q, k, v = arrays()
    fn.attention(q, k, v, **good)
    (name,) = bad
    with pytest.raises(error, match=name):
        fn.attention(q, k, v, **bad)
    with pytest.raises(ValueError, match=re.escape("k.shape=(1, 7, 1, 4) must be")):
        fn.attention(q, k[..., :4], v, **good)
    with pytest.raises(TypeError, match="k is a numpy array"):
        fn.attention(q, k.get(), v, **good)


LENGTHS = {
    "a number": 6,
    "a tuple": (6,),
    "a list": [6],
    "a NumPy array": np.array([6]),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_lengths_make_no_plan(gpu, lengths):
    """They are arrays of the call's own, and may change."""
    for _ in range(2):
        fn.attention(*arrays(), kv_lengths=lengths)
    assert not plans._plans


def test_nothing_to_compute_makes_no_plan(gpu):
    """No query: nothing is launched, so there is nothing to bind; no key: zeros from simt."""
    for lengths, count in (((0, 7), 0), ((5, 0), 1)):
        for _ in range(2):
            assert fn.attention(*arrays(*lengths)).shape == (1, lengths[0], 1, 8)
        assert len(plans._plans) == count


def test_numpy_arrays_make_no_plan(gpu):
    """They are copied anyway."""
    q, k, v = (x.get() for x in arrays())
    for _ in range(2):
        assert isinstance(fn.attention(q, k, v), np.ndarray)
    assert not plans._plans


def test_no_more_plans_than_a_thousand(gpu, monkeypatch):
    """The oldest goes first."""
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    for left in (1, 2, 3, 4, 2):
        fn.attention(*arrays(), window=(left, 0))
        assert len(plans._plans) <= 3
    windows = [key[13][1] for key in plans._plans]
    assert windows == [(2, 0), (3, 0), (4, 0)]


def test_a_plan_runs_on_the_gpu_of_its_arrays(gpu, nothing_checked):
    """Whatever GPU is current; one with other arrays has a plan of its own."""
    import cupy

    given = {}
    for device in (0, 1):
        with cupy.cuda.Device(device):
            given[device] = arrays()
        fn.attention(*given[device])
    assert len(plans._plans) == 2
    nothing_checked()
    for current in (0, 1):
        gpu.device = current
        for device, inputs in given.items():
            assert fn.attention(*inputs).device.id == device
            assert gpu.device == current


@pytest.mark.parametrize("allocations", [0, 1])
def test_too_little_memory_is_said_by_plans_too(gpu, allocations):
    """For o, or for lse behind it; afterwards all works."""
    given = arrays()
    fn.attention(*given)
    gpu.memory_left = allocations
    with pytest.raises(MemoryError, match="the GPU's memory is not enough beside.*untouched"):
        fn.attention(*given)
    gpu.memory_left = 100
    fn.attention(*given)


def test_a_plan_may_be_captured(gpu, nothing_checked):
    """A graph computes from what its inputs hold when it runs."""
    gpu.run = True
    q, k, v = arrays()
    fn.attention(q, k, v)
    nothing_checked()
    with gpu.capture(4096) as graph:
        o = fn.attention(q, k, v)
    assert [kernel.key.split()[0] for kernel, *_ in graph] == ["write", "wgmma"]
    new = arrays(seed=3)
    for x, y in zip((q, k, v), new, strict=True):
        x.host[...] = y.host
    gpu.replay(graph)
    assert bits(o) == bits(fn.attention(*new))


def test_the_first_call_may_be_captured(gpu):
    """Without a plan, too."""
    gpu.run = True
    given = arrays()
    with gpu.capture(4096) as graph:
        o = fn.attention(*given)
    gpu.replay(graph)
    assert bits(o) == bits(fn.attention(*given))


def test_the_counter_is_left_as_zeros(gpu):
    """More tiles than blocks: whoever is done takes the next from the counter, call after call."""
    gpu.run = True
    given = arrays(batch=4)  # 4 tiles of queries, 3 multiprocessors
    expected = bits(fn.attention(*given))
    ((_, workspace),) = kept._workspaces.items()
    assert last_launch(gpu)[1] == 3
    assert not workspace.memory.host[-1].any()
    assert bits(fn.attention(*given)) == expected


def test_threads_may_share_plans(gpu):
    """Eight threads, one stream, few slots: every launch finds what it needs."""
    given = [arrays(seed=i) for i in range(3)]
    errors = []

    def work(i):
        try:
            for j in range(20):
                fn.attention(*given[(i + j) % 3])
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    assert sum("forward" in key for key, _, _ in gpu.launches) == 160
