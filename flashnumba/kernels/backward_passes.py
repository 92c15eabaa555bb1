"""Before and after the Hopper backward: what is read once a row, and dQ as the array it becomes.

Both are bound by memory. Scratch is float32 by tiles of `block_m` queries: per query the logarithm
of its denominator and delta; per tile dQ in the order in which threads hold it. A block takes one
tile after another.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.copy import copies
from flashnumba.device.fragment import output
from flashnumba.device.sequence import length
from flashnumba.device.tile import number
from flashnumba.ptx.barrier import (
    fence_mbarrier_init,
    mbarrier_init,
    mbarrier_wait,
)
from flashnumba.ptx.layout import swizzle128
from flashnumba.ptx.memory import ld_global_v4_f32
from flashnumba.ptx.shared import cvta_to_shared, fence_proxy_async, ld_shared_v4_u32
from flashnumba.ptx.thread import cvt_f32_f16

ALL_LANES = 0xFFFFFFFF
THREADS = 256
f32, i32, i64, u32 = np.float32, np.int32, np.int64, np.uint32
LOG2_E = f32(np.log2(np.e))
STORED = {"float16": types.float16, "bfloat16": types.uint16}


@inlined
def place(parts, work):
    """(m_block, h, b) of a work, a tile of queries."""
    tiles, heads = u32(parts.shape[2]), u32(parts.shape[1])
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

    def prepare(do_map, o_map, lse, dlse, q_lengths, rows, dq, turns, works):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        thread, work, phase = u32(cuda.threadIdx.x), u32(cuda.blockIdx.x), u32(0)
        row, part, full = thread // u32(PARTS), thread % u32(PARTS), u32(smem + BARRIER)
        x, y = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        if thread == 0:
            mbarrier_init(full, u32(2))
            fence_mbarrier_init()
        if thread < 32:
            see_map(do_map)
            see_map(o_map)
        while work < works:
            cuda.syncthreads()  # the tile before has been read
            m_block, h, b = place(dq, work)
            row0 = i32(m_block * BLOCK_M)
            if thread < 32:
                load_tile(smem, None, do_map, full, BLOCK_M, row0, h, b)
                load_tile(smem + u32(BYTES), None, o_map, full, BLOCK_M, row0, h, b)
            if thread == 0:
                turns[b, h, m_block] = 0
            tile = dq[b, h, m_block]
            for i in range(BLOCK_M * D // THREADS):
                tile[i * THREADS + thread] = ZERO
            mbarrier_wait(full, phase)
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
            work, phase = u32(work + cuda.gridDim.x), phase ^ u32(1)

    r, rows = types.Array(types.float32, 3, "A"), types.Array(types.float32, 4, "C")
    n, turns = types.Array(types.int64, 1, "A"), types.Array(types.int32, 3, "C")
    signature = types.void(types.uint64, types.uint64, r, r, n, rows, rows, turns, types.uint32)
    key, shared_bytes = f"backward prepare {config}", 2 * BYTES + 8
    return Kernel(key, prepare, signature, THREADS, shared_bytes)


@cache
def make_convert(config):
    """dq = scale times what was added up. A thread has what a consumer's thread had, and all write
    it to shared memory as a consumer writes dk, for one bulk store."""
    BLOCK_M, D, COLUMNS = config.block_m, config.head_dim, config.dq_columns
    SIZE, SUBTILE = COLUMNS // 2, i32(128 * BLOCK_M)
    THREADS = 128 * (D // COLUMNS)  # those columns are of one consumer, or of one after the other
    _, _, to_shared = output(config.dtype, COLUMNS)
    see_map, _, store_rows, wait_stores = copies(D, True)

    def convert(parts, dq_map, seqlen, scale, works):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        thread, work = u32(cuda.threadIdx.x), u32(cuda.blockIdx.x)
        acc, x = cuda.local.array(SIZE, np.float32), cuda.local.array(4, np.float32)
        warp = thread // u32(32)
        row, column = warp % u32(4) * u32(16), warp // u32(4) * u32(COLUMNS)
        own = u32(smem + row * u32(128) + column // u32(64) * u32(SUBTILE))
        if warp == 0:
            see_map(dq_map)
        while work < works:
            m_block, h, b = place(parts, work)
            for i in range(SIZE // 4):
                ld_global_v4_f32(x, parts[b, h, m_block], u32(thread + u32(THREADS * i)))
                for j in range(4):
                    acc[4 * i + j] = x[j] * scale
            cuda.syncthreads()  # the tile before has left shared memory
            to_shared(acc, own, i32(0), i32(COLUMNS), SUBTILE)
            fence_proxy_async()
            cuda.syncthreads()
            if warp == 0:
                row0 = i32(m_block * u32(BLOCK_M))
                store_rows(
                    None, dq_map, smem, SUBTILE, i32(D), row0, seqlen, i32(0), i32(h), i32(b)
                )  # fmt: skip
                wait_stores()
            work = u32(work + cuda.gridDim.x)

    signature = types.void(
        types.Array(types.float32, 4, "C"), types.uint64, types.int32, types.float32, types.uint32
    )
    key, shared_bytes = f"backward convert {config}", 2 * BLOCK_M * D
    return Kernel(key, convert, signature, THREADS, shared_bytes)
