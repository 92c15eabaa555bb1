"""Attention for any GPU and any dtype, without special instructions: the kernels to read first.

Beside `reference.attention_tiled` the forward reads line by line: the same m, l and u (here acc),
with thread indices added. A block of lanes_m x lanes_n threads works on one tile at a time:

              lanes_n threads, COLS keys each
             +-------------------------------+
    lanes_m  |  thread (ty, tx) owns         |      s (ROWS, COLS)    registers
    threads, |  rows  ty + LANES_M * i       |      acc (ROWS, OUT)   registers, the same rows
    ROWS     |  cols  tx + LANES_N * j       |      p_smem            the tile of weights, shared
    each     +-------------------------------+

Two products of tiles do all the arithmetic (device/tile.py). `product_nt` is a b^T: q k^T, do v^T.
`product_nn` is p b: p v, ds k, and so on; its left factor comes from shared memory. Each starts and
ends with a barrier, so what a kernel writes to p_smem in between is seen by all. The threads of a
row are neighbours in one warp: its maximum and sum are shuffles.

    forward     rows are queries, walks the keys:      s = q k^T -> m, l -> p -> acc + p v
    delta       one thread a query:                    delta = sum(do * o) - dlse
    backward    dK, dV: rows are keys, walks the queries of every head of the group, in order;
                dQ: rows are queries, walks the keys.  No atomics: the same bits every time.

A block computes at most D_SLICE columns of its output; a wider head gets more blocks, which compute
its scores again. So registers and shared memory are bounded for every head dimension. Numbers are
float32 (float64 for float64). `exp` is natural and follows the subtraction, so that even scores of
finfo.min are plain softmax.

Source: Dao et al., FlashAttention (2022), algorithms 1 and 4; Milakov and Gimelshein (2018).
"""

import math
from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device.sequence import alignment, interval, length, tiles
from flashnumba.device.tile import index, number, products, tile

STORED = {
    "float16": types.float16,
    "bfloat16": types.uint16,  # its bits: the upper half of a float32
    "float32": types.float32,
    "float64": types.float64,
}


def kernel(name, config, function, arguments):
    """Wrap a kernel function; a letter an argument: x (B, S, H, D), r (B, H, S), n (B,), f, i."""
    real = types.float64 if config.dtype == "float64" else types.float32
    kinds = {
        "x": types.Array(STORED[config.dtype], 4, "A"),
        "r": types.Array(real, 3, "A"),
        "n": types.Array(types.int64, 1, "A"),
        "f": types.float64,
        "i": types.int64,
    }
    signature = types.void(*(kinds[a] for a in arguments))
    return Kernel(f"simt {name} {config}", function, signature, config.threads)


