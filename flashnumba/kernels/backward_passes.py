"""Before and after the Hopper backward: what is read once a row, and dQ as the array it becomes.

Both are bound by memory. Scratch is float32 by tiles of `block_m` queries: per query the logarithm
of its denominator and delta; per tile dQ in the order in which threads hold it.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device.pipeline import lane_index
from flashnumba.device.sequence import length
from flashnumba.device.softmax import row_sum
from flashnumba.device.tile import number

ALL_LANES = 0xFFFFFFFF
WARPS = 8
f32 = np.float32
LOG2_E = f32(np.log2(np.e))


@cache
def make_prepare(config):
    """delta = sum_d do o - dlse and lse in units of log 2, a warp a query; dq = 0.

    A query without keys, or past its sequence, gets lse = +inf: e^(s - lse) is 0 whatever s is.
    """
    BLOCK_M, D = config.block_m, config.head_dim
    widen, _, _ = number(config.dtype)
    INF, ZERO = f32(np.inf), f32(0)

    def prepare(do, o, lse, dlse, q_lengths, rows, dq):
        lane = lane_index()
        query = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        tiles = rows.shape[2]
        row = query % (tiles * BLOCK_M)
        h = query // (tiles * BLOCK_M) % rows.shape[1]
        b = query // (tiles * BLOCK_M) // rows.shape[1]
        if b >= rows.shape[0]:
            return
        m_block, i = row // BLOCK_M, row % BLOCK_M
        for d in range(lane, D, 32):
            dq[b, h, m_block, i * D + d] = ZERO
        log_l, total = INF, ZERO
        if row < length(q_lengths, b, do.shape[1]) and lse[b, h, row] != -INF:
            for d in range(lane, do.shape[3], 32):
                total += widen(do[b, row, h, d]) * widen(o[b, row, h, d])
            log_l = lse[b, h, row] * LOG2_E
        total = row_sum(total)
        for distance in (4, 8, 16):
            total += cuda.shfl_xor_sync(ALL_LANES, total, distance)
        if lane == 0:
            if dlse.shape[2] > 0 and log_l != INF:
                total -= dlse[b, h, row]
            rows[b, h, m_block, i] = log_l
            rows[b, h, m_block, BLOCK_M + i] = total

    x = types.Array(STORED[config.dtype], 4, "A")
    r, rows = types.Array(types.float32, 3, "A"), types.Array(types.float32, 4, "C")
    n = types.Array(types.int64, 1, "A")
    signature = types.void(x, x, r, r, n, rows, rows)
    return Kernel(f"backward prepare {config}", prepare, signature, 32 * WARPS)


@cache
def make_convert(config):
    """dq = scale times what was added up, a thread four numbers of a fragment."""
    BLOCK_M, D, CONSUMERS = config.block_m, config.head_dim, config.consumers
    THREADS, QUARTERS = 128 * CONSUMERS, BLOCK_M * D // 4
    _, narrow, _ = number(config.dtype)

    def convert(parts, dq, scale):
        at = cuda.blockIdx.x * 256 + cuda.threadIdx.x
        i, tile = at % QUARTERS, at // QUARTERS
        m_block = tile % parts.shape[2]
        h, b = tile // parts.shape[2] % parts.shape[1], tile // parts.shape[2] // parts.shape[1]
        if b >= parts.shape[0]:
            return
        thread = i % THREADS
        row = m_block * BLOCK_M + thread % 128 // 32 * 16 + thread % 32 // 4
        column = thread // 128 * (D // CONSUMERS) + i // THREADS * 8 + thread % 4 * 2
        for r in range(2):
            for x in range(2):
                if row + 8 * r < dq.shape[1] and column + x < dq.shape[3]:
                    value = parts[b, h, m_block, 4 * i + 2 * r + x] * scale
                    dq[b, row + 8 * r, h, column + x] = narrow(value)

    x = types.Array(STORED[config.dtype], 4, "A")
    signature = types.void(types.Array(types.float32, 4, "C"), x, types.float32)
    return Kernel(f"backward convert {config}", convert, signature, 256)


STORED = {"float16": types.float16, "bfloat16": types.uint16}
