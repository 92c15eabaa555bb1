"""The forward pass on tensor cores of a warp: from Turing to Blackwell.

The same m, l and acc (u) as in `reference.attention_tiled`. A block has a tile of query rows, each
of its warps 16 or 32 of them, and walks the tiles of keys that they see, from the last to the
first. All threads copy; a ring of STAGES tiles of K and V is filled ahead of those who compute:

    wait for tile n; barrier                 all warps are done with tile n - 1
    start the copy of tile n + STAGES - 1    into its place
    s = q k^T                                ldmatrix, mma.sync
    m' = max(m, max s); a = e^(m - m'); p = e^(s - m'); l' = a l + sum p
    acc = a acc + p v                        p stays in registers

A warp skips tiles that only other warps' rows see. While one warp computes its softmax another of
the same scheduler has the tensor cores: two blocks share a multiprocessor where they fit.

Source: Dao, FlashAttention-2 (2023), algorithm 1.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.copy import block_copies, wait_copies, warp_store
from flashnumba.device.fragment import fragment_to_shared, output, scores
from flashnumba.device.guard import guard
from flashnumba.device.pipeline import lane_index
from flashnumba.device.product import products
from flashnumba.device.sequence import alignment, length, place, tiles
from flashnumba.device.softmax import online_softmax, row_sum
from flashnumba.ptx.shared import (
    cvta_to_shared,
    ld_shared_u32,
    ld_shared_v4_u32,
    st_shared_u32,
)
from flashnumba.ptx.thread import lg2, opaque, rcp

ALL_LANES = 0xFFFFFFFF
i32, u32, f32 = np.int32, np.uint32, np.float32


@cache
def make_forward(config):
    """o and lse."""
    D, BLOCK_M, BLOCK_N = config.head_dim, config.block_m, config.block_n
    WARPS, TILES, STAGES = i32(config.warps), config.tiles, config.stages
    THREADS, NEGATIVE, TURING = config.threads, config.negative, config.turing
    ROWS, S_SIZE, P_SIZE = 2 * TILES, TILES * BLOCK_N // 2, TILES * BLOCK_N // 4
    ACC_SIZE, ITEM, HALVES = TILES * D // 2, config.itemsize, config.itemsize == 2
    MINUS_INF, ZERO, ONE, LN2 = f32(-np.inf), f32(0), u32(1), f32(np.log(2))
    TINY = f32(np.finfo(np.float32).tiny)  # stands for a scale of 0
    MINUS_FAR = i32(-(1 << 30))
    # Shared memory: Q, whose place O takes; K and V by slots; the tiles that the block visits and
    # those that each warp does, four numbers each; whether V was cleaned.
    KV_BYTES, SLOTS, Q_STEP = u32(config.kv_bytes), u32(STAGES), 128 * BLOCK_M
    K_AT = u32(config.q_bytes)
    V_AT = u32(K_AT + STAGES * KV_BYTES)
    VISITED = u32(V_AT + STAGES * KV_BYTES)
    BAD = u32(VISITED + 16 * (WARPS + 1))
    FOUR, EIGHT, TWELVE = u32(4), u32(8), u32(12)

    own_column, load_q, commit = block_copies(D, BLOCK_M, THREADS, TURING, ITEM)
    _, load_kv, _ = block_copies(D, BLOCK_N, THREADS, TURING, ITEM)
    wait_tile, wait_all = wait_copies(STAGES - 2, TURING), wait_copies(0, TURING)
    store_rows = warp_store(D, ITEM)
    product = products(config)
    gemm_qk = product.ss(TILES, BLOCK_N, D, BLOCK_M, BLOCK_N)
    gemm_pv = product.rs(TILES, D, BLOCK_N, BLOCK_N)
    q_lane, k_lane, v_lane = product.a_k_major, product.b_k_major, product.b_mn_major
    S_FACTOR, O_FACTOR = f32(product.ss_factor), f32(product.rs_factor)
    guards = guard(config.dtype, BLOCK_N, D, fenced=False)
    clean, restore = guards.clean, guards.restore
    softmax = online_softmax(BLOCK_N, TILES)
    mask, to_halves, _ = scores(config.dtype, BLOCK_N, TILES, TURING)
    rescale, divide, _ = output(config.dtype, D, TILES)
    to_shared = fragment_to_shared(config, D, TILES, Q_STEP)

    @inlined
    def uniform(x):
        """x, which is the same in all lanes: now ptxas knows it."""
        return i32(cuda.shfl_sync(ALL_LANES, i32(x), 0))

    @inlined
    def k_slot(smem, n):
        return u32(smem + K_AT + n % SLOTS * KV_BYTES)

    @inlined
    def v_slot(smem, n):
        return u32(smem + V_AT + n % SLOTS * KV_BYTES)

    @inlined
    def load(smem, n, n_block, begin, k, v, kv_length):
        """Tile number n of K and V; zeros where there is none, since a branch would cost more."""
        row0, end = i32(n_block * BLOCK_N), kv_length if n_block >= begin else MINUS_FAR
        load_kv(k_slot(smem, n), k, row0, end)
        load_kv(v_slot(smem, n), v, row0, end)
        commit()

    @inlined
    def find_tiles(at, row0, rows, q_length, kv_length, offset, left, right):
        """Write down which tiles of keys these rows visit: it is not worth registers."""
        last = min(i32(row0 + rows), q_length) - 1
        begin, full_begin, full_end, end = tiles(
            row0, last, offset, left, right, kv_length, BLOCK_N
        )
        if lane_index() == 0:
            st_shared_u32(at, u32(begin))
            st_shared_u32(u32(at + FOUR), u32(full_begin))
            st_shared_u32(u32(at + EIGHT), u32(full_end))
            st_shared_u32(u32(at + TWELVE), u32(end))

    @inlined
    def visits(at, n_block):
        """Of rows whose tiles are written there: (whether they visit a tile, whether masked)."""
        four = cuda.local.array(4, np.uint32)
        ld_shared_v4_u32(four, at)
        full = i32(four[1]) <= n_block < i32(four[2])
        return i32(four[0]) <= n_block < i32(four[3]), not full

    @inlined
    def clean_v(smem, n, warp):
        """What is not finite in a tile of V is kept from rows that must not see it."""
        if clean(v_slot(smem, n), warp, WARPS) and lane_index() == 0:
            st_shared_u32(u32(smem + BAD), ONE)
        cuda.syncthreads()

    @inlined
    def hide(s, row0, n_block, kv_length, offset, left, right):
        """-inf where a query does not see a key; row0 is this thread's first."""
        start = i32(n_block * BLOCK_N + i32(u32(lane_index()) << ONE & u32(6)))
        end, key = i32(kv_length - start), i32(row0 + offset - start)
        for r in range(ROWS):
            first = i32(key + 8 * r)
            mask(s, r, i32(first - left), min(i32(first + right + 1), end), MINUS_INF)

    @inlined
    def write_lse(lse, row0, q_length, m, l, inverse, scale):
        """lse = m + log l, and 1 / l; nothing seen: -inf, and 0."""
        for r in range(ROWS):
            q_idx = i32(row0 + 8 * r)
            total = row_sum(l[r])
            seen = total != ZERO and q_idx < q_length
            if u32(lane_index()) & u32(3) == u32(0) and q_idx < lse.shape[0]:
                log_m = m[r] * f32(scale * LN2) if scale > TINY else ZERO
                lse[q_idx] = log_m + lg2(total) * LN2 if seen else MINUS_INF
            inverse[r] = O_FACTOR * rcp(total) if seen else ZERO

    @inlined
    def add_bad_rows(tile, row0, v, visited, q_length, kv_length, offset, left, right):
        """O += what was kept from it, of the tiles where V is cleaned: masked, or of float32."""
        begin, end = ld_shared_u32(visited), ld_shared_u32(u32(visited + TWELVE))
        for n_block in range(i32(begin), i32(end)):
            if visits(visited, n_block)[1] or not HALVES:
                key = i32(n_block * BLOCK_N)
                while key < min(i32(n_block * BLOCK_N + BLOCK_N), kv_length):
                    row = i32(key - offset - row0)  # sees this key, as do its neighbours
                    first = max(i32(row - right), i32(0))
                    last = min(i32(row + left + 1), i32(q_length - row0), i32(16 * TILES))
                    restore(tile, D, v[key], i32(0), first, last, u32(Q_STEP))
                    key = i32(key + 1)

    def forward(q, k, v, o, lse, q_lengths, kv_lengths, scale, left, right, upper_left, group):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        warp = cuda.shfl_sync(ALL_LANES, i32(u32(cuda.threadIdx.x) >> u32(5)), 0)
        s = cuda.local.array(S_SIZE, np.float32)
        p = cuda.local.array(P_SIZE, np.uint32)
        acc = cuda.local.array(ACC_SIZE, np.float32)
        m = cuda.local.array(ROWS, np.float32)
        l = cuda.local.array(ROWS, np.float32)
        a = cuda.local.array(ROWS, np.float32)
        shift = cuda.local.array(ROWS, np.float32)

        scale = f32(scale * S_FACTOR)  # what is left out of s
        heads, seqlen_q = u32(lse.shape[1]), i32(lse.shape[2])
        m_blocks = u32((seqlen_q + BLOCK_M - 1) // BLOCK_M)
        m_block, head = place(
            u32(cuda.blockIdx.x), u32(group), u32(heads * u32(lse.shape[0])), m_blocks
        )
        h, b = head % heads, head // heads
        kv_head = h // (heads // u32(k.shape[2]))
        q_length = i32(length(q_lengths, b, seqlen_q))
        kv_length = i32(length(kv_lengths, b, i32(k.shape[1])))
        offset = alignment(q_length, kv_length, upper_left)
        row0 = i32(m_block * u32(BLOCK_M))
        own_row0 = i32(row0 + warp * (16 * TILES))
        thread_row0 = i32(own_row0 + i32(u32(lane_index()) >> u32(2)))
        visited = u32(smem + VISITED)
        own = u32(visited + u32(16) * u32(warp + 1))
        find_tiles(own, own_row0, i32(16 * TILES), q_length, kv_length, offset, left, right)
        if warp == 0:
            find_tiles(visited, row0, i32(BLOCK_M), q_length, kv_length, offset, left, right)
        if cuda.threadIdx.x == 0:
            st_shared_u32(u32(smem + BAD), u32(0))
        cuda.syncthreads()
        begin, end = ld_shared_u32(visited), ld_shared_u32(u32(visited + TWELVE))
        begin, n_block = uniform(begin), i32(uniform(end) - 1)

        column = own_column()
        k_part, v_part = k[b, :, kv_head, column:], v[b, :, kv_head, column:]
        load_q(smem, q[b, :, h, column:], row0, q_length)
        n = u32(0)
        for stage in range(STAGES - 1):
            load(smem, u32(stage), i32(n_block - stage), begin, k_part, v_part, kv_length)
        for r in range(ROWS):
            m[r], l[r], shift[r] = MINUS_INF, ZERO, ZERO
        for i in range(ACC_SIZE):
            acc[i] = ZERO
        of_q, of_k, of_v = opaque(q_lane(u32(0))), opaque(k_lane(u32(0))), opaque(v_lane(u32(0)))
        q_rows, large = u32(smem + u32(warp * (2048 * TILES)) + of_q), False

        while n_block >= begin:
            _, to_clean = visits(visited, n_block)
            sees, to_mask = visits(own, n_block)
            wait_tile()
            cuda.syncthreads()
            next_n, ahead = u32(n + u32(STAGES - 1)), i32(n_block - (STAGES - 1))
            if to_clean or not HALVES:  # an infinity times a low part of 0 would be NaN
                clean_v(smem, n, warp)
            if sees:
                gemm_qk(s, q_rows, u32(k_slot(smem, n) + of_k))
                load(smem, next_n, ahead, begin, k_part, v_part, kv_length)
                if NEGATIVE:
                    for i in range(S_SIZE):
                        s[i] = -s[i]
                if to_mask:
                    hide(s, thread_row0, n_block, kv_length, offset, left, right)
                raised, large = softmax(s, m, l, a, shift, large, scale)
                if raised:
                    rescale(acc, a)
                if HALVES:
                    to_halves(p, s)
                    gemm_pv(acc, p, u32(v_slot(smem, n) + of_v))
                else:
                    gemm_pv(acc, s, u32(v_slot(smem, n) + of_v))
            else:
                load(smem, next_n, ahead, begin, k_part, v_part, kv_length)
            n, n_block = u32(n + ONE), i32(n_block - 1)

        wait_all()
        cuda.syncthreads()
        write_lse(lse[b, h], thread_row0, q_length, m, l, a, scale)
        divide(acc, a)
        tile = u32(smem + u32(warp * (2048 * TILES)))
        to_shared(acc, tile)
        cuda.syncwarp()
        if ld_shared_u32(u32(smem + BAD)) != u32(0):
            v_h = v[b, :, kv_head]
            add_bad_rows(tile, own_row0, v_h, visited, q_length, kv_length, offset, left, right)
            cuda.syncwarp()
        store_rows(o[b, :, h], tile, Q_STEP, 16 * TILES, own_row0, seqlen_q)

    x = types.Array(types.uint16 if HALVES else types.float32, 4, "A")
    n = types.Array(types.int64, 1, "A")
    signature = types.void(
        x, x, x, x, types.Array(types.float32, 3, "A"), n, n, types.float32, types.int32,
        types.int32, types.int64, types.int32,
    )  # fmt: skip
    key = f"mma forward {config}"
    return Kernel(
        key, forward, signature, config.threads, config.shared_bytes, blocks=config.blocks
    )
