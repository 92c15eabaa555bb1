"""What tensor cores read and write: factors in shared memory, accumulators in registers.

A thread has two rows of a tile, 8 apart, and of each the same columns: register 4 j + 2 r + x is
row r, column 8 j + x from its first. The 4 neighbouring lanes of a warp share their rows. Several
tiles of 16 rows are one after the other, and rows 2 t and 2 t + 1 are those of tile t.
"""

from functools import cache

import numpy as np

from flashnumba.device import inlined
from flashnumba.device.pipeline import lane_index
from flashnumba.ptx.layout import swizzle128
from flashnumba.ptx.shared import st_shared_f32, st_shared_u32, stmatrix_x4
from flashnumba.ptx.thread import cvt_bf16x2, cvt_f16x2, cvt_f16x2_each

ZERO = np.float32(0)
i32, u32, u64 = np.int32, np.uint32, np.uint64


@inlined
def descriptor(constant, address):
    """A tile at a shared address as wgmma takes it; `constant` says how it is laid out."""
    return constant | u64(u32(address) >> u32(4) & u32(0x3FFF))


def pack_of(dtype, turing=False):
    """What makes two halves of two float32."""
    if dtype == "float16":
        return cvt_f16x2_each if turing else cvt_f16x2
    return cvt_bf16x2


