"""Gradients that are asked for again take a plan, as attention does (test_plans.py)."""

import importlib

import numpy as np
import pytest
from test_plans import LAYOUTS, arranged, arrays, bits, gpu, nothing_checked  # noqa: F401

import flashnumba as fn
from flashnumba import plans

attention = importlib.import_module("flashnumba.attention")


def call(inputs, form="bshd", seed=0, **options):
    """(do, q, k, v, o, lse), dlse of a forward in some form, and the keywords."""
    import cupy

    q, k, v = (arranged(x, form) for x in inputs)
    options = {"causal": True, **LAYOUTS[form], **options}
    deterministic = options.pop("deterministic", False)
    results, pullback = fn.attention_vjp(
        q, k, v, return_lse=True, deterministic=deterministic, **options
    )
    o, lse = results
    plans._plans.clear()
    rng = np.random.default_rng(seed)
    do, dlse = (
        cupy.asarray(rng.standard_normal(x.shape).astype(np.dtype(x.dtype))) for x in (o, lse)
    )
    return (do, q, k, v, o, lse), dlse, options, pullback


@pytest.mark.parametrize("form", LAYOUTS)
@pytest.mark.parametrize("name", ["simt", "wgmma", "wgmma float32"])
def test_the_second_call_takes_a_plan(gpu, nothing_checked, name, form):  # noqa: F811
    """Its results are those of a pullback, in the caller's form, to the bit; so with dlse."""
    gpu.run = True
    heads = {"heads": 1} if form == "bare" else {"heads": 2, "heads_kv": 1}
    name, _, dtype = name.partition(" ")
    if dtype:
        heads["dtype"] = dtype
    options = {"backend": name, "deterministic": True}
    other, other_dlse, _, pullback = call(arrays(seed=1, **heads), form, 1, **options)
    first, dlse, options, _ = call(arrays(**heads), form, **options)
    options["deterministic"] = True
    expected = pullback(other[0]), pullback(other[0], other_dlse)
    plans._plans.clear()
    fn.attention_backward(*first, **options)
    fn.attention_backward(*first, dlse=dlse, **options)
    assert len(plans._plans) == 2
    nothing_checked()
    got = (
        fn.attention_backward(*other, **options),
        fn.attention_backward(*other, dlse=other_dlse, **options),
    )
    for grads, right in zip(got, expected, strict=True):
        for x, y in zip(grads, right, strict=True):
            assert (type(x), x.shape, x.dtype) == (type(y), y.shape, y.dtype)
            assert x.flags.c_contiguous
        assert bits(*grads) == bits(*right)


def test_whatever_differs_has_a_plan_of_its_own(gpu):  # noqa: F811
    given, _, _, _ = call(arrays())
    do = given[0]
    different = [
        {"causal": True}, {"causal": False}, {"causal": "upper_left"}, {"window": (3, 1)},
        {"scale": 0.5}, {"deterministic": True}, {"backend": "wgmma"}, {"backend": "simt"},
    ]  # fmt: skip
    for count, options in enumerate(different, 1):
        for _ in range(2):
            fn.attention_backward(*given, **options)
        assert len(plans._plans) == count, options
    reversed_do = type(do)(None, host=do.host[:, ::-1])
    fn.attention_backward(reversed_do, *given[1:], backend="simt")
    assert len(plans._plans) == len(different) + 1


def test_a_plan_does_not_admit_what_is_refused(gpu):  # noqa: F811
    given, _, options, _ = call(arrays())
    fn.attention_backward(*given, deterministic=True, **options)
    with pytest.raises(TypeError, match="deterministic must be a bool, not int"):
        fn.attention_backward(*given, deterministic=1, **options)
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        fn.attention_backward(*given, casual=True)
    assert len(plans._plans) == 1


def test_no_plan(gpu):  # noqa: F811
    """For lengths, what TMA cannot address, NumPy arrays, nothing to compute."""
    import cupy

    given, _, options, _ = call(arrays())
    fn.attention_backward(*given, kv_lengths=cupy.asarray(np.array([3])), **options)
    given, _, options, _ = call(arrays(dim=5))
    fn.attention_backward(*given, **options)
    given, _, options, _ = call(arrays(seqlen_q=0))
    fn.attention_backward(*given, **options)
    given, _, options, _ = call(arrays())
    fn.attention_backward(*(x.get() for x in given), **options)
    assert not plans._plans


@pytest.mark.parametrize("allocations", [0, 2, 3])
def test_too_little_memory_is_said_by_plans_too(gpu, allocations):  # noqa: F811
    """For a gradient, or for scratch behind them; afterwards all works."""
    given, _, options, _ = call(arrays())
    fn.attention_backward(*given, **options)
    gpu.memory_left = allocations
    with pytest.raises(MemoryError, match="the GPU's memory is not enough beside.*untouched"):
        fn.attention_backward(*given, **options)
    gpu.memory_left = 100
    fn.attention_backward(*given, **options)
