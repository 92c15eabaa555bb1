"""Attention for any GPU and any dtype, without special instructions: the kernels to read first.

Beside `reference.attention_tiled` the forward reads line by line: the same m, l and accumulator, with
thread indices added. A block of lanes_m x lanes_n threads works on one tile at a time:

              lanes_n threads, cols keys each
             +-------------------------------+
    lanes_m  |  thread (ty, tx) owns         |      s (ROWS, COLS)   registers
    threads, |  rows  ty + LANES_M * i       |      acc (ROWS, ..)   registers, the same rows
    rows     |  cols  tx + LANES_N * j       |      p_smem           the tile of weights, shared
    each     +-------------------------------+

Two products of tiles do all the arithmetic. `product_nt` is a b^T (scores: q k^T, do v^T) and walks the
head dimension in chunks of D_TILE columns; `add_product` is acc += p b (p v, ds k, ...) and takes its
left factor from shared memory. The lanes_n threads of a row are neighbours in one warp, so a row's
maximum and sum are shuffles.

    forward     rows are queries; walks the keys.        s = q k^T -> m, l -> p -> acc += p v
    delta       one thread a query.                      delta = sum(do * o) - dlse
    backward    dK and dV: rows are keys; walks the queries of every head of the group, in order.
                dQ: rows are queries; walks the keys.    Nothing is added atomically: same bits always.

A block computes at most D_SLICE columns of its output; wider heads get more blocks, which compute the
scores again. So registers and shared memory are bounded for every head dimension. Numbers are float32
(float64 for float64); `exp` is natural, subtracting before it scales, so a score of finfo.min is still
plain softmax.

`index` tells the compiler that a number is not negative: that spares Numba's wrap-around code at each
access, and lets four loads fuse into one of 16 bytes (seen in SASS: 48 LDS.128 for 192 LDS).

Source: Dao et al., FlashAttention (2022), algorithms 1 and 4; Milakov and Gimelshein (2018).
"""

import math
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import register_jitable

from flashnumba.config import Kernel
from flashnumba.window import alignment, interval, tiles

for function in (alignment, interval, tiles):
    register_jitable(function)  # callable in kernels; on the host they stay plain Python


@cuda.jit(device=True, forceinline=True)
def index(x):
    """x, known to be at least 0."""
    return x & 0x7FFFFFFF


STORED = {
    "float16": types.float16,
    "bfloat16": types.uint16,  # its bits: the upper half of a float32
    "float32": types.float32,
    "float64": types.float64,
}


def kernel(name, config, function, *arguments):
    """Wrap a kernel function; arguments are "x" (B, S, H, D), "r" (B, H, S), "n" (B,), "f" or "i"."""
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


@lru_cache(maxsize=None)
def number(dtype):
    """Device functions from and to the stored dtype: (widen, narrow, the type computed in)."""
    real = np.float64 if dtype == "float64" else np.float32
    stored = np.float16 if dtype == "float16" else real

    @cuda.jit(device=True, forceinline=True)
    def widen(x):
        return real(x)

    @cuda.jit(device=True, forceinline=True)
    def narrow(x):
        return stored(x)

    @cuda.jit(device=True, forceinline=True)
    def widen_bfloat16(x):
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

    @cuda.jit(device=True, forceinline=True)
    def narrow_bfloat16(x):
        """Round to nearest, ties to even; a NaN stays one."""
        bits = np.float32(x).view(np.uint32)
        if x != x:
            return np.uint16(0x7FC0)
        return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    if dtype == "bfloat16":
        return widen_bfloat16, narrow_bfloat16, real
    return widen, narrow, real


