"""Tiles of a head between global and shared memory: by TMA, by a warp, or by a block's threads.

In shared memory a tile is sub-tiles of 64 columns in 128-byte swizzle, one after the other, padded
with zeros to `head_dim` columns (ptx/layout.py).
"""

from functools import cache

import numpy as np
from numba import cuda

from flashnumba.device import inlined
from flashnumba.device.pipeline import lane_index
from flashnumba.ptx.barrier import mbarrier_arrive, mbarrier_arrive_expect_tx
from flashnumba.ptx.cp_async import cp_async_commit_group, cp_async_row, cp_async_wait_group
from flashnumba.ptx.layout import swizzle128
from flashnumba.ptx.memory import ld_global_row, st_global_row
from flashnumba.ptx.shared import (
    fence_proxy_async,
    ld_shared_u16,
    ld_shared_v4_u32,
    st_shared_u32,
    st_shared_v4_u32,
)
from flashnumba.ptx.tma import (
    cp_async_bulk_commit_group,
    cp_async_bulk_tensor_load,
    cp_async_bulk_tensor_store,
    cp_async_bulk_wait_group_read,
    fence_proxy_tensormap,
)

i32, u32 = np.int32, np.uint32


@cache
def copies(head_dim, tma, parts=1, pieces=1):
    """(see_map, load_tile, store_rows, wait_stores), for a warp; without `tma` maps are not read.

    `see_map` comes before the first use of a map. Columns that are `parts` of numbers are loaded so
    that sub-tiles of the same columns of all parts follow each other. Tiles are loaded in so many
    `pieces` of rows, of which load_tile loads one.
    """
    SUBTILES = head_dim // 64
    OF_PART = SUBTILES // parts

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
                    place = i if parts == 1 else i % OF_PART * parts + i // OF_PART
                    part = target + u32(128 * rows * pieces * place)
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


@cache
def block_copies(head_dim, rows, threads, turing, itemsize=2):
    """Tiles of `rows` rows, loaded by all threads of a block, each 16 bytes of every 128 of a row.

    By cp.async; on `turing`, which has none, through registers. A head is a 2-D array (seqlen,
    head_dim) with rows of whole 16 bytes.
    """
    PARTS, ROWS_AT_ONCE = -(-head_dim * itemsize // 128), threads // 8
    WORDS, PASSES, STEP = 4 * PARTS, -(-rows // ROWS_AT_ONCE), 128 * rows
    ALL = rows % ROWS_AT_ONCE == 0  # threads have a row, always
    start_row, load_row = cp_async_row(PARTS, STEP), ld_global_row(PARTS)

    @inlined
    def own_column():
        """From which column on this thread needs a head."""
        return i32(u32(cuda.threadIdx.x) & u32(7)) * i32(16 // itemsize)

    @inlined
    def copy_row(place, x, row, pitch, inside, width):
        bits, four = cuda.local.array(WORDS, np.uint32), cuda.local.array(4, np.uint32)
        load_row(bits, x, row, pitch, inside, width)
        for part in range(PARTS):
            for j in range(4):
                four[j] = bits[4 * part + j]
            st_shared_v4_u32(u32(place + u32(part * STEP)), four)

    @inlined
    def load_rows(tile, x, row0, end):
        """Rows from row0 of a head from `own_column` on; zeros past row `end`."""
        thread = u32(cuda.threadIdx.x)
        target = u32(tile + u32(swizzle128(thread << u32(4))))
        pitch, width = i32(x.strides[0]), i32(x.shape[1] * itemsize)
        for i in range(PASSES):
            row = i32(i32(thread >> u32(3)) + i * ROWS_AT_ONCE)
            if ALL or row < rows:
                row = i32(row0 + row)
                inside = u32(16) if row < end else u32(0)
                place = u32(target + u32(16 * threads * i))
                if threads % 64 != 0:  # 8 rows are swizzled alike
                    place = u32(tile + u32(swizzle128(u32(thread + u32(threads * i)) << u32(4))))
                if turing:
                    copy_row(place, x, row, pitch, inside, width)
                else:
                    start_row(place, x, row, pitch, inside, width)

    @inlined
    def commit():
        """Close a group of loads."""
        if not turing:
            cp_async_commit_group()

    return own_column, load_rows, commit


@cache
def wait_copies(pending, turing):
    """Wait until at most `pending` groups of `block_copies` are in flight."""
    wait = cp_async_wait_group(pending)

    @inlined
    def wait_copies():
        if not turing:
            wait()

    return wait_copies


@cache
def warp_store(columns, itemsize=2):
    """Rows of a tile in shared memory to a head with rows of whole 16 bytes, by a warp."""
    PARTS = -(-columns * itemsize // 128)
    WORDS, CHUNKS = 4 * PARTS, u32(min(8, columns * itemsize // 16))
    store_row = st_global_row(PARTS)

    @inlined
    def store_rows(x, tile, subtile_bytes, rows, row0, row_end):
        """`rows` rows of a tile to x (seqlen, columns) from row0, without those past row_end.

        `tile` is where its first row and column lie, not swizzled.
        """
        lane = u32(lane_index())
        bits, four = cuda.local.array(WORDS, np.uint32), cuda.local.array(4, np.uint32)
        part_of_x = x[:, i32(lane & u32(7)) * i32(16 // itemsize) :]
        pitch, width = i32(x.strides[0]), i32(part_of_x.shape[1] * itemsize)
        for i in range(rows // 4):
            row = i32(lane >> u32(3)) + i32(4 * i)
            at = tile + (u32(row) << u32(7) | (lane & u32(7)) % CHUNKS << u32(4))
            at = u32(swizzle128(u32(at)))
            for part in range(PARTS):
                ld_shared_v4_u32(four, u32(at + u32(part * subtile_bytes)))
                for j in range(4):
                    bits[4 * part + j] = four[j]
            row = i32(row0 + row)
            if row < row_end:
                store_row(part_of_x, row, pitch, width, bits)

    return store_rows
