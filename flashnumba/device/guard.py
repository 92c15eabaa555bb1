"""Keeping what is not finite in V from rows that must not see it.

Tensor cores multiply a masked p = 0 with V all the same, and 0 times NaN is NaN. So where a tile
is masked, `clean` replaces infinities and NaN in the tile of V by 0. `restore` adds them to the
rows of O that do see them: there the result is infinite or NaN, as it should be.

In the backward `poison` does so for K and marks the keys, whose visible scores then are NaN, and
`clear` empties the rows of Q and dO that see no key: p = 0 and ds = 0 are multiplied with them.
"""

from functools import cache
from types import SimpleNamespace

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
def guard(dtype, rows, head_dim, fenced=True):
    """clean, restore, poison, clear for tiles of `rows` x `head_dim` numbers in 128-byte swizzle.

    `fenced` where the asynchronous proxy reads them, as wgmma and TMA do.
    """
    WHOLE = dtype == "float32"
    COLUMNS, ITEM = (32, 4) if WHOLE else (64, 2)  # of a sub-tile; bytes
    SUBTILES, SUBTILE_BYTES, PARTS = -(-head_dim // COLUMNS), 128 * rows, -(-rows // 32)
    INF = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}[dtype]  # exponent all ones
    NAN, SIGN = 0x7FFFFFFF if WHOLE else 0x7FFF, 0x80000000 if WHOLE else 0x80008000
    # Adding the carry overflows into the sign.
    BOTH, CARRY = (x if WHOLE else x * 0x10001 for x in (INF, INF & -INF))

    @inlined
    def bits_of(x):
        """A number of an array (halves are their bits there) as bits."""
        return x.view(np.uint32) if WHOLE else u32(x)

    @inlined
    def not_finite(x):
        """The sign bit of a float32 that is infinite or NaN; of two halves, those of either."""
        return u32((x & u32(BOTH)) + u32(CARRY)) & u32(SIGN)

    @inlined
    def scan(start, lane):
        """Not 0 if anything in this lane's row of the tile, which starts there, is not finite."""
        x = cuda.local.array(4, np.uint32)
        bad = u32(0)
        for subtile in range(SUBTILES):
            for column in range(8):  # of 16 bytes; neighbouring lanes in different banks
                turned = u32((column ^ lane & 7) * 16)
                ld_shared_v4_u32(x, start + u32(subtile * SUBTILE_BYTES) + turned)
                for i in range(4):
                    bad |= not_finite(x[i])
        return bad

    @inlined
    def scrub(start):
        """0 for what is not finite in the row."""
        for column in range(32 * SUBTILES):
            at = start + u32(column // 32 * SUBTILE_BYTES + column % 32 * 4)
            y = ld_shared_u32(at)
            wrong = not_finite(y)
            if WHOLE:
                wrong = u32(0xFFFFFFFF) if wrong != u32(0) else u32(0)
            else:
                wrong = (wrong << u32(1)) - (wrong >> u32(15))  # a sign bit to its whole half
            st_shared_u32(at, u32(y & ~wrong))
        if fenced:
            fence_proxy_async()

    @inlined
    def clean(tile, worker, workers):
        """A warp's part of a tile, a lane a row; True if anything was not finite."""
        lane, found = lane_index(), False
        for part in range(worker, PARTS, workers):
            row = i32(32 * part + lane)
            start = u32(tile + u32(128 * row))
            bad = scan(start, lane) if row < rows else u32(0)
            if bad != 0:
                scrub(start)
            found = found or cuda.any_sync(ALL_LANES, bad != 0)
        cuda.syncwarp()
        return found

    @inlined
    def poison(tile, flags, worker, workers):
        """`clean`, and for each row a float32 to `flags`: NaN if anything was not finite, else 0.

        Whether anything was goes there for each worker, behind the rows.
        """
        lane, found = lane_index(), False
        for part in range(worker, PARTS, workers):
            row = i32(32 * part + lane)
            bad = False
            if row < rows:
                start = u32(tile + u32(128 * row))
                bad = scan(start, lane) != 0
                if bad:
                    scrub(start)
                st_shared_u32(flags + u32(4 * row), u32(0x7FFFFFFF) if bad else u32(0))
            found = found or cuda.any_sync(ALL_LANES, bad)
        st_shared_u32(flags + u32(4 * (rows + worker)), u32(found))

    @inlined
    def clear(tile, log_l):
        """A warp clears the rows of a tile whose float32 at `log_l` is +inf."""
        lane = lane_index()
        for part in range(PARTS):
            row = i32(32 * part + lane)
            if row < rows and ld_shared_u32(log_l + u32(4 * row)) == u32(0x7F800000):
                for column in range(32 * SUBTILES):
                    at = column // 32 * SUBTILE_BYTES + column % 32 * 4
                    st_shared_u32(tile + u32(128 * row) + u32(at), u32(0))
                if fenced:
                    fence_proxy_async()

    @inlined
    def restore(o_tile, columns, v_row, column0, first, last, subtile_bytes):
        """A warp adds what is not finite in a row (head_dim,) of V to rows [first, last) of O.

        Those are in its tile of `columns` columns, the first of which is `column0`, with
        `subtile_bytes` from one sub-tile of 64 columns to the next.
        """
        column, end = u32(lane_index()), min(i32(columns), i32(v_row.shape[0] - column0))
        while i32(column) < end:
            number = bits_of(v_row[column0 + i32(column)])
            if number & u32(INF) == u32(INF):
                subtile = o_tile + subtile_bytes * (column // u32(COLUMNS))
                row = first
                while row < last:
                    at = u32(row) << u32(7) | column % u32(COLUMNS) * u32(ITEM)
                    at = subtile + u32(swizzle128(at))
                    old = ld_shared_u32(at) if WHOLE else ld_shared_u16(at)
                    finite = old & u32(INF) != u32(INF)
                    new = number if finite or old == number else u32(NAN)
                    if WHOLE:
                        st_shared_u32(at, new)
                    else:
                        st_shared_u16(at, new)
                    row = i32(row + 1)
            column = u32(column + u32(32))

    return SimpleNamespace(clean=clean, restore=restore, poison=poison, clear=clear)