@lru_cache(maxsize=None)
def tile(config):
    """The named operations of a tile, shared by all kernels of this file."""
    THREADS, LANES_M, LANES_N = config.threads, config.lanes_m, config.lanes_n
    ROWS, COLS, BLOCK_M, BLOCK_N = config.rows, config.cols, config.block_m, config.block_n
    D_TILE, C_TILE, D_SLICE = config.d_tile, config.c_tile, config.d_slice
    VECTOR = 16 // config.itemsize  # numbers in one 16-byte load
    OWN = min(D_SLICE // LANES_N, VECTOR)  # neighbouring output columns of a thread,
    GROUPS = D_SLICE // LANES_N // OWN  # this many times, LANES_N * OWN apart
    widen, narrow, REAL = number(config.dtype)
    ZERO = REAL(0)

    @cuda.jit(device=True, forceinline=True)
    def thread():
        """(ty, tx) of this thread in its block."""
        t = index(cuda.threadIdx.x)
        return t // LANES_N, t % LANES_N

    @cuda.jit(device=True, forceinline=True)
    def load(x_smem, x, row0, rows, col0, height, width, factor):
        """x_smem (height, width) = factor * x[row0:, col0:]; what lies outside is zero, and not read."""
        t = index(cuda.threadIdx.x)
        col = t % width
        for row in range(t // width, height, THREADS // width):
            value = ZERO
            if row0 + row < rows and col0 + col < x.shape[1]:
                value = widen(x[row0 + row, col0 + col]) * factor
            x_smem[row, col] = value

    @cuda.jit(device=True, forceinline=True)
    def product_nt(s, a, a_smem, a_row0, a_rows, a_factor, b, b_smem, b_row0, b_rows, b_factor):
        """s (ROWS, COLS) = this thread's part of (a_factor a) (b_factor b)^T, summed in order of d."""
        ty, tx = thread()
        a_frag = cuda.local.array((ROWS, VECTOR), REAL)
        b_frag = cuda.local.array((COLS, VECTOR), REAL)
        for i in range(ROWS):
            for j in range(COLS):
                s[i, j] = ZERO
        for d_chunk in range(0, a.shape[1], D_TILE):
            d0 = index(d_chunk)
            load(a_smem, a, a_row0, a_rows, d0, BLOCK_M, D_TILE, a_factor)
            load(b_smem, b, b_row0, b_rows, d0, BLOCK_N, D_TILE, b_factor)
            cuda.syncthreads()
            for d_step in range(0, D_TILE, VECTOR):
                d = index(d_step)
                for x in range(VECTOR):
                    for i in range(ROWS):
                        a_frag[i, x] = a_smem[ty + LANES_M * i, d + x]
                    for j in range(COLS):
                        b_frag[j, x] = b_smem[tx + LANES_N * j, d + x]
                for x in range(VECTOR):
                    for i in range(ROWS):
                        for j in range(COLS):
                            s[i, j] += a_frag[i, x] * b_frag[j, x]
            cuda.syncthreads()

    @cuda.jit(device=True, forceinline=True)
    def add_product(acc, p_smem, b, b_smem, row0, rows, slice0, lo, hi, MASKED):
        """acc (ROWS, GROUPS * OWN) += p b, over columns [slice0, slice0 + D_SLICE) of b.

        In a masked tile row i multiplies only rows [lo[i], hi[i]) of b: a NaN behind the mask stays there.
        """
        ty, tx = thread()
        p_frag = cuda.local.array((ROWS, VECTOR), REAL)
        b_frag = cuda.local.array((GROUPS, OWN), REAL)
        for c_chunk in range(0, BLOCK_N, C_TILE):
            c0 = index(c_chunk)
            load(b_smem, b, row0 + c0, rows, slice0, C_TILE, D_SLICE, REAL(1))
            cuda.syncthreads()
            for c_step in range(0, C_TILE, VECTOR):
                c = index(c_step)
                for y in range(VECTOR):
                    for i in range(ROWS):
                        p_frag[i, y] = p_smem[ty + LANES_M * i, c0 + c + y]
                for y in range(VECTOR):
                    for g in range(GROUPS):
                        for x in range(OWN):
                            b_frag[g, x] = b_smem[c + y, OWN * (tx + LANES_N * g) + x]
                    for i in range(ROWS):
                        if not MASKED or lo[i] <= row0 + c0 + c + y < hi[i]:
                            for g in range(GROUPS):
                                for x in range(OWN):
                                    acc[i, OWN * g + x] += p_frag[i, y] * b_frag[g, x]
            cuda.syncthreads()

    @cuda.jit(device=True, forceinline=True)
    def store(x, row0, rows, slice0, acc, factor):
        """x[row0:, slice0:] = factor[i] * acc of this thread's rows; rows past `rows` become zero."""
        ty, tx = thread()
        for i in range(ROWS):
            row = row0 + ty + LANES_M * i
            if row < x.shape[0]:
                for g in range(GROUPS):
                    for y in range(OWN):
                        col = slice0 + OWN * (tx + LANES_N * g) + y
                        if col < x.shape[1]:
                            value = factor[i] * acc[i, OWN * g + y] if row < rows else ZERO
                            x[row, col] = narrow(value)

    @cuda.jit(device=True, forceinline=True)
    def row_max(x):
        """The largest x of the LANES_N threads that share a row."""
        lane = LANES_N // 2
        while lane > 0:
            x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, lane))
            lane //= 2
        return x

    @cuda.jit(device=True, forceinline=True)
    def row_sum(x):
        """The sum of x over the LANES_N threads that share a row."""
        lane = LANES_N // 2
        while lane > 0:
            x += cuda.shfl_xor_sync(0xFFFFFFFF, x, lane)
            lane //= 2
        return x

    @cuda.jit(device=True, forceinline=True)
    def length(lengths, b, seqlen):
        """Rows of batch entry b that count; an empty `lengths` says all. Device values are not trusted."""
        if lengths.shape[0] == 0:
            return seqlen
        return min(max(lengths[b], 0), seqlen)

    @cuda.jit(device=True, forceinline=True)
    def coordinates(blocks, slices, heads):
        """(block, slice, h, b) of this thread block; neighbours share a head, so its keys stay in L2."""
        rest = index(cuda.blockIdx.x)
        block = rest % blocks
        rest //= blocks
        part = rest % slices
        rest //= slices
        return block, part, rest % heads, rest // heads

    return SimpleNamespace(
        thread=thread,
        product_nt=product_nt,
        add_product=add_product,
        store=store,
        row_max=row_max,
        row_sum=row_sum,
        length=length,
        coordinates=coordinates,
    )


