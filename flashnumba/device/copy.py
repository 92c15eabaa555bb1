"""Tiles of a head between global and shared memory: by TMA, or by a warp where TMA cannot address.

In shared memory a tile is sub-tiles of 64 columns in 128-byte swizzle, one after the other, padded
with zeros to `head_dim` columns (ptx/layout.py).
"""

from functools import cache

import numpy as np
from numba import cuda

from flashnumba.device import inlined
from flashnumba.device.pipeline import lane_index
from flashnumba.ptx.barrier import mbarrier_arrive, mbarrier_arrive_expect_tx
from flashnumba.ptx.layout import swizzle128
from flashnumba.ptx.shared import fence_proxy_async, ld_shared_u16, st_shared_u32
from flashnumba.ptx.tma import (
    cp_async_bulk_commit_group,
    cp_async_bulk_tensor_load,
    cp_async_bulk_tensor_store,
    cp_async_bulk_wait_group_read,
    fence_proxy_tensormap,
)

i32, u32 = np.int32, np.uint32


@cache
def copies(head_dim, tma):
    """(see_map, load_tile, store_tile), for a whole warp; without `tma` maps are not read.

    `see_map` comes before the first use of a map.
    """
    SUBTILES = head_dim // 64

    @inlined
    def see_map(x_map):
        if tma:
            fence_proxy_tensormap(x_map)

    @inlined
    def load_tile(target, x, x_map, full, rows, row0, h, b):
        """`rows` rows of a head, zeros past the array; `full` tells when, by an arrival
        of one lane with TMA, else of all."""
        lane = lane_index()
        if tma:
            if lane == 0:
                mbarrier_arrive_expect_tx(full, u32(2 * head_dim * rows))
                for i in range(SUBTILES):
                    part = target + u32(128 * rows * i)
                    cp_async_bulk_tensor_load(part, x_map, full, 64 * i, row0, h, b)
        else:
            for i in range(lane, i32(rows * head_dim // 2), i32(32)):  # two halves at a time
                row, column = i // (head_dim // 2), i % (head_dim // 2) * 2
                bits = u32(0)
                if row0 + row < x.shape[1]:
                    if column < x.shape[3]:
                        bits = u32(x[b, row0 + row, h, column])
                    if column + 1 < x.shape[3]:
                        bits |= u32(x[b, row0 + row, h, column + 1]) << u32(16)
                at = column // 64 * 128 * rows + swizzle128(128 * row + column % 64 * 2)
                st_shared_u32(target + u32(at), bits)
            fence_proxy_async()
            mbarrier_arrive(full)

    @inlined
    def store_tile(x, x_map, source, rows, row0, row_end, h, b):
        """Rows [row0, row_end) of a head, from a tile of `rows`, which may be reused after.

        TMA stores them 64 at a time, which is what `x_map` is for, except those past the array.
        """
        lane = lane_index()
        if tma:
            if lane == 0:
                while row0 < row_end:
                    for i in range(SUBTILES):
                        part = source + u32(128 * rows * i)
                        cp_async_bulk_tensor_store(x_map, part, 64 * i, row0, h, b)
                    source, row0 = source + u32(64 * 128), i32(row0 + 64)
                cp_async_bulk_commit_group()
                cp_async_bulk_wait_group_read()
        else:
            for row in range(row_end - row0):
                for column in range(lane, x.shape[3], 32):
                    at = column // 64 * 128 * rows + swizzle128(128 * row + column % 64 * 2)
                    x[b, row0 + row, h, column] = np.uint16(ld_shared_u16(source + u32(at)))
        cuda.syncwarp()

    return see_map, load_tile, store_tile
