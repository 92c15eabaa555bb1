"""Where tiles lie in shared memory and fragments in registers: against the PTX ISA's figures."""

import numpy as np
import pytest
from numba import cuda
from ptx_cases import of_warps, simulate_function

from flashnumba.device.fragment import first_columns, first_rows, pairs, pairs_in_order
from flashnumba.ptx import layout, mma, mma_tf32

SIZES = (8, 16, 64, 80, 96, 128, 160, 176, 256)  # columns of accumulators


# --- the swizzle ----------------------------------------------------------------------------------


def test_the_swizzle_is_the_one_of_the_isa():
    """Row r of 8 has its 16-byte columns in the order c ^ r; written out for three rows."""
    columns = lambda row: [layout.swizzle128(128 * row + 16 * c) // 16 - 8 * row for c in range(8)]
    assert columns(0) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert columns(1) == [1, 0, 3, 2, 5, 4, 7, 6]
    assert columns(6) == [6, 7, 4, 5, 2, 3, 0, 1]


def test_the_swizzle_permutes_every_1024_bytes_and_nothing_smaller_than_16():
    """A bijection within its 8 rows, the same in each; bytes keep their row and their 16-byte."""
    at = np.arange(4 * 1024)
    to = layout.swizzle128(at)
    np.testing.assert_array_equal(np.sort(to), at)
    np.testing.assert_array_equal(to // 128, at // 128)
    np.testing.assert_array_equal(to % 16, at % 16)
    np.testing.assert_array_equal(to[1024:] - 1024, to[:-1024])
    np.testing.assert_array_equal(layout.swizzle128(to), at)


def test_the_swizzle_spreads_columns_over_the_banks():
    """The same 16 bytes of 8 neighbouring rows, as stmatrix and ldmatrix take them: 32 banks."""
    row, column = np.arange(64)[:, None], np.arange(8)
    banks = layout.swizzle128(128 * row + 16 * column) // 16 % 8
    for first in range(0, 64, 8):
        for c in range(8):
            assert sorted(banks[first : first + 8, c]) == list(range(8))


def test_the_swizzle_takes_the_machines_integers():
    """Unsigned and signed, of 32 bits, up to the highest address of a block."""
    for at in (0, 1000, 227 * 1024 + 1023):
        for integer in (np.uint32, np.int32, np.uint64):
            assert layout.swizzle128(integer(at)) == layout.swizzle128(at)


# --- tiles and descriptors ------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [64, 80, 128, 176, 192])
def test_k_major_steps(rows):
    """Columns 16 k of a tile in sub-tiles of 64 columns, (rows, 64) halves each, up to 256."""
    tile = np.arange(4 * rows * 64).reshape(4, rows, 64)  # numbers of halves in memory
    columns = tile.transpose(1, 0, 2).reshape(rows, 256)
    for k in range(16):
        assert layout.k_major(rows, k) == 2 * columns[0, 16 * k]


def test_mn_major_steps():
    """Rows 16 k of a tile, in its first sub-tile."""
    tile = np.arange(256 * 64).reshape(256, 64)
    for k in range(16):
        assert layout.mn_major(k) == 2 * tile[16 * k, 0]


def test_steps_keep_the_swizzles_alignment():
    """A step only moves by whole rows of 8, or within the 128 bytes that the swizzle permutes."""
    for rows in (64, 80, 96, 176):
        for k in range(16):
            assert layout.k_major(rows, k) % 1024 in (0, 32, 64, 96)
            assert layout.mn_major(k) % 1024 == 0


def test_descriptor_fields():
    """Bits 0-13, 16-29, 32-45 in units of 16 bytes, and 1 in bits 62-63: the 128-byte swizzle."""
    assert layout.descriptor_constant() == 0x4000_0040_0001_0000
    assert layout.descriptor_constant(128 * 128) == 0x4000_0040_0400_0000
    for address in (0, 1024, 227 * 1024 - 1024):
        for leading in (16, 80 * 128, 256 * 128):
            descriptor = layout.descriptor_constant(leading) | address >> 4
            assert layout.descriptor_fields(np.uint64(descriptor)) == (address, leading, 1024)
            assert descriptor >> 62 == 1
            assert descriptor >> 46 & 0xFFFF == 0  # base offset and the rest


# --- accumulators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", SIZES)
def test_accumulators_hold_every_entry_once(columns):
    """64 rows x `columns`, in 128 threads."""
    rows, cols = layout.accumulator(columns)
    assert rows.shape == cols.shape == (128, columns // 2)
    entries = np.sort((rows * columns + cols).ravel())
    np.testing.assert_array_equal(entries, np.arange(64 * columns))


def test_accumulators_lie_as_in_the_isas_figure():
    """Figure "WGMMA .m64nNk16 register fragment layout for accumulator matrix D", some threads."""
    rows, cols = layout.accumulator(16)
    at = lambda t: list(zip(rows[t].tolist(), cols[t].tolist(), strict=True))
    first = [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]
    assert at(0) == first
    assert at(3) == [(r, c + 6) for r, c in first]
    assert at(4) == [(r + 1, c) for r, c in first]
    assert at(31) == [(r + 7, c + 6) for r, c in first]
    assert at(32) == [(r + 16, c) for r, c in first]
    assert at(127) == [(r + 55, c + 6) for r, c in first]


def test_accumulators_are_made_of_wider_ones():
    """Register i means the same place whatever the width; softmax relies on that."""
    wide_rows, wide_cols = layout.accumulator(256)
    for columns in SIZES:
        rows, cols = layout.accumulator(columns)
        np.testing.assert_array_equal(rows, wide_rows[:, : columns // 2])
        np.testing.assert_array_equal(cols, wide_cols[:, : columns // 2])
    for i in range(0, 128, 2):  # pairs are neighbours, to be packed in one register
        np.testing.assert_array_equal(wide_cols[:, i] + 1, wide_cols[:, i + 1])
        np.testing.assert_array_equal(wide_rows[:, i], wide_rows[:, i + 1])


@pytest.mark.parametrize("tiles", [1, 2])
def test_a_warps_accumulators_are_those_of_a_warpgroup(tiles):
    """Of its first warps, tile by tile; softmax and stores take both."""
    for columns in (16, 80, 256):
        wide = layout.accumulator(columns)
        for mine, of_group in zip(mma.fragment(tiles, columns), wide, strict=True):
            np.testing.assert_array_equal(mine, of_warps(of_group, tiles)[:32])


# --- addresses of ldmatrix ------------------------------------------------------------------------


def test_lanes_name_the_rows_of_four_matrices():
    """Lane 8 i + r that of row r of matrix i: 8 rows further first, or 8 columns further first."""

    def kernel(rows, columns):
        rows[cuda.threadIdx.x] = first_rows(np.uint32(4096))
        columns[cuda.threadIdx.x] = first_columns(np.uint32(4096))

    rows, columns = np.zeros((2, 32), np.uint32)
    simulate_function(kernel, rows, columns)
    i, r = np.arange(32) // 8, np.arange(32) % 8
    at = lambda row, column: 4096 + layout.swizzle128(128 * row + 2 * column)
    np.testing.assert_array_equal(rows, at(r + i % 2 * 8, i // 2 * 8))
    np.testing.assert_array_equal(columns, at(r + i // 2 * 8, i % 2 * 8))


def test_steps_of_factors():
    """From a lane's address at (0, 0) to those at all multiples of 16: an xor, and an addition."""
    tile_rows = 80
    for lane_row, lane_column in np.ndindex(16, 2):
        at = lambda row, column: (
            column // 64 * tile_rows * 128 + layout.swizzle128(128 * row + column % 64 * 2)
        )
        first = at(lane_row, 8 * lane_column)
        for row, column in np.ndindex(tile_rows // 16, 10):
            flip, more = mma.step_of(column, row, tile_rows)
            there = at(lane_row + 16 * row, 8 * lane_column + 16 * column)
            assert (first ^ 32 * flip) + more == there


def test_lanes_of_pairs_read_from_different_banks():
    """Lane 4 g + t column g of rows 2 t and 2 t + 1; where columns are in another order, by it."""

    def kernel(natural, in_order):
        natural[cuda.threadIdx.x] = pairs(np.uint32(4096))
        in_order[cuda.threadIdx.x] = pairs_in_order(np.uint32(4096))

    natural, in_order = np.zeros((2, 32), np.uint32)
    simulate_function(kernel, natural, in_order)
    g, t = np.arange(32) // 4, np.arange(32) % 4
    at = lambda row, column: 4096 + layout.swizzle128(128 * row + 4 * column)
    for lanes, column in ((natural, g), (in_order, np.argsort(mma_tf32.ORDER)[g])):
        np.testing.assert_array_equal(lanes, at(2 * t, column))
        np.testing.assert_array_equal((lanes ^ 16) + 128, at(2 * t + 1, column))
        for row in range(2):
            assert len(set(at(2 * t + row, column) // 4 % 32)) == 32


# --- lanes ----------------------------------------------------------------------------------------


def test_the_four_lanes_of_a_row_are_neighbours():
    """row_max and row_sum exchange between lanes 4 g .. 4 g + 3."""
    rows, _ = layout.accumulator(64)
    np.testing.assert_array_equal(rows.reshape(32, 4, 32), rows[::4, None].repeat(4, 1))
