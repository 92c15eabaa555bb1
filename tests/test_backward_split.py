"""Every configuration of the float32 backward on Hopper compiles to what was meant."""

import re

import pytest
from test_forward_wgmma import REGISTERS, SHARED_BYTES
from test_ptx_conformance import operations
from test_runtime import float64_operations, needs_compilers

from flashnumba.config import choose_split_backward
from flashnumba.device.parts import by_pairs, factors
from flashnumba.runtime import cached_cubin

CONFIGS = [
    choose_split_backward(head_dim, deterministic, parts)
    for head_dim in (64, 128)
    for parts in (1, 3)
    for deterministic in (False, True)[: 1 + (parts == 3)]
]


def name_of(config):
    return f"{config.head_dim}-{config.parts}{'-deterministic' * config.deterministic}"


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_pairs_are_all_factors(parts):
    """Each product once, by one part of the right factor or by its first two."""
    both, others = by_pairs(parts)
    paired = [(i, j) for i in both for j in (0, 1)]
    assert sorted(paired + others) == sorted(factors(parts))


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_block_fits_the_machine(config):
    producer, consumer = config.registers
    assert config.shared_bytes <= SHARED_BYTES
    start = REGISTERS // config.threads // 8 * 8
    assert producer + config.consumers * consumer <= start * (1 + config.consumers)


@needs_compilers
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_it_compiles_to_what_was_meant(config):
    """No spills, no local memory, no float64; as many products as parts need."""
    from flashnumba.kernels.backward_split import make_backward

    kernel = make_backward(config)
    cubin = cached_cubin(kernel, (9, 0, "a"))
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
    assert not re.search(r"C75\d\d|warning|error", cubin.log), cubin.log
    assert cubin.registers == REGISTERS // kernel.threads // 8 * 8
    assert not float64_operations(cubin.code)
    found, products = operations(cubin.code), len(factors(config.parts))
    paired = sum(map(len, by_pairs(config.parts)))
    over_columns, over_queries, over_keys = (
        n // 16 for n in (config.head_dim, config.block_m, config.block_n)
    )
    of_dq = over_keys * (paired if config.head_dim == 64 else products)
    of_dkv = 2 * over_queries * products
    assert found["HGMMA"] == 2 * over_columns * paired + of_dkv + of_dq, found
    assert found["RED"] > 0


@needs_compilers
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_what_comes_before_and_after_compiles(config):
    from flashnumba.kernels.backward_mma_passes import make_prepare
    from flashnumba.kernels.backward_split import make_convert

    for make in (make_prepare, make_convert):
        cubin = cached_cubin(make(config), (9, 0))
        assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
        assert not float64_operations(cubin.code)