@lru_cache(maxsize=None)
def make_forward(config):
    """o and lse, by the online recurrence over key tiles."""
    LANES_M, LANES_N, BLOCK_M, BLOCK_N = config.lanes_m, config.lanes_n, config.block_m, config.block_n
    ROWS, COLS, C_TILE, D_SLICE = config.rows, config.cols, config.c_tile, config.d_slice
    PITCH, P_PITCH = config.pitch(config.d_tile), config.pitch(BLOCK_N)
    OUT = D_SLICE // LANES_N
    REAL = number(config.dtype)[2]
    ZERO, ONE, MINUS_INF = REAL(0), REAL(1), REAL(-np.inf)
    op = tile(config)
    thread, coordinates, length, row_max, row_sum = (
        op.thread, op.coordinates, op.length, op.row_max, op.row_sum
    )
    product_nt, add_product, store = op.product_nt, op.add_product, op.store

    def forward(q, k, v, o, lse, q_lengths, kv_lengths, scale, left, right, upper_left):
        q_smem = cuda.shared.array((BLOCK_M, PITCH), REAL, alignment=16)
        k_smem = cuda.shared.array((BLOCK_N, PITCH), REAL, alignment=16)
        v_smem = cuda.shared.array((C_TILE, D_SLICE), REAL, alignment=16)
        p_smem = cuda.shared.array((BLOCK_M, P_PITCH), REAL, alignment=16)
        s = cuda.local.array((ROWS, COLS), REAL)
        acc = cuda.local.array((ROWS, OUT), REAL)
        m = cuda.local.array(ROWS, REAL)
        l = cuda.local.array(ROWS, REAL)
        lo = cuda.local.array(ROWS, np.int64)
        hi = cuda.local.array(ROWS, np.int64)

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
            add_product(
                acc, p_smem, v_h, v_smem, kv_row0, kv_length, part * D_SLICE, lo, hi, MASKED
            )

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

    return kernel("forward", config, forward, *"xxxxrnnfiii")


@lru_cache(maxsize=None)
def make_delta(config):
    """delta = sum_d do * o - dlse, one thread a query.

    Summed in order of d, like the product do v^T: where one key has all the weight, o is v, and
    dp - delta is exactly 0 (a softmax over one key is constant).
    """
    THREADS = config.threads
    widen, _, REAL = number(config.dtype)
    ZERO = REAL(0)

    def delta(do, o, dlse, out):
        query = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        row = query % do.shape[1]
        h = query // do.shape[1] % do.shape[2]
        b = query // do.shape[1] // do.shape[2]
        if b < do.shape[0]:
            total = ZERO
            for d in range(do.shape[3]):
                total += widen(do[b, row, h, d]) * widen(o[b, row, h, d])
            if dlse.shape[2] > 0:
                total -= dlse[b, h, row]
            out[b, h, row] = total

    return kernel("delta", config, delta, *"xxrr")


