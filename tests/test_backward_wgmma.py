"""Every configuration of the Hopper backward compiles to what was meant, without a GPU."""

import re

import pytest
from test_forward_wgmma import REGISTERS, SHARED_BYTES
from test_ptx_conformance import operations
from test_runtime import float64_operations, needs_compilers

from flashnumba.config import choose_wgmma_backward
from flashnumba.runtime import cached_cubin

CONFIGS = list(
    dict.fromkeys(
        choose_wgmma_backward(dtype, head_dim, deterministic)
        for head_dim in range(1, 257)
        for dtype in ("bfloat16", "float16")
        for deterministic in (False, True)
    )
)


def name_of(config):
    return f"{config.dtype}-{config.head_dim}{'-deterministic' * config.deterministic}"


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_block_fits_the_machine(config):
    producer, consumer = config.registers
    assert config.shared_bytes <= SHARED_BYTES
    start = REGISTERS // config.threads // 8 * 8
    assert producer + config.consumers * consumer <= start * (1 + config.consumers)
    assert config.block_m % 16 == config.block_n % 64 == config.head_dim % 64 == 0


@needs_compilers
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_it_compiles_to_what_was_meant(config):
    """No spills, no local memory, no float64; five products, dq's twice if it comes later."""
    from flashnumba.kernels.backward_wgmma import make_backward

    kernel = make_backward(config)
    cubin = cached_cubin(kernel, (9, 0, "a"))
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
    assert not re.search(r"C75\d\d|warning|error", cubin.log), cubin.log
    assert cubin.registers == REGISTERS // kernel.threads // 8 * 8
    assert not float64_operations(cubin.code)
    found = operations(cubin.code)
    over_columns, over_queries, over_keys = config.head_dim, config.block_m, config.block_n
    of_dq = over_keys * (1 + (config.deferred or config.lagging))
    assert found["HGMMA"] == (2 * over_columns + 2 * over_queries + of_dq) // 16, found
    assert found["WARPGROUP.DEPBAR"] == 6 - config.deferred + config.lagging, found
    assert (found["UBLKRED"] > 0) == config.staged == (found["RED"] == 0), found


@needs_compilers
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("name", ["prepare", "convert"])
def test_what_comes_before_and_after_compiles(config, name):
    from flashnumba.kernels import backward_passes

    cubin = cached_cubin(getattr(backward_passes, f"make_{name}")(config), (9, 0))
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
    assert not float64_operations(cubin.code)
