"""float32 on Hopper: its forward compiles to what was meant; what `precision` means anywhere."""

import re

import numpy as np
import pytest
from calls import DTYPES, named, of_blocks, on_gpu, problem, run, tensor_cores
from rule import assert_within_rule
from test_forward_wgmma import REGISTERS, SHARED_BYTES
from test_ptx_conformance import operations
from test_runtime import float64_operations, needs_compilers

import flashnumba as fn
from flashnumba import reference
from flashnumba.config import choose_split
from flashnumba.device.parts import factors
from flashnumba.kernels.forward_split import make_forward, make_split
from flashnumba.runtime import cached_cubin

CONFIGS = [
    choose_split(head_dim, negative, parts)
    for head_dim in (64, 128)
    for parts in (1, 3)
    for negative in (False, True)[: 1 + (parts == 3)]
]


def name_of(config):
    return f"{config.head_dim}-{config.parts}{'-negative' * config.negative}"


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_block_fits_the_machine(config):
    """Shared memory and registers of Hopper; O has a place as large as it is."""
    producer, consumer = config.registers
    assert config.shared_bytes <= SHARED_BYTES
    start = REGISTERS // config.threads // 8 * 8
    assert producer + config.consumers * consumer <= start * (1 + config.consumers)
    assert max(config.o_bytes, config.q_bytes) >= 4 * config.block_m * config.head_dim


@needs_compilers
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_it_compiles_to_what_was_meant(config):
    """No spills, no local memory, no float64; as many products as parts need, waited for twice."""
    kernel = make_forward(config)
    cubin = cached_cubin(kernel, (9, 0, "a"))
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
    assert not re.search(r"C75\d\d|warning|error", cubin.log), cubin.log
    assert cubin.registers == REGISTERS // kernel.threads // 8 * 8
    assert not float64_operations(cubin.code)
    found, products = operations(cubin.code), len(factors(config.parts))
    assert found["HGMMA"] == products * (config.head_dim + config.block_n) // 16, found
    assert found["WARPGROUP.DEPBAR"] == 2 and found["UTMALDG"] > 0, found
    assert not float64_operations(cached_cubin(make_split(config), (9, 0)).code)


@pytest.mark.parametrize(("precision", "dtype"), [("tf32", "float16"), ("bf16", "bfloat16")])
def test_precision_is_at_least_what_was_asked_for(backend, precision, dtype):
    """No worse than attention of halves with as many bits, forward and backward; where there are
    no tensor cores the same as float32 to the bit."""
    if backend.endswith("wgmma"):
        pytest.skip("in float32 it is split here")
    if of_blocks(backend) and precision == "tf32":
        pytest.skip("simulated with the fewest parts")
    p = problem(*((70, 90) if tensor_cores(backend) else (9, 11)), heads=2, heads_kv=1, dim=40)
    given = p.q, p.k, p.v, p.do, p.dlse
    got, whole = (run(backend, *given, precision=x, causal=True) for x in (precision, "float32"))
    if not tensor_cores(backend):
        assert got.o.tobytes() == whole.o.tobytes() and got.dq.tobytes() == whole.dq.tobytes()
        return
    double = [x.astype(np.float64) for x in given]
    low = [x.astype(DTYPES[dtype]) for x in given[:4]]
    exact, _ = reference.attention(*double[:3], causal=True)
    rounded, _ = reference.low_precision(*low[:3], causal=True)
    assert_within_rule(got.o, exact, rounded, low[0].dtype, "o")
    exact = reference.attention_backward(double[3], *double[:3], dlse=double[4], causal=True)
    rounded = reference.low_precision_backward(low[3], *low[:3], dlse=p.dlse, causal=True)
    for name, *x in zip(("dq", "dk", "dv"), exact, rounded, strict=True):
        assert_within_rule(getattr(got, name), *x, low[0].dtype, name)
        faster, slower = (np.abs(getattr(y, name) - x[0]).max() for y in (got, whole))
        assert faster > 8 * slower, name  # and it is another computation


@pytest.mark.parametrize("value", ["float16", "highest", None, 3, True])
def test_a_precision_that_is_none(value):
    q = np.zeros((5, 8), np.float32)
    with pytest.raises(ValueError, match=f"precision={value!r} must be one of"):
        fn.attention(q, q, q, precision=value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_precision_is_for_float32(backend, dtype):
    """What has fewer bits anyway, or more, is refused by name."""
    if on_gpu(backend):
        pytest.skip("decided before a GPU is asked")
    q = np.zeros((5, 8), DTYPES[dtype])
    for function in (fn.attention, fn.attention_vjp, fn.explain):
        with pytest.raises(ValueError, match=f"precision='tf32' is for float32.*{dtype}"):
            function(q, q, q, precision="tf32", backend=named(backend))


def test_explain_counts_products():
    q = np.zeros((1, 5, 1, 64), np.float32)
    for backend, precision, expected in (
        ("simulator-wgmma", "float32", "6 of bfloat16"),
        ("simulator-wgmma", "tf32", "3 of bfloat16"),
        ("simulator-wgmma", "bf16", "1 of bfloat16"),
        ("simulator-mma", "float32", "3 of TF32"),
        ("simulator-mma", "bf16", "1 of TF32"),
    ):
        rows = dict(fn.explain(q, q, q, backend=backend, precision=precision).rows)
        assert rows["products"] == f"{expected} for one of float32"
        assert ("split" in rows) == backend.endswith("wgmma")
