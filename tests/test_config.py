"""Every tile configuration that can be chosen is one that kernels/simt.py can work with."""

import dataclasses

import pytest

from flashnumba.config import SimtConfig, choose_simt, heads_together, kv_heads_in_turn
from flashnumba.kernels import simt

DTYPES = ("float16", "bfloat16", "float32", "float64")
WIDTHS = (*range(1, 513), 1000, 4096)


def choices():
    """All configurations for widths 1..512 and beyond, on a GPU and simulated, each once."""
    found = {}
    for simulated in (False, True):
        for dtype in DTYPES:
            for width in WIDTHS:
                config = choose_simt(dtype, width, width, simulated)
                where = "simulated" if simulated else "gpu"
                found.setdefault((config, simulated), f"{where}-{dtype}-{config.d_slice}")
    return [pytest.param(*key, id=name) for key, name in found.items()]


each_choice = pytest.mark.parametrize("config, simulated", choices())
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@each_choice
def test_a_block_fits_every_gpu(config, simulated):
    """The limits that all CUDA GPUs share, for static shared memory, threads and registers."""
    assert config.shared_bytes <= 48 * 1024
    assert config.threads % 32 == 0 and 64 <= config.threads <= 1024
    assert config.threads * 255 <= 65536  # so a thread may have all registers it can name
    assert config.threads <= 1024


@each_choice
def test_shared_bytes_adds_up_the_arrays_of_the_kernels(config, simulated):
    """block_m + block_n operand rows, block_m rows of weights, c_tile rows; padded as stored."""
    itemsize = 8 if config.dtype == "float64" else 4
    pad = 16 // itemsize
    numbers = (config.block_m + config.block_n) * (config.d_tile + pad)
    numbers += config.block_m * (config.block_n + pad) + config.c_tile * config.d_slice
    assert config.shared_bytes == numbers * itemsize
    assert config.c_tile * config.d_slice * itemsize <= 2048 * itemsize


@each_choice
def test_rows_start_at_16_bytes_and_in_different_banks(config, simulated):
    """Rows of shared memory allow 16-byte loads, and two neighbours never share all their banks."""
    for width in (config.d_tile, config.block_n):
        assert config.pitch(width) >= width
        row = config.pitch(width) * config.itemsize
        assert row % 16 == 0
        assert row % 128 != 0  # 32 banks of 4 bytes
    assert config.d_slice * config.itemsize % 16 == 0


@each_choice
def test_a_tile_is_loaded_without_gaps(config, simulated):
    """`load`: one column a thread, threads // width rows apart, as often as the tile needs."""
    shapes = [(config.block_m, config.d_tile), (config.block_n, config.d_tile)]
    for height, width in (*shapes, (config.c_tile, config.d_slice)):
        assert config.threads % width == 0
        assert height * width >= config.threads and height * width % config.threads == 0


@each_choice
def test_products_step_evenly(config, simulated):
    """`product_nt` and `add_product` walk d_tile, c_tile and block_n in whole 16-byte vectors."""
    vector = 16 // config.itemsize
    assert config.d_tile % vector == 0
    assert config.c_tile >= vector and config.c_tile % vector == 0
    assert config.block_n % config.c_tile == 0


@each_choice
def test_output_columns_divide_among_the_lanes(config, simulated):
    """d_slice = lanes_n * own * groups: every lane owns whole groups of neighbouring columns."""
    vector = 16 // config.itemsize
    assert config.d_slice % config.lanes_n == 0
    out = config.d_slice // config.lanes_n
    own = min(out, vector)
    assert own >= 1 and out % own == 0


@each_choice
def test_the_lanes_of_a_row_are_neighbours_in_a_warp(config, simulated):
    """Row reductions by xor shuffles need a power of two that divides the warp."""
    assert config.lanes_n & (config.lanes_n - 1) == 0
    assert 2 <= config.lanes_n <= 32 and 32 % config.lanes_n == 0


@each_dtype
@pytest.mark.parametrize("simulated", [False, True], ids=["gpu", "simulated"])
def test_every_width_has_a_slice_that_wastes_less_than_half(dtype, simulated):
    """One slice wherever one is enough, none larger than needed, for every width from 1 up."""
    largest = 32 if simulated else 128
    for width in WIDTHS:
        config = choose_simt(dtype, width, width, simulated)
        slices = -(-width // config.d_slice)
        assert slices * config.d_slice >= width
        assert slices == 1 or config.d_slice == largest
        assert config.d_slice == 16 or 2 * width > config.d_slice
        assert config.dtype == dtype


@each_dtype
def test_the_wider_head_dimension_decides(dtype):
    """head_dim and head_dim_v share one configuration, so it fits the larger of both."""
    for narrow, wide in ((1, 17), (16, 33), (64, 65), (1, 512)):
        expected = choose_simt(dtype, wide, wide)
        assert choose_simt(dtype, narrow, wide) == expected
        assert choose_simt(dtype, wide, narrow) == expected
    assert choose_simt(dtype, 16, 16) != choose_simt(dtype, 16, 17)


def test_a_configuration_is_a_frozen_value():
    """Equal fields are equal and hash alike, so a kernel is made once; nothing can be changed."""
    config = choose_simt("float32", 64, 64)
    twin = SimtConfig(**dataclasses.asdict(config))
    assert twin == config and hash(twin) == hash(config)
    assert simt.make_delta(twin) is simt.make_delta(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rows = 8


def test_every_kernel_and_configuration_has_a_key_of_its_own():
    """The disk cache finds a kernel by its key, so two kernels must never share one."""
    makers = [getattr(simt, name) for name in vars(simt) if name.startswith("make_")]
    assert len(makers) == 4
    configs = [param.values[0] for param in choices()]
    keys = {make(config).key for make in makers for config in configs}
    assert len(keys) == len(makers) * len(set(configs))


def test_heads_together_fill_the_l2_cache():
    """Under a mask: as many key heads as fit 32 MiB, with all their query heads; else one."""
    together = lambda *shape, masked=True: heads_together(*shape, masked)
    assert together(4, 8, 2, 4096, 128, masked=False) == 1
    assert together(4, 8, 2, 4096, 128) == 8 * 4  # 2 MiB each, all 8 fit
    assert together(4, 8, 4, 8192, 128) == 8 * 2  # 4 MiB each, 8 of 16 fit
    assert together(4, 8, 8, 1 << 20, 256) == 1  # not even one fits
    assert together(1, 6, 2, 1 << 20, 256) == 3


def test_heads_in_turn_fill_the_multiprocessors():
    """All blocks of as many heads as the GPU holds at once; at least one head, at most all."""
    assert kv_heads_in_turn(16, 16, 8, 132) == 16
    assert kv_heads_in_turn(4, 16, 32, 132) == 4
    assert kv_heads_in_turn(1, 16, 128, 132) == 1
    assert kv_heads_in_turn(1, 16, 256, 132) == 1
    assert kv_heads_in_turn(1, 2, 8, 132) == 2