@lru_cache(maxsize=None)
def make_backward_dkdv(config):
    """dK and dV: one block owns a tile of keys and walks the queries that see them, head by head.

    Rows are keys and columns queries here, so every tile is the transpose of the forward's.
    """
    LANES_M, LANES_N, BLOCK_M, BLOCK_N = config.lanes_m, config.lanes_n, config.block_m, config.block_n
    ROWS, COLS, C_TILE, D_SLICE = config.rows, config.cols, config.c_tile, config.d_slice
    PITCH, P_PITCH = config.pitch(config.d_tile), config.pitch(BLOCK_N)
    OUT = D_SLICE // LANES_N
    REAL = number(config.dtype)[2]
    ZERO, ONE, MINUS_INF = REAL(0), REAL(1), REAL(-np.inf)
    op = tile(config)
    thread, coordinates, length = op.thread, op.coordinates, op.length
    product_nt, add_product, store = op.product_nt, op.add_product, op.store

    def backward_dkdv(
        do, q, k, v, lse, delta, dk, dv, q_lengths, kv_lengths, scale, left, right, upper_left
    ):
        a_smem = cuda.shared.array((BLOCK_M, PITCH), REAL, alignment=16)
        b_smem = cuda.shared.array((BLOCK_N, PITCH), REAL, alignment=16)
        c_smem = cuda.shared.array((C_TILE, D_SLICE), REAL, alignment=16)
        p_smem = cuda.shared.array((BLOCK_M, P_PITCH), REAL, alignment=16)
        s = cuda.local.array((ROWS, COLS), REAL)
        dp = cuda.local.array((ROWS, COLS), REAL)
        dk_acc = cuda.local.array((ROWS, OUT), REAL)
        dv_acc = cuda.local.array((ROWS, OUT), REAL)
        factor = cuda.local.array(ROWS, REAL)
        lo = cuda.local.array(ROWS, np.int64)
        hi = cuda.local.array(ROWS, np.int64)

        ty, tx = thread()
        n_blocks = (k.shape[1] + BLOCK_M - 1) // BLOCK_M
        slices = (max(k.shape[3], v.shape[3]) + D_SLICE - 1) // D_SLICE
        n_block, part, kv_head, b = coordinates(n_blocks, slices, k.shape[2])
        kv_row0 = index(n_block * BLOCK_M)
        slice0 = part * D_SLICE
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
                add_product(
                    dv_acc, p_smem, do_h, c_smem, q_row0, q_length, slice0, lo, hi, MASKED
                )
            for i in range(ROWS):
                for j in range(COLS):
                    p_smem[ty + LANES_M * i, tx + LANES_N * j] = dp[i, j]
            if slice0 < k.shape[3]:
                add_product(dk_acc, p_smem, q_h, c_smem, q_row0, q_length, slice0, lo, hi, MASKED)

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

    return kernel("backward_dkdv", config, backward_dkdv, *"xxxxrrxxnnfiii")


@lru_cache(maxsize=None)
def make_backward_dq(config):
    """dQ: one block owns a tile of queries and walks its keys, as in the forward."""
    LANES_M, LANES_N, BLOCK_M, BLOCK_N = config.lanes_m, config.lanes_n, config.block_m, config.block_n
    ROWS, COLS, C_TILE, D_SLICE = config.rows, config.cols, config.c_tile, config.d_slice
    PITCH, P_PITCH = config.pitch(config.d_tile), config.pitch(BLOCK_N)
    OUT = D_SLICE // LANES_N
    REAL = number(config.dtype)[2]
    ZERO, ONE, MINUS_INF = REAL(0), REAL(1), REAL(-np.inf)
    op = tile(config)
    thread, coordinates, length = op.thread, op.coordinates, op.length
    product_nt, add_product, store = op.product_nt, op.add_product, op.store

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
        lse_frag = cuda.local.array(ROWS, REAL)
        delta_frag = cuda.local.array(ROWS, REAL)
        lo = cuda.local.array(ROWS, np.int64)
        hi = cuda.local.array(ROWS, np.int64)

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
            add_product(
                acc, ds_smem, k_h, c_smem, kv_row0, kv_length, part * D_SLICE, lo, hi, MASKED
            )

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

    return kernel("backward_dq", config, backward_dq, *"xxxxrrxnnfiii")