@cache
def make_forward(config):
    """o and lse, by the online recurrence over key tiles."""
    LANES_M, ROWS, BLOCK_M = config.lanes_m, config.rows, config.block_m
    LANES_N, COLS, BLOCK_N = config.lanes_n, config.cols, config.block_n
    C_TILE, D_SLICE, OUT = config.c_tile, config.d_slice, config.d_slice // config.lanes_n
    PITCH, P_PITCH = config.pitch(config.d_tile), config.pitch(config.block_n)
    REAL = number(config.dtype)[2]
    ZERO, ONE, MINUS_INF = REAL(0), REAL(1), REAL(-np.inf)
    op = tile(config)
    thread, coordinates, store = op.thread, op.coordinates, op.store
    product_nt, product_nn = products(config)
    row_max, row_sum = op.row_max, op.row_sum

    def forward(q, k, v, o, lse, q_lengths, kv_lengths, scale, left, right, upper_left):
        q_smem = cuda.shared.array((BLOCK_M, PITCH), REAL, alignment=16)
        k_smem = cuda.shared.array((BLOCK_N, PITCH), REAL, alignment=16)
        v_smem = cuda.shared.array((C_TILE, D_SLICE), REAL, alignment=16)
        p_smem = cuda.shared.array((BLOCK_M, P_PITCH), REAL, alignment=16)
        s = cuda.local.array((ROWS, COLS), REAL)
        acc = cuda.local.array((ROWS, OUT), REAL)
        pv = cuda.local.array((ROWS, OUT), REAL)
        m = cuda.local.array(ROWS, REAL)
        l = cuda.local.array(ROWS, REAL)
        lo = cuda.local.array(ROWS, np.int32)
        hi = cuda.local.array(ROWS, np.int32)

        ty, tx = thread()
        m_blocks = (q.shape[1] + BLOCK_M - 1) // BLOCK_M
        slices = (v.shape[3] + D_SLICE - 1) // D_SLICE
        m_block, part, h, b = coordinates(m_blocks, slices, q.shape[2])
        q_row0 = index((m_blocks - 1 - m_block) * BLOCK_M)  # causal: the longest rows first
        kv_head = h // (q.shape[2] // k.shape[2])
        q_h, k_h, v_h = q[b, :, h], k[b, :, kv_head], v[b, :, kv_head]
        q_length = length(q_lengths, b, q.shape[1])
        kv_length = length(kv_lengths, b, k.shape[1])
        offset = alignment(q_length, kv_length, upper_left)
        for i in range(ROWS):
            m[i] = MINUS_INF
            l[i] = ZERO
            lo[i], hi[i] = interval(q_row0 + ty + LANES_M * i, offset, left, right, kv_length)
            for x in range(OUT):
                acc[i, x] = ZERO

        def step(n_block, MASKED):
            kv_row0 = index(n_block * BLOCK_N)
            # s = scale q k^T
            product_nt(
                s, q_h, q_smem, q_row0, q_length, REAL(scale), k_h, k_smem, kv_row0, kv_length, ONE
            )
            for i in range(ROWS):
                # m' = max(m, max s); a = e^(m - m'); a row that has seen no key keeps m = -inf
                m_new = m[i]
                for j in range(COLS):
                    if MASKED and not lo[i] <= kv_row0 + tx + LANES_N * j < hi[i]:
                        s[i, j] = MINUS_INF
                    m_new = max(m_new, s[i, j])
                m_new = row_max(m_new)
                m_safe = m_new if m_new != MINUS_INF else ZERO
                a = math.exp(m[i] - m_safe)
                # p = e^(s - m'); l' = a l + sum p; acc' = a acc + p v: *both* are rescaled
                p_sum = ZERO
                for j in range(COLS):
                    p = math.exp(s[i, j] - m_safe)
                    p_smem[ty + LANES_M * i, tx + LANES_N * j] = p
                    p_sum += p
                l[i] = a * l[i] + row_sum(p_sum)
                for x in range(OUT):
                    acc[i, x] *= a
                m[i] = m_new
            product_nn(pv, p_smem, v_h, v_smem, kv_row0, kv_length, part * D_SLICE, lo, hi, MASKED)
            for i in range(ROWS):
                for x in range(OUT):
                    acc[i, x] += pv[i, x]

        last = min(q_row0 + BLOCK_M, q_length) - 1
        begin, full_begin, full_end, end = tiles(
            q_row0, last, offset, left, right, kv_length, BLOCK_N
        )
        for n_block in range(begin, end):
            if full_begin <= n_block < full_end:
                step(n_block, False)
            else:
                step(n_block, True)

        # o = acc / l; lse = m + log l; nothing seen: 0 and -inf
        for i in range(ROWS):
            row = q_row0 + ty + LANES_M * i
            seen = row < q_length and l[i] != ZERO
            if part == 0 and tx == 0 and row < q.shape[1]:
                lse[b, h, row] = m[i] + math.log(l[i]) if seen else MINUS_INF
            l[i] = ONE / l[i] if seen else ZERO
        store(o[b, :, h], q_row0, q_length, part * D_SLICE, acc, l)

    return kernel("forward", config, forward, "xxxxrnnfiii")


