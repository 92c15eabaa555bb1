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
from flashnumba.device.softmax import row_sum
from flashnumba.device.tile import number

ALL_LANES = 0xFFFFFFFF
THREADS, WARPS = 256, 8
f32 = np.float32
LOG2_E = f32(np.log2(np.e))
STORED = {"float16": types.float16, "bfloat16": types.uint16}


@inlined
def place(parts):
    """(m_block, h, b) of this block, which has one tile of queries."""
    tiles, heads = np.uint32(parts.shape[2]), np.uint32(parts.shape[1])
    work = np.uint32(cuda.blockIdx.x)
    head = np.uint32(work // tiles)
    return work % tiles, head % heads, np.uint32(head // heads)


@cache
def make_prepare(config):
    """delta = sum_d do o - dlse and lse in units of log 2, a warp a query; dq = 0.

    A query without keys, or past its sequence, gets lse = +inf: e^(s - lse) is 0 whatever s is.
    """
    BLOCK_M, D = config.block_m, config.head_dim
    widen, _, _ = number(config.dtype)
    INF, ZERO = f32(np.inf), f32(0)

    def prepare(do, o, lse, dlse, q_lengths, rows, dq):
        lane, warp, (m_block, h, b) = lane_index(), cuda.threadIdx.x // 32, place(dq)
        row0, tile, of_rows = m_block * BLOCK_M, dq[b, h, m_block], rows[b, h, m_block]
        end, columns = length(q_lengths, b, do.shape[1]) - row0, do.shape[3]
        for i in range(cuda.threadIdx.x, BLOCK_M * D, THREADS):
            tile[i] = ZERO
        for i in range(warp, BLOCK_M, WARPS):
            log_l, total = INF, ZERO
            if i < end and lse[b, h, row0 + i] != -INF:
                log_l = lse[b, h, row0 + i] * LOG2_E
                for j in range(D // 32):
                    d = lane + 32 * j
                    if d < columns:
                        total += widen(do[b, row0 + i, h, d]) * widen(o[b, row0 + i, h, d])
            total = row_sum(total)
            for distance in (4, 8, 16):
                total += cuda.shfl_xor_sync(ALL_LANES, total, distance)
            if lane == 0:
                if dlse.shape[2] > 0 and log_l != INF:
                    total -= dlse[b, h, row0 + i]
                of_rows[i] = log_l
                of_rows[BLOCK_M + i] = total

    x = types.Array(STORED[config.dtype], 4, "A")
    r, rows = types.Array(types.float32, 3, "A"), types.Array(types.float32, 4, "C")
    n = types.Array(types.int64, 1, "A")
    signature = types.void(x, x, r, r, n, rows, rows)
    return Kernel(f"backward prepare {config}", prepare, signature, THREADS)


@cache
def make_convert(config):
    """dq = scale times what was added up.

    Of a tile, a consumer has some of the rows or some of the columns (`config.dq_columns`).
    """
    BLOCK_M, D, COLUMNS = config.block_m, config.head_dim, config.dq_columns
    CONSUMER_THREADS = 128 * config.consumers
    _, narrow, _ = number(config.dtype)

    def convert(parts, dq, scale):
        m_block, h, b = place(parts)
        row0, tile = m_block * BLOCK_M, parts[b, h, m_block]
        end, columns = dq.shape[1] - row0, dq.shape[3]
        for i in range(cuda.threadIdx.x, BLOCK_M * D, THREADS):
            row, column = i // D, i % D
            if row < end and column < columns:
                thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
                thread += 128 * (row // 64 + column // COLUMNS)
                quarter = column % COLUMNS // 8 * CONSUMER_THREADS + thread
                value = tile[4 * quarter + row % 16 // 8 * 2 + column % 2]
                dq[b, row0 + row, h, column] = narrow(value * scale)

    x = types.Array(STORED[config.dtype], 4, "A")
    signature = types.void(types.Array(types.float32, 4, "C"), x, types.float32)
    return Kernel(f"backward convert {config}", convert, signature, THREADS)
