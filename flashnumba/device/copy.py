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
    """(see_map, load_tile, store_rows, wait_stores), for a warp; without `tma` maps are not read.

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
    def store_rows(
        x, x_map, source, subtile_bytes, columns, row0, row_end, column0, h, b
    ):  # fmt: skip
        """16 rows of a head from `row0` and `columns` columns from `column0`, without those that
        are past `row_end` or past the array. `source` must not change before `wait_stores`."""
        lane = lane_index()
        if tma:
            if lane == 0 and row0 < row_end:  # or TMA ends with the array within these rows
                for i in range(columns // 64):
                    part = source + u32(subtile_bytes * i)
                    cp_async_bulk_tensor_store(x_map, part, i32(column0 + 64 * i), row0, h, b)
                cp_async_bulk_commit_group()
        else:
            for row in range(min(16, row_end - row0)):
                for column in range(lane, min(columns, x.shape[3] - column0), 32):
                    at = column // 64 * subtile_bytes + swizzle128(128 * row + column % 64 * 2)
                    half = np.uint16(ld_shared_u16(source + u32(at)))
                    x[b, row0 + row, h, column0 + column] = half

    @inlined
    def wait_stores():
        if tma and lane_index() == 0:
            cp_async_bulk_wait_group_read()
        cuda.syncwarp()

    return see_map, load_tile, store_rows, wait_stores