@cache
def make_delta(config):
    """delta = sum_d do * o - dlse, one thread a query.

    Summed in chunks of D_TILE, like the product do v^T: where one key has all the weight, o is v,
    and dp - delta is exactly 0 (a softmax over one key is constant).
    """
    THREADS, D_TILE = config.threads, config.d_tile
    widen, _, REAL = number(config.dtype)
    ZERO = REAL(0)

    def delta(do, o, dlse, out):
        query = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        row = query % do.shape[1]
        h = query // do.shape[1] % do.shape[2]
        b = query // do.shape[1] // do.shape[2]
        if b < do.shape[0]:
            total = ZERO
            for d0 in range(0, do.shape[3], D_TILE):
                part = ZERO
                for d in range(d0, min(d0 + D_TILE, do.shape[3])):
                    part += widen(do[b, row, h, d]) * widen(o[b, row, h, d])
                total += part
            if dlse.shape[2] > 0:
                total -= dlse[b, h, row]
            out[b, h, row] = total

    return kernel("delta", config, delta, "xxrr")


@cache
def make_backward_dkdv(config):
    """dK and dV: one block owns a tile of keys and walks the queries that see them, head by head.

    Rows are keys and columns queries here, so every tile is the transpose of the forward's.
    """
    LANES_M, ROWS, BLOCK_M = config.lanes_m, config.rows, config.block_m
    LANES_N, COLS, BLOCK_N = config.lanes_n, config.cols, config.block_n
    C_TILE, D_SLICE, OUT = config.c_tile, config.d_slice, config.d_slice // config.lanes_n
    PITCH, P_PITCH = config.pitch(config.d_tile), config.pitch(config.block_n)
    REAL = number(config.dtype)[2]
    ZERO, ONE, MINUS_INF = REAL(0), REAL(1), REAL(-np.inf)
    op = tile(config)
    thread, coordinates, store = op.thread, op.coordinates, op.store
    product_nt, product_nn = products(config)

    def backward_dkdv(
        do, q, k, v, lse, delta, dk, dv, q_lengths, kv_lengths, scale, left, right, upper_left
    ):
        a_smem = cuda.shared.array((BLOCK_M, PITCH), REAL, alignment=16)
        b_smem = cuda.shared.array((BLOCK_N, PITCH), REAL, alignment=16)
        c_smem = cuda.shared.array((C_TILE, D_SLICE), REAL, alignment=16)
        p_smem = cuda.shared.array((BLOCK_M, P_PITCH), REAL, alignment=16)
        s = cuda.local.array((ROWS, COLS), REAL)
        dp = cuda.local.array((ROWS, COLS), REAL)
        part = cuda.local.array((ROWS, OUT), REAL)
        dk_acc = cuda.local.array((ROWS, OUT), REAL)
        dv_acc = cuda.local.array((ROWS, OUT), REAL)
        factor = cuda.local.array(ROWS, REAL)
        lo = cuda.local.array(ROWS, np.int32)
        hi = cuda.local.array(ROWS, np.int32)

        ty, tx = thread()
        n_blocks = (k.shape[1] + BLOCK_M - 1) // BLOCK_M
        slices = (max(k.shape[3], v.shape[3]) + D_SLICE - 1) // D_SLICE
        n_block, slice_, kv_head, b = coordinates(n_blocks, slices, k.shape[2])
        kv_row0 = index(n_block * BLOCK_M)
        slice0 = slice_ * D_SLICE
        group = q.shape[2] // k.shape[2]
        k_h, v_h = k[b, :, kv_head], v[b, :, kv_head]
        q_length = length(q_lengths, b, q.shape[1])
        kv_length = length(kv_lengths, b, k.shape[1])
        offset = alignment(q_length, kv_length, upper_left)
        for i in range(ROWS):
            kv_idx = kv_row0 + ty + LANES_M * i
            lo[i], hi[i] = interval(kv_idx, -offset, right, left, q_length)
            for x in range(OUT):
                dk_acc[i, x] = ZERO
                dv_acc[i, x] = ZERO

        def step(h, m_block, MASKED):
            q_h, do_h = q[b, :, h], do[b, :, h]
            q_row0 = index(m_block * BLOCK_N)
            # s^T = k (scale q)^T; dp^T = v do^T
            product_nt(
                s, k_h, a_smem, kv_row0, kv_length, ONE, q_h, b_smem, q_row0, q_length, REAL(scale)
            )
            product_nt(
                dp, v_h, a_smem, kv_row0, kv_length, ONE, do_h, b_smem, q_row0, q_length, ONE
            )
            for j in range(COLS):
                q_idx = q_row0 + tx + LANES_N * j
                lse_j, delta_j = MINUS_INF, ZERO
                if q_idx < q_length:
                    lse_j, delta_j = lse[b, h, q_idx], delta[b, h, q_idx]
                for i in range(ROWS):
                    # p = e^(s - lse); ds = p (dp - delta)
                    seen = lse_j != MINUS_INF and (not MASKED or lo[i] <= q_idx < hi[i])
                    s[i, j] = math.exp(s[i, j] - lse_j) if seen else ZERO
                    dp[i, j] = s[i, j] * (dp[i, j] - delta_j) if seen else ZERO
                    p_smem[ty + LANES_M * i, tx + LANES_N * j] = s[i, j]
            # dv += p^T do; dk += ds^T q
            if slice0 < v.shape[3]:
                product_nn(part, p_smem, do_h, c_smem, q_row0, q_length, slice0, lo, hi, MASKED)
                for i in range(ROWS):
                    for x in range(OUT):
                        dv_acc[i, x] += part[i, x]
            for i in range(ROWS):
                for j in range(COLS):
                    p_smem[ty + LANES_M * i, tx + LANES_N * j] = dp[i, j]
            if slice0 < k.shape[3]:
                product_nn(part, p_smem, q_h, c_smem, q_row0, q_length, slice0, lo, hi, MASKED)
                for i in range(ROWS):
                    for x in range(OUT):
                        dk_acc[i, x] += part[i, x]

        last = min(kv_row0 + BLOCK_M, kv_length) - 1
        begin, full_begin, full_end, end = tiles(
            kv_row0, last, -offset, right, left, q_length, BLOCK_N
        )
        for h in range(kv_head * group, kv_head * group + group):
            for m_block in range(begin, end):
                if full_begin <= m_block < full_end:
                    step(h, m_block, False)
                else:
                    step(h, m_block, True)

        for i in range(ROWS):
            factor[i] = ONE
        store(dv[b, :, kv_head], kv_row0, kv_length, slice0, dv_acc, factor)
        for i in range(ROWS):
            factor[i] = REAL(scale)
        store(dk[b, :, kv_head], kv_row0, kv_length, slice0, dk_acc, factor)

    return kernel("backward_dkdv", config, backward_dkdv, "xxxxrrxxnnfiii")


