"""Before and after the backward of backward_mma.py: what backward_passes.py does, on any GPU.

Scratch is laid out as there: per tile of `block_m` queries the logarithms of their denominators and
then delta, and dQ in the order in which threads hold it, float32. A block has one tile.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.copy import warp_store
from flashnumba.device.fragment import fragment_to_shared
from flashnumba.device.product import products
from flashnumba.device.sequence import length
from flashnumba.device.tile import number
from flashnumba.kernels.backward_passes import LOG2_E, place
from flashnumba.ptx.memory import ld_global_row, ld_global_v4_f32
from flashnumba.ptx.shared import cvta_to_shared
from flashnumba.ptx.thread import cvt_f32_f16

ALL_LANES = 0xFFFFFFFF
THREADS = 256
f32, i32, u32 = np.float32, np.int32, np.uint32


@cache
def make_prepare(config):
    """delta = sum_d do o - dlse; lse in units of log 2; dq = 0, and nobody has added to it.

    Eight threads share a query. One without keys, or past its sequence, gets lse = +inf.
    """
    ITEM, HALVES = config.itemsize, config.itemsize == 2
    BLOCK_M, PARTS, ROWS = config.block_m, -(-config.head_dim * ITEM // 128), THREADS // 8
    WORDS = 4 * PARTS
    ZERO, INF = f32(0), f32(np.inf)
    load_row = ld_global_row(PARTS)
    widen = cvt_f32_f16 if config.dtype == "float16" else number("bfloat16")[0]  # of the lower half

    @inlined
    def product(do, o, row, inside):
        """This thread's part of sum_d do o."""
        total, part = ZERO, i32(u32(cuda.threadIdx.x) & u32(7))
        x, y = cuda.local.array(WORDS, np.uint32), cuda.local.array(WORDS, np.uint32)
        first, size = i32(16 // ITEM) * part, u32(16) if inside else u32(0)
        width = i32((do.shape[1] - first) * ITEM)
        load_row(x, do[:, first:], row, i32(do.strides[0]), size, width)
        load_row(y, o[:, first:], row, i32(o.strides[0]), size, width)
        for i in range(WORDS):
            if HALVES:
                total += widen(x[i]) * widen(y[i])
                total += widen(x[i] >> u32(16)) * widen(y[i] >> u32(16))
            else:
                total += x[i].view(np.float32) * y[i].view(np.float32)
        for distance in (1, 2, 4):
            total += cuda.shfl_xor_sync(ALL_LANES, total, distance)
        return total

    def prepare(do, o, lse, dlse, q_lengths, rows, dq, turns):
        m_block, h, b = place(dq, u32(cuda.blockIdx.x))
        thread = u32(cuda.threadIdx.x)
        q_length = i32(length(q_lengths, b, lse.shape[2]))
        if thread == 0:
            turns[b, h, m_block] = 0
        tile = dq[b, h, m_block]
        for i in range(thread, u32(tile.shape[0]), u32(THREADS)):
            tile[i] = ZERO
        for row0 in range(0, BLOCK_M, ROWS):
            row = u32(row0) + (thread >> u32(3))
            query = i32(m_block * u32(BLOCK_M) + row)
            inside = row < u32(BLOCK_M) and query < q_length
            delta = product(do[b, :, h], o[b, :, h], query, inside)
            seen = inside and lse[b, h, query] != -INF
            if seen and dlse.shape[2] > 0:
                delta -= dlse[b, h, query]
            if thread & u32(7) == u32(0) and row < u32(BLOCK_M):
                rows[b, h, m_block, row] = lse[b, h, query] * LOG2_E if seen else INF
                rows[b, h, m_block, u32(BLOCK_M) + row] = delta if seen else ZERO

    x = types.Array(types.uint16 if HALVES else types.float32, 4, "A")
    r = types.Array(types.float32, 3, "A")
    n, rows = types.Array(types.int64, 1, "A"), types.Array(types.float32, 4, "C")
    signature = types.void(x, x, r, r, n, rows, rows, types.Array(types.int32, 3, "C"))
    return Kernel(f"mma backward prepare {config}", prepare, signature, THREADS)


@cache
def make_convert(config):
    """dq = scale times what was added up; a warp has the part of a tile that it computed."""
    BLOCK_M, THREADS, ITEM = config.block_m, config.threads, config.itemsize
    FACTOR, SUBTILE = f32(products(config).ss_factor), 128 // ITEM
    (TILES, COLUMNS, PASSES), SPLIT, HOPPER = config.dq_tile, config.dq_queries, config.hopper
    SIZE, STEP = TILES * COLUMNS // 2, 128 * BLOCK_M
    to_shared = fragment_to_shared(config, COLUMNS, TILES, STEP)
    store_rows = warp_store(COLUMNS, ITEM)

    def convert(parts, dq, scale):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        thread = u32(cuda.threadIdx.x)
        acc, x = cuda.local.array(SIZE, np.float32), cuda.local.array(4, np.float32)
        scale = f32(scale * FACTOR)
        m_block, h, b = place(parts, u32(cuda.blockIdx.x))
        warp, row0 = thread >> u32(5), i32(m_block * u32(BLOCK_M))
        row = warp % u32(SPLIT) * u32(16 * TILES)
        for part in range(PASSES):
            if HOPPER:
                for i in range(SIZE // 4):
                    four = u32(thread + u32(THREADS) * u32(part * (SIZE // 4) + i))
                    ld_global_v4_f32(x, parts[b, h, m_block], four)
                    for j in range(4):
                        acc[4 * i + j] = x[j] * scale
            else:
                for i in range(SIZE):
                    number = thread + u32(THREADS * (SIZE * part + i))
                    acc[i] = parts[b, h, m_block, number] * scale
            column = warp // u32(SPLIT) * u32(COLUMNS * PASSES) + u32(COLUMNS * part)
            subtile, rest = column // u32(SUBTILE), column % u32(SUBTILE)
            tile = u32(smem + (row << u32(7)) + subtile * u32(STEP) + rest * u32(ITEM))
            to_shared(acc, tile)
            cuda.syncwarp()
            first = i32(column)
            own = dq[b, :, h, first : first + COLUMNS]
            store_rows(own, tile, STEP, 16 * TILES, i32(row0 + i32(row)), i32(dq.shape[1]))

    x = types.Array(types.uint16 if ITEM == 2 else types.float32, 4, "A")
    signature = types.void(types.Array(types.float32, 4, "C"), x, types.float32)
    key = f"mma backward convert {config}"
    return Kernel(key, convert, signature, THREADS, config.q_bytes)
