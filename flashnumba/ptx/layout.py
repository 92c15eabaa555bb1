"""How tiles lie in shared memory and fragments in registers: ordinary functions of integers.

A tile of halves is kept in sub-tiles of 64 columns, 128 bytes a row, swizzled. wgmma finds it by a
descriptor of 64 bits (PTX ISA, "matrix descriptor"): addresses and offsets in units of 16 bytes,

    bits  0-13  address        bits 32-45  stride offset: from 8 rows to the next 8, 1024 bytes
    bits 16-29  leading offset             bits 62-63  1: the 128-byte swizzle

K-major (Q, K: the summed index runs along a row of 128 bytes) ignores the leading offset; 16 summed
columns further is 32 bytes further. MN-major (V as stored: the summed index runs down the rows) has
there the bytes from one sub-tile of 64 columns to the next; 16 summed rows further is 2048 bytes.
"""

import numpy as np
from numba.cuda.extending import register_jitable

SWIZZLE_128 = 1 << 62
ROW = 128  # bytes


@register_jitable  # callable in kernels; on the host it stays plain Python
def swizzle128(address):
    """Where byte `address` of a sub-tile lies: its 16-byte column xor its row, modulo 8.

    So the same column of 8 neighbouring rows is in 8 different groups of banks. The sub-tile has
    to start at a multiple of 1024 bytes.
    """
    return address ^ (address >> 3 & 0x70)


def k_major(rows, k):
    """Bytes from a tile's start to its columns 16 k, when the tile has `rows` rows."""
    return k // 4 * rows * ROW + k % 4 * 32


def mn_major(k):
    """Bytes from a tile's start to its rows 16 k."""
    return k * 16 * ROW


def descriptor_constant(leading=16):
    """All of a descriptor but its address; `leading` in bytes."""
    return SWIZZLE_128 | (1024 >> 4) << 32 | (leading >> 4) << 16


def descriptor_fields(descriptor):
    """(address, leading offset, stride offset) in bytes."""
    return tuple((int(descriptor) >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))


def accumulator_row(thread, i):
    """Row in the tile of 64 of register i of a thread's fragment, thread 0..127 of a warpgroup."""
    return 16 * (thread // 32) + thread % 32 // 4 + i // 2 % 2 * 8


def accumulator_column(thread, i):
    """Column of register i of a thread's fragment."""
    return i // 4 * 8 + thread % 4 * 2 + i % 2


def accumulator(columns):
    """Rows and columns of a fragment of 64 x `columns`, two arrays (128, columns / 2)."""
    thread, i = np.arange(128)[:, None], np.arange(columns // 2)
    return np.broadcast_arrays(accumulator_row(thread, i), accumulator_column(thread, i))