@cache
def make_backward_dq(config):
    """dQ: one block owns a tile of queries and walks its keys, as in the forward."""
    LANES_M, ROWS, BLOCK_M = config.lanes_m, config.rows, config.block_m
    LANES_N, COLS, BLOCK_N = config.lanes_n, config.cols, config.block_n
    C_TILE, D_SLICE, OUT = config.c_tile, config.d_slice, config.d_slice // config.lanes_n
    PITCH, P_PITCH = config.pitch(config.d_tile), config.pitch(config.block_n)
    REAL = number(config.dtype)[2]
    ZERO, ONE, MINUS_INF = REAL(0), REAL(1), REAL(-np.inf)
    op = tile(config)
    thread, coordinates, store = op.thread, op.coordinates, op.store
    product_nt, product_nn = products(config)

    def backward_dq(
        do, q, k, v, lse, delta, dq, q_lengths, kv_lengths, scale, left, right, upper_left
    ):
        a_smem = cuda.shared.array((BLOCK_M, PITCH), REAL, alignment=16)
        b_smem = cuda.shared.array((BLOCK_N, PITCH), REAL, alignment=16)
        c_smem = cuda.shared.array((C_TILE, D_SLICE), REAL, alignment=16)
        ds_smem = cuda.shared.array((BLOCK_M, P_PITCH), REAL, alignment=16)
        s = cuda.local.array((ROWS, COLS), REAL)
        dp = cuda.local.array((ROWS, COLS), REAL)
        acc = cuda.local.array((ROWS, OUT), REAL)
        dsk = cuda.local.array((ROWS, OUT), REAL)
        lse_frag = cuda.local.array(ROWS, REAL)
        delta_frag = cuda.local.array(ROWS, REAL)
        lo = cuda.local.array(ROWS, np.int32)
        hi = cuda.local.array(ROWS, np.int32)

        ty, tx = thread()
        m_blocks = (q.shape[1] + BLOCK_M - 1) // BLOCK_M
        slices = (q.shape[3] + D_SLICE - 1) // D_SLICE
        m_block, part, h, b = coordinates(m_blocks, slices, q.shape[2])
        q_row0 = index((m_blocks - 1 - m_block) * BLOCK_M)
        kv_head = h // (q.shape[2] // k.shape[2])
        do_h, q_h, k_h, v_h = do[b, :, h], q[b, :, h], k[b, :, kv_head], v[b, :, kv_head]
        q_length = length(q_lengths, b, q.shape[1])
        kv_length = length(kv_lengths, b, k.shape[1])
        offset = alignment(q_length, kv_length, upper_left)
        for i in range(ROWS):
            q_idx = q_row0 + ty + LANES_M * i
            lo[i], hi[i] = interval(q_idx, offset, left, right, kv_length)
            lse_frag[i], delta_frag[i] = MINUS_INF, ZERO
            if q_idx < q_length:
                lse_frag[i], delta_frag[i] = lse[b, h, q_idx], delta[b, h, q_idx]
            for x in range(OUT):
                acc[i, x] = ZERO

        def step(n_block, MASKED):
            kv_row0 = index(n_block * BLOCK_N)
            # s = (scale q) k^T; dp = do v^T
            product_nt(
                s, q_h, a_smem, q_row0, q_length, REAL(scale), k_h, b_smem, kv_row0, kv_length, ONE
            )
            product_nt(
                dp, do_h, a_smem, q_row0, q_length, ONE, v_h, b_smem, kv_row0, kv_length, ONE
            )
            for i in range(ROWS):
                for j in range(COLS):
                    # p = e^(s - lse); ds = p (dp - delta)
                    kv_idx = kv_row0 + tx + LANES_N * j
                    seen = lse_frag[i] != MINUS_INF and (not MASKED or lo[i] <= kv_idx < hi[i])
                    p = math.exp(s[i, j] - lse_frag[i]) if seen else ZERO
                    ds = p * (dp[i, j] - delta_frag[i]) if seen else ZERO
                    ds_smem[ty + LANES_M * i, tx + LANES_N * j] = ds
            # dq += ds k
            product_nn(
                dsk, ds_smem, k_h, c_smem, kv_row0, kv_length, part * D_SLICE, lo, hi, MASKED
            )
            for i in range(ROWS):
                for x in range(OUT):
                    acc[i, x] += dsk[i, x]

        last = min(q_row0 + BLOCK_M, q_length) - 1
        begin, full_begin, full_end, end = tiles(
            q_row0, last, offset, left, right, kv_length, BLOCK_N
        )
        for n_block in range(begin, end):
            if full_begin <= n_block < full_end:
                step(n_block, False)
            else:
                step(n_block, True)

        for i in range(ROWS):
            lse_frag[i] = REAL(scale)
        store(dq[b, :, h], q_row0, q_length, part * D_SLICE, acc, lse_frag)

    return kernel("backward_dq", config, backward_dq, "xxxxrrxnnfiii")
