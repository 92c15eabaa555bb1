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
from flashnumba.device.copy import copies
from flashnumba.device.sequence import length
from flashnumba.device.tile import number
from flashnumba.ptx.barrier import (
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
)
from flashnumba.ptx.layout import swizzle128
from flashnumba.ptx.shared import cvta_to_shared, ld_shared_f32, ld_shared_v4_u32
from flashnumba.ptx.thread import cvt_f32_f16
from flashnumba.ptx.tma import cp_async_bulk_load

ALL_LANES = 0xFFFFFFFF
THREADS = 256
f32, i32, i64, u32 = np.float32, np.int32, np.int64, np.uint32
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
    """delta = sum_d do o - dlse; lse in units of log 2; dq = 0, and nobody has added to it.

    A query without keys, or past its sequence, gets lse = +inf: e^(s - lse) is 0 whatever s is.
    """
    BLOCK_M, D, BYTES = config.block_m, config.head_dim, config.q_bytes
    PARTS = THREADS // BLOCK_M  # threads that share a row
    BARRIER, ZERO, INF = u32(2 * BYTES), f32(0), f32(np.inf)
    see_map, load_tile, _, _ = copies(D, True)
    widen = cvt_f32_f16 if config.dtype == "float16" else number("bfloat16")[0]  # of the lower half

    def prepare(do_map, o_map, lse, dlse, q_lengths, rows, dq, turns):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        thread, (m_block, h, b) = u32(cuda.threadIdx.x), place(dq)
        row0, full = i32(m_block * BLOCK_M), smem + BARRIER
        if thread == 0:
            mbarrier_init(full, u32(2))
            fence_mbarrier_init()
            turns[b, h, m_block] = 0
        cuda.syncthreads()
        if thread < 32:
            see_map(do_map)
            see_map(o_map)
            load_tile(smem, None, do_map, full, BLOCK_M, row0, h, b)
            load_tile(smem + u32(BYTES), None, o_map, full, BLOCK_M, row0, h, b)
        tile = dq[b, h, m_block]
        for i in range(BLOCK_M * D // THREADS):
            tile[i * THREADS + thread] = ZERO
        mbarrier_wait(full, u32(0))
        row, part = thread // u32(PARTS), thread % u32(PARTS)
        x, y = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        delta, log_l = ZERO, INF
        for i in range(D // 8 // PARTS):
            column = u32(part + u32(PARTS * i))  # of 16 bytes
            at = smem + u32(swizzle128(row * u32(128) | column % u32(8) * u32(16)))
            at = u32(at + column // u32(8) * u32(128 * BLOCK_M))
            ld_shared_v4_u32(x, at)
            ld_shared_v4_u32(y, u32(at + u32(BYTES)))
            for j in range(4):
                delta += widen(x[j]) * widen(y[j])
                delta += widen(x[j] >> u32(16)) * widen(y[j] >> u32(16))
        delta += cuda.shfl_xor_sync(ALL_LANES, delta, 1)
        delta += cuda.shfl_xor_sync(ALL_LANES, delta, 2)
        query = i32(row0 + row)
        seen = query < length(q_lengths, b, lse.shape[2]) and lse[b, h, query] != -INF
        if seen:
            log_l = lse[b, h, query] * LOG2_E
            if dlse.shape[2] > 0:
                delta -= dlse[b, h, query]
        if part == 0:
            rows[b, h, m_block, row] = log_l
            rows[b, h, m_block, BLOCK_M + row] = delta if seen else ZERO

    r, rows = types.Array(types.float32, 3, "A"), types.Array(types.float32, 4, "C")
    n, turns = types.Array(types.int64, 1, "A"), types.Array(types.int32, 3, "C")
    signature = types.void(types.uint64, types.uint64, r, r, n, rows, rows, turns)
    key, shared_bytes = f"backward prepare {config}", 2 * BYTES + 8
    return Kernel(key, prepare, signature, THREADS, shared_bytes)


@cache
def make_convert(config):
    """dq = scale times what was added up.

    A tile's columns are those of one consumer, or of one after the other (`config.dq_columns`).
    """
    BLOCK_M, D, COLUMNS = config.block_m, config.head_dim, u32(config.dq_columns)
    ROWS, QUARTERS, BYTES = THREADS // D, u32(2048 * D // COLUMNS), u32(4 * BLOCK_M * D)
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
        row_end = u32(dq.shape[1] - i64(m_block * BLOCK_M))
        if column < u32(dq.shape[3]):
            for i in range(BLOCK_M // ROWS):
                row = u32(row0 + u32(i * ROWS))
                if row < row_end:
                    at = row // u32(64) * u32(2048) + row % u32(64) // u32(16) * u32(512)
                    at += row % u32(8) * u32(64) + row % u32(16) // u32(8) * u32(8)
                    value = ld_shared_f32(u32(start + at))
                    dq[b, m_block * BLOCK_M + row, h, column] = narrow(value * scale)

    x = types.Array(STORED[config.dtype], 4, "A")
    signature = types.void(types.Array(types.float32, 4, "C"), x, types.float32)
    key, shared_bytes = f"backward convert {config}", int(BYTES) + 8
    return Kernel(key, convert, signature, THREADS, shared_bytes)
