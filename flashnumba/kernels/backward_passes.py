"""Before and after the Hopper backward: what is read once a row, and dQ as the array it becomes.

Both are bound by memory. Scratch is float32 by tiles of `block_m` queries: per query the logarithm
of its denominator and delta; per tile dQ in the order in which threads hold it. A block has a tile.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.pipeline import lane_index
from flashnumba.device.sequence import length
from flashnumba.device.tile import number
from flashnumba.ptx.barrier import (
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from flashnumba.ptx.shared import cvta_to_shared, ld_shared_f32
from flashnumba.ptx.tma import cp_async_bulk_load

ALL_LANES = 0xFFFFFFFF
THREADS, WARPS = 256, 8
f32, u32 = np.float32, np.uint32
LOG2_E = f32(np.log2(np.e))
STORED = {"float16": types.float16, "bfloat16": types.uint16}


@inlined
def place(parts):
    """(m_block, h, b) of this block, which has one tile of queries."""
    tiles, heads = u32(parts.shape[2]), u32(parts.shape[1])
    work = u32(cuda.blockIdx.x)
    head = u32(work // tiles)
    return work % tiles, head % heads, u32(head // heads)


@cache
def make_prepare(config):
    """delta = sum_d do o - dlse, lse in units of log 2, a warp a query; dq = 0, added by nobody.

    A query without keys, or past its sequence, gets lse = +inf: e^(s - lse) is 0 whatever s is.
    """
    BLOCK_M, D = config.block_m, config.head_dim
    TOGETHER = 256 // D  # rows in flight in a warp
    widen, _, _ = number(config.dtype)
    INF, ZERO = f32(np.inf), f32(0)

    def prepare(do, o, lse, dlse, q_lengths, rows, dq, turns):
        lane, warp, (m_block, h, b) = lane_index(), cuda.threadIdx.x // 32, place(dq)
        row0, tile, of_rows = m_block * BLOCK_M, dq[b, h, m_block], rows[b, h, m_block]
        last_row, last_column = do.shape[1] - 1, do.shape[3] - 1
        end = length(q_lengths, b, do.shape[1])
        if cuda.threadIdx.x == 0:
            turns[b, h, m_block] = 0
        total = cuda.local.array(TOGETHER, np.float32)
        for i in range(BLOCK_M * D // THREADS):
            tile[i * THREADS + cuda.threadIdx.x] = ZERO
        for i in range(warp * TOGETHER, BLOCK_M, WARPS * TOGETHER):
            for r in range(TOGETHER):
                row, total[r] = min(row0 + i + r, last_row), ZERO
                for j in range(D // 32):
                    d = min(lane + 32 * j, last_column)
                    part = widen(do[b, row, h, d]) * widen(o[b, row, h, d])
                    total[r] += part if lane + 32 * j == d else ZERO
            for distance in (1, 2, 4, 8, 16):
                for r in range(TOGETHER):
                    total[r] += cuda.shfl_xor_sync(ALL_LANES, total[r], distance)
            for r in range(TOGETHER):
                row = row0 + i + r
                if lane == r:
                    log_l, delta = INF, ZERO
                    if row < end and lse[b, h, row] != -INF:
                        log_l, delta = lse[b, h, row] * LOG2_E, total[r]
                        if dlse.shape[2] > 0:
                            delta -= dlse[b, h, row]
                    of_rows[i + r] = log_l
                    of_rows[BLOCK_M + i + r] = delta

    x = types.Array(STORED[config.dtype], 4, "A")
    r, rows = types.Array(types.float32, 3, "A"), types.Array(types.float32, 4, "C")
    n = types.Array(types.int64, 1, "A")
    turns = types.Array(types.int32, 3, "C")
    signature = types.void(x, x, r, r, n, rows, rows, turns)
    return Kernel(f"backward prepare {config}", prepare, signature, THREADS)


@cache
def make_convert(config):
    """dq = scale times what was added up.

    Of a tile, a consumer has some of the rows or some of the columns (`config.dq_columns`).
    """
    BLOCK_M, D, COLUMNS = config.block_m, config.head_dim, u32(config.dq_columns)
    ROWS, QUARTERS, BYTES = THREADS // D, u32(128 * 16 * config.consumers), u32(4 * BLOCK_M * D)
    BARRIER, ZERO, ONE = u32(BYTES), u32(0), u32(1)
    _, narrow, _ = number(config.dtype)

    def convert(parts, dq, scale):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=128))
        thread, (m_block, h, b) = u32(cuda.threadIdx.x), place(parts)
        if thread == ZERO:
            mbarrier_init(smem + BARRIER, ONE)
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(smem + BARRIER, BYTES)
            cp_async_bulk_load(smem, parts[b, h, m_block], BYTES, smem + BARRIER)
        cuda.syncthreads()
        mbarrier_wait(smem + BARRIER, ZERO)
        # A thread has one column; where its part of a row is in the fragments (device/fragment.py).
        column, row0 = thread % u32(D), thread // u32(D)
        start = u32(smem + column % COLUMNS // u32(8) * QUARTERS + column // COLUMNS * u32(2048))
        start = u32(start + column % u32(8) // u32(2) * u32(16) + column % u32(2) * u32(4))
        end = dq.shape[1] - m_block * BLOCK_M
        if column < dq.shape[3]:
            for i in range(BLOCK_M // ROWS):
                row = u32(row0 + u32(i * ROWS))
                if row < end:
                    at = row // u32(64) * u32(2048) + row % u32(64) // u32(16) * u32(512)
                    at += row % u32(8) * u32(64) + row % u32(16) // u32(8) * u32(8)
                    value = ld_shared_f32(u32(start + at))
                    dq[b, m_block * BLOCK_M + row, h, column] = narrow(value * scale)

    x = types.Array(STORED[config.dtype], 4, "A")
    signature = types.void(types.Array(types.float32, 4, "C"), x, types.float32)
    key, shared_bytes = f"backward convert {config}", int(BYTES) + 8
    return Kernel(key, convert, signature, THREADS, shared_bytes)
