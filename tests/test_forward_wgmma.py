"""Every configuration of the Hopper forward compiles to what was meant, without a GPU."""

import re

import pytest
from test_ptx_conformance import operations
from test_runtime import float64_operations, needs_compilers

from flashnumba.config import choose_wgmma
from flashnumba.runtime import cached_cubin

SHARED_BYTES = 227 << 10  # what a block can have on Hopper
REGISTERS = 65536
CONFIGS = list(
    dict.fromkeys(
        choose_wgmma(dtype, head_dim, tma, negative)
        for head_dim in range(1, 257)
        for tma in (True, False)
        for dtype in ("bfloat16", "float16")
        for negative in (False, True)
        if dtype == "float16" or not negative
    )
)


def name_of(config):
    parts = [config.dtype, str(config.head_dim), "tma" if config.tma else "threads"]
    return "-".join(parts + ["negative"] * config.negative)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_a_block_fits_the_machine(config):
    """Shared memory of Hopper, the registers a block starts with, tiles in whole instructions."""
    producer, consumer = config.registers
    assert config.shared_bytes <= SHARED_BYTES
    start = REGISTERS // config.threads // 8 * 8  # a thread, as ptxas compiles for one block
    assert producer + config.consumers * consumer <= start * (1 + config.consumers)
    assert producer % 8 == consumer % 8 == 0
    assert config.head_dim % 64 == 0 and config.block_n % 16 == 0 and config.block_n <= 256


@needs_compilers
@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_it_compiles_to_what_was_meant(config):
    """Tensor cores, no spills, no local memory, no float64, and no products serialised by ptxas.

    ptxas says that it does by messages C75xx; a product waited for by itself also shows as one
    more wait. Scores and p v are multiplied in two places each, each with its wait, and in a third
    where the kernel runs on across works.
    """
    from flashnumba.kernels.forward_wgmma import make_forward

    kernel = make_forward(config)
    cubin = cached_cubin(kernel, (9, 0, "a"))
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
    assert not re.search(r"C75\d\d|warning|error", cubin.log), cubin.log
    # The registers that setmaxnreg hands around are those that the block starts with.
    assert cubin.registers == REGISTERS // kernel.threads // 8 * 8
    assert not float64_operations(cubin.code)
    found = operations(cubin.code)
    places = 2 + (config.q_slots > 1)
    assert found["HGMMA"] == places * (config.head_dim + config.block_n) // 16, found
    assert found["WARPGROUP.DEPBAR"] == 2 * places, found
    assert (found["UTMALDG"] > 0) == (found["UTMASTG"] > 0) == config.tma, found