@cache
def scores(dtype, columns, tiles=1, turing=False):
    """(mask, to_halves, halves_to_shared) of tiles of scores with `columns` columns."""
    pack = pack_of(dtype, turing)

    @inlined
    def mask(s, r, lo, hi, unseen):
        """In row r only columns [lo, hi), counted from the thread's first, are seen."""
        for j in range(columns // 8):
            for x in range(2):
                if not lo <= 8 * j + x < hi:
                    s[r // 2 * (columns // 2) + 4 * j + r % 2 * 2 + x] = unseen

    @inlined
    def to_halves(p, s):
        """s, two in a register: the order is that of a left factor in registers."""
        for i in range(tiles * columns // 4):
            p[i] = pack(s[2 * i], s[2 * i + 1])

    @inlined
    def halves_to_shared(p, tile, column0):
        """Halves as `to_halves` packs them to this warp's 16 rows of a tile of 64 columns."""
        lane = u32(lane_index())
        start = (lane & u32(15)) << u32(7) | lane & u32(16) | column0 * u32(2)
        start = u32(tile + u32(swizzle128(start)))
        for i in range(columns // 16):
            x = 4 * i
            stmatrix_x4(u32(start ^ u32(32 * i)), p[x], p[x + 1], p[x + 2], p[x + 3])

    return mask, to_halves, halves_to_shared


@cache
def output(dtype, head_dim, tiles=1):
    """(rescale, divide, to_shared) of an output of `head_dim` columns; `to_shared` of one tile."""
    pack = pack_of(dtype)
    TILE = head_dim // 2

    @inlined
    def rescale(acc, a):
        """acc *= a, row by row."""
        for j in range(head_dim // 8):
            for r in range(2 * tiles):
                for x in range(2):
                    acc[TILE * (r // 2) + 4 * j + r % 2 * 2 + x] *= a[r]

    @inlined
    def divide(acc, inverse):
        """acc / l, given 1 / l; 0 where that is 0."""
        for j in range(head_dim // 8):
            for r in range(2 * tiles):
                for x in range(2):
                    i = TILE * (r // 2) + 4 * j + r % 2 * 2 + x
                    acc[i] = acc[i] * inverse[r] if inverse[r] != ZERO else ZERO

    @inlined
    def to_shared(acc, tile, column0, columns, subtile_bytes):
        """`columns` columns of acc from `column0` as halves to this warp's 16 rows of a tile.

        `subtile_bytes` from one sub-tile of 64 columns to the next.
        """
        lane = u32(lane_index())
        start = u32(tile + u32(swizzle128((lane & u32(15)) << u32(7) | lane & u32(16))))
        for i in range(columns // 16):
            x = column0 // 2 + 8 * i
            stmatrix_x4(
                u32((start ^ u32(i % 4 * 32)) + u32(i // 4 * subtile_bytes)),
                pack(acc[x], acc[x + 1]),
                pack(acc[x + 2], acc[x + 3]),
                pack(acc[x + 4], acc[x + 5]),
                pack(acc[x + 6], acc[x + 7]),
            )

    return rescale, divide, to_shared


@cache
def fragment_to_shared(config, columns, tiles, subtile_bytes, as_factor=False):
    """A fragment to shared memory in its dtype: by stmatrix, or before Hopper pair by pair."""
    if config.dtype == "float32":
        return floats_to_shared(columns, tiles, subtile_bytes, as_factor)
    pack = pack_of(config.dtype, config.turing)

    @inlined
    def by_matrices(acc, tile):
        start = first_rows(tile)
        for t in range(tiles):
            for j in range(columns // 16):
                at = u32((start ^ u32(j % 4 * 32)) + u32(j // 4 * subtile_bytes + 2048 * t))
                x = t * (columns // 2) + 8 * j
                stmatrix_x4(
                    at,
                    pack(acc[x], acc[x + 1]),
                    pack(acc[x + 2], acc[x + 3]),
                    pack(acc[x + 4], acc[x + 5]),
                    pack(acc[x + 6], acc[x + 7]),
                )

    @inlined
    def by_pairs(acc, tile):
        lane = u32(lane_index())
        start = (lane >> u32(2)) << u32(7) | (lane & u32(3)) << u32(2)
        start = u32(swizzle128(u32(tile + start)))
        for t in range(tiles):
            for j in range(columns // 8):
                at = u32((start ^ u32(j % 8 * 16)) + u32(j // 8 * subtile_bytes + 2048 * t))
                x = t * (columns // 2) + 4 * j
                st_shared_u32(at, pack(acc[x], acc[x + 1]))
                st_shared_u32(u32(at + u32(1024)), pack(acc[x + 2], acc[x + 3]))

    return by_matrices if config.hopper else by_pairs


@cache
def floats_to_shared(columns, tiles, subtile_bytes, as_factor=False):
    """The same of float32, in sub-tiles of 32 columns.

    What is to be a left factor, `as_factor`, has eight columns in the order 0 2 4 6 1 3 5 7
    (ptx/mma_tf32.py).
    """

    @inlined
    def floats_to_shared(acc, tile):
        lane = u32(lane_index())
        column = (lane & u32(3)) << u32(2 if as_factor else 3)
        start = u32(swizzle128(u32(tile + ((lane >> u32(2)) << u32(7) | column))))
        for t in range(tiles):
            for j in range(columns // 8):
                more = u32(j // 4 * subtile_bytes + 2048 * t)
                at = start ^ u32(j % 4 * 32)
                beside = u32(((at ^ u32(16)) if as_factor else (at | u32(4))) + more)
                at = u32(at + more)
                x = t * (columns // 2) + 4 * j
                st_shared_f32(at, acc[x])
                st_shared_f32(beside, acc[x + 1])
                st_shared_f32(u32(at + u32(1024)), acc[x + 2])
                st_shared_f32(u32(beside + u32(1024)), acc[x + 3])

    return floats_to_shared


@inlined
def first_rows(tile):
    """This lane's address for a factor that ptx/mma.py reads by its rows first.

    `tile` is where the factor's first row and column lie, both multiples of 16, not swizzled.
    """
    lane = u32(lane_index())
    return u32(swizzle128(u32(tile + ((lane & u32(15)) << u32(7) | lane & u32(16)))))


@inlined
def first_columns(tile):
    """The same for one that it reads by its columns first."""
    lane = u32(lane_index())
    row = lane & u32(7) | (lane & u32(16)) >> u32(1)
    return u32(swizzle128(u32(tile + (row << u32(7) | (lane & u32(8)) << u32(1)))))


@inlined
def pairs(tile):
    """This lane's address for a factor B that ptx/mma_tf32.py reads by pairs of rows."""
    lane = u32(lane_index())
    at = (lane & u32(3)) << u32(8) | (lane & u32(28))
    return u32(swizzle128(u32(tile + at)))


@inlined
def pairs_in_order(tile):
    """The same for a factor A, whose columns lie in the order 0 2 4 6 1 3 5 7."""
    lane = u32(lane_index())
    column = lane >> u32(3) | (lane & u32(4))
    return u32(swizzle128(u32(tile + ((lane & u32(3)) << u32(8) | column << u32(2)))))
