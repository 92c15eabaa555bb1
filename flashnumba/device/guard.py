"""Keeping what is not finite in V from rows that must not see it.

Tensor cores multiply a masked p = 0 with V all the same, and 0 times NaN is NaN. So where a tile
is masked, `clean` replaces infinities and NaN in the tile of V by 0. `restore` adds them to the
rows of O that do see them: there the result is infinite or NaN, as it should be.
"""

from functools import cache

import numpy as np
from numba import cuda

from flashnumba.device import inlined
from flashnumba.device.pipeline import lane_index
from flashnumba.ptx.layout import swizzle128
from flashnumba.ptx.shared import (
    fence_proxy_async,
    ld_shared_u16,
    ld_shared_u32,
    ld_shared_v4_u32,
    st_shared_u16,
    st_shared_u32,
)

ALL_LANES = 0xFFFFFFFF
i32, u32 = np.int32, np.uint32


@cache
def guard(dtype, rows, head_dim):
    """(clean, restore) for tiles of V of `rows` x `head_dim` halves in 128-byte swizzle."""
    SUBTILES, SUBTILE_BYTES, PARTS = head_dim // 64, 128 * rows, -(-rows // 32)
    INF = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]  # an exponent of all ones
    BOTH, CARRY = INF * 0x10001, (INF & -INF) * 0x10001  # adding the carry overflows into the sign

    @inlined
    def not_finite(x):
        """The sign bits of those of two halves that are infinite or NaN."""
        return u32((x & u32(BOTH)) + u32(CARRY)) & u32(0x80008000)

    @inlined
    def clean(v_tile, worker, workers):
        """A warp's part of a tile, a lane a row; True if anything was not finite."""
        lane = lane_index()
        x = cuda.local.array(4, np.uint32)
        found = False
        for part in range(worker, PARTS, workers):
            row = i32(32 * part + lane)
            start = u32(v_tile + u32(128 * row))
            bad = u32(0)
            if row < rows:
                for subtile in range(SUBTILES):
                    for column in range(8):  # of 16 bytes; neighbouring lanes in different banks
                        turned = u32((column ^ lane & 7) * 16)
                        ld_shared_v4_u32(x, start + u32(subtile * SUBTILE_BYTES) + turned)
                        for i in range(4):
                            bad |= not_finite(x[i])
            if bad != 0:
                for column in range(32 * SUBTILES):
                    at = start + u32(column // 32 * SUBTILE_BYTES + column % 32 * 4)
                    y = ld_shared_u32(at)
                    wrong = not_finite(y)
                    wrong = (wrong << u32(1)) - (wrong >> u32(15))  # a sign bit to its whole half
                    st_shared_u32(at, y & ~wrong)
                fence_proxy_async()
            found = found or cuda.any_sync(ALL_LANES, bad != 0)
        cuda.syncwarp()
        return found

    @inlined
    def restore(o_tile, columns, v_row, column0, first, last):
        """A warp adds what is not finite in a row (head_dim,) of V to rows [first, last) of O.

        Those are in its tile of 16 rows and `columns` columns, the first of which is `column0`.
        """
        column, end = u32(lane_index()), min(i32(columns), i32(v_row.shape[0] - column0))
        while i32(column) < end:
            half = u32(v_row[column0 + i32(column)])
            if half & u32(INF) == u32(INF):
                subtile = o_tile + u32(2048) * (column >> u32(6))
                row = first
                while row < last:
                    at = u32(row) << u32(7) | (column & u32(63)) << u32(1)
                    at = subtile + u32(swizzle128(at))
                    old = ld_shared_u16(at)
                    finite = old & u32(INF) != u32(INF)
                    st_shared_u16(at, half if finite or old == half else u32(0x7FFF))
                    row = i32(row + 1)
            column = u32(column + u32(32))

    return clean, restore
