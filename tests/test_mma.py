"""Kernels on the tensor cores of a warp: tiles for every GPU, what they compile to, fallbacks."""

import pytest
from calls import check, problem
from test_ptx_conformance import operations
from test_runtime import float64_operations, needs_compilers

import flashnumba as fn
from flashnumba import config, runtime
from flashnumba.config import Machine, MmaConfig, choose_mma, choose_mma_backward
from flashnumba.kernels import backward_mma, backward_mma_passes, forward_mma

KB = 1 << 10
MACHINES = {
    "turing": Machine((7, 5), 64 * KB),
    "small": Machine((8, 0), 48 * KB),  # what every GPU has
    "a100": Machine((8, 0), 163 * KB),
    "rtx30": Machine((8, 6), 99 * KB),
    "rtx40": Machine((8, 9), 99 * KB),
    "hopper": Machine((9, 0), 227 * KB),
    "b200": Machine((10, 0), 227 * KB),
    "rtx50": Machine((12, 0), 99 * KB),
}


def problems(machine):
    """(dtype, head_dim) that the table gives to mma on a machine, at the edges of its tiles."""
    for family in config.families("mma"):
        for dtype in family.dtypes:
            if family.runs_on(machine, dtype):
                for dim in (1, 64, 65, 128, 129, 256):
                    if dim <= family.head_dim:
                        yield dtype, dim


def choices():
    """(machine's name, configuration), each configuration of a compute capability once."""
    seen = set()
    for name, machine in MACHINES.items():
        for dtype, dim in problems(machine):
            for choose in (choose_mma, choose_mma_backward):
                made = choose(dtype, dim, machine)
                if made is not None and (machine.capability, made) not in seen:
                    seen.add((machine.capability, made))
                    short = "forward" if isinstance(made, MmaConfig) else "backward"
                    rows = f"{made.block_m}x{made.block_n}"
                    label = f"{name}-{short}-{dtype}-{made.head_dim}-{rows}"
                    yield pytest.param(name, made, id=label)


CHOICES = list(choices())


def compiled(param):
    """Whether a test compiles this one, some seconds each: everything for Hopper but for bfloat16,
    which differs in one instruction; of other GPUs two."""
    name, made = param.values
    few = (("float16", 128), ("float32", 64))
    return made.dtype != "bfloat16" and (name == "hopper" or (made.dtype, made.head_dim) in few)


@pytest.mark.parametrize("name, made", CHOICES)
def test_a_block_fits_the_machine(name, made):
    """Its shared memory; whole instructions in each warp's part of each product."""
    machine = MACHINES[name]
    assert made.blocks * (made.shared_bytes + KB) <= machine.shared_bytes + KB
    assert made.blocks * made.threads * 32 <= 65536 and made.shared_bytes % 16 == 0
    if isinstance(made, MmaConfig):
        assert made.block_n % 16 == 0
        return
    for rows, split, columns in (
        (made.block_n, made.s_keys, made.block_m),
        (made.block_n, made.dkv_keys, made.head_dim),
        (made.block_m, made.dq_queries, made.head_dim),
    ):
        assert rows % (16 * split) == 0 and made.warps % split == 0
        assert columns * split % (16 * made.warps) == 0


def test_every_gpu_has_tiles_for_every_problem():
    """Forward all; backward all but head_dim 256 on Turing, and more where 48 KB are all."""
    without = set()
    for name, machine in MACHINES.items():
        for dtype, dim in problems(machine):
            if name != "small":
                assert choose_mma(dtype, dim, machine) is not None, (name, dtype, dim)
                if choose_mma_backward(dtype, dim, machine) is None:
                    without.add((name, dtype, dim))
    assert without == {("turing", "float16", 129), ("turing", "float16", 256)}


def test_gradients_are_left_to_simt_where_no_tile_fits(monkeypatch, fake_gpu):
    """And explain says so."""
    import cupy
    import numpy as np

    machine = MACHINES["turing"]
    monkeypatch.setattr(runtime, "machine", lambda device=None: machine)
    x = cupy.asarray(np.zeros((1, 5, 2, 256), np.float16))
    rows = dict(fn.explain(x, x, x).rows)
    assert rows["forward"].startswith("kernels/forward_mma.py")
    for name in ("delta", "backward_dkdv", "backward_dq"):
        assert rows[name].startswith("kernels/simt.py"), rows
    assert "head_dim 256" in rows["gradients"] and "simt" in rows["gradients"]


@needs_compilers
@pytest.mark.parametrize("name, made", [p for p in CHOICES if compiled(p)])
def test_it_compiles_to_what_was_meant(name, made):
    """Tensor cores, ldmatrix, no float64, no local memory but for a few numbers that are spilled.

    Kernels that have all 255 registers spill up to eight on Hopper, more on other GPUs. For
    Blackwell another compiler keeps a fragment of scores in local memory.
    """
    capability = MACHINES[name].capability
    spilled = 32 if name == "hopper" else 64
    if isinstance(made, MmaConfig):
        makers = [forward_mma.make_forward]
    else:
        passes = backward_mma_passes
        makers = [backward_mma.make_backward, passes.make_prepare, passes.make_convert]
    for i, make in enumerate(makers):
        cubin = runtime.cached_cubin(make(made), capability)
        assert cubin.spill_bytes <= spilled, cubin.log
        assert cubin.stack_bytes <= (64 if capability < (10, 0) else 1024), cubin.log
        assert not float64_operations(cubin.code)
        if i == 0:
            found = operations(cubin.code)
            assert found["HMMA"] > 0 and found["LDSM"] > 0, found
            assert (found["LDGSTS"] > 0) == (capability >= (8, 0)), found


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_slot_for_queries(monkeypatch, dtype):
    """A backward whose ring of Q and dO has one slot, as where shared memory is small."""
    tiles = (config.mma.SIMULATED_TILES[0], (4, 32, 32, 2, 2, 2, 1, 1))
    monkeypatch.setattr(config.mma, "SIMULATED_TILES", tiles)
    check("simulator-mma", problem(70, 50, heads=2, heads_kv=1, dtype=dtype), causal=True)


@pytest.mark.parametrize("turing", [True, False])
def test_the_oldest_and_an_older_machine(monkeypatch, turing):
    """Without cp.async and with half the steps; without stmatrix and vector additions."""
    monkeypatch.setattr(config.mma, "generation_of", lambda machine: (turing, False))
    check("simulator-mma", problem(70, 50, dtype="float16"), window=(20, 3))
