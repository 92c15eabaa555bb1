"""The backward pass on tensor cores of a warp: dK, dV and dQ with S and P computed again, from lse.

A block has a tile of keys and walks the tiles of queries that see them, head by head of their
group, from the last to the first. S, P, dP and dS are transposed: keys are their rows. All warps
work on each of the five products, each on a part that lets it use again what it has loaded; p and
ds go from one product to the next through shared memory.

    wait for tile n; barrier                 all warps are done with tile n - 1
    s  = k q^T                               ldmatrix, mma.sync
    start the copy of tile n + STAGES - 1
    dp = v do^T                              p = e^(s - lse) meanwhile
    ds = p (dp - delta)                      p and ds to shared memory; barrier
    dv += p do
    dq  = ds^T k                             added in global memory
    dk += ds q

delta = rowsum(do o) - dlse comes from kernels/backward_passes.py. All blocks add to dq, in float32
and in the order of fragments; there it becomes an array. If sums are to be deterministic, a block
waits for the one of the keys before it, which was started earlier.

Source: Dao, FlashAttention-2 (2023), algorithm 2.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.copy import block_copies, wait_copies, warp_store
from flashnumba.device.fragment import fragment_to_shared, scores
from flashnumba.device.guard import guard
from flashnumba.device.pipeline import lane_index
from flashnumba.device.product import products
from flashnumba.device.sequence import alignment, length, place, query_tiles
from flashnumba.ptx.memory import (
    red_global_add_f32,
    red_global_add_f32_each,
    st_release_u32,
    wait_acquire_u32,
)
from flashnumba.ptx.shared import (
    cvta_to_shared,
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_v2_f32,
    st_shared_f32,
    st_shared_u32,
)
from flashnumba.ptx.thread import ex2, opaque

ALL_LANES = 0xFFFFFFFF
i32, u32, f32 = np.int32, np.uint32, np.float32


@cache
def make_backward(config):
    """dk, dv, and dq in the order of fragments."""
    D, BLOCK_M, BLOCK_N, WARPS = config.head_dim, config.block_m, config.block_n, i32(config.warps)
    THREADS, STAGES, TURING = config.threads, config.stages, config.turing
    DETERMINISTIC, ITEM, SUBTILE = config.deterministic, config.itemsize, 128 // config.itemsize
    PRELOADED = max(1, STAGES - 1)  # tiles that are loaded ahead
    MINUS_FAR, ZERO, ONE = i32(-(1 << 30)), f32(0), u32(1)
    # A warp's part of s and dp: keys x queries; of dk and dv: keys x columns; of dq.
    S_SPLIT, S_KEYS = config.s_keys, BLOCK_N // config.s_keys
    QUERIES = BLOCK_M * S_SPLIT // config.warps
    assert QUERIES % 16 == S_KEYS % 16 == 0
    S_TILES, S_SIZE, STATS_SIZE = S_KEYS // 16, S_KEYS * QUERIES // 32, QUERIES // 4
    DKV_SPLIT, DKV_KEYS = config.dkv_keys, BLOCK_N // config.dkv_keys
    COLUMNS = D * DKV_SPLIT // config.warps
    DKV_TILES, ACC_SIZE = DKV_KEYS // 16, DKV_KEYS * COLUMNS // 32
    DQ_SPLIT, (DQ_TILES, DQ_COLUMNS, DQ_PASSES) = config.dq_queries, config.dq_tile
    DQ_SIZE = DQ_TILES * DQ_COLUMNS // 2
    DQ_PARTS = u32(THREADS * DQ_SIZE // (4 if config.hopper else 1))  # of a pass
    # Shared memory: K, V, Q and dO by slots, P, dS; lse and delta by slots; flags of keys; numbers
    # that are not worth registers.
    KV_BYTES, Q_BYTES, P_BYTES = u32(config.kv_bytes), u32(config.q_bytes), u32(config.p_bytes)
    SLOTS, STATS_BYTES = u32(STAGES), u32(8 * BLOCK_M)
    Q_STEP, KV_STEP = 128 * BLOCK_M, 128 * BLOCK_N
    V = KV_BYTES
    Q = u32(2 * KV_BYTES)
    DO = u32(Q + STAGES * Q_BYTES)
    P = u32(DO + STAGES * Q_BYTES)
    DS = u32(P + P_BYTES)
    STATS = u32(DS + P_BYTES)
    FLAGS = u32(STATS + STAGES * STATS_BYTES)
    NUMBERS = u32(FLAGS + 4 * (BLOCK_N + config.warps))
    Q_LENGTH, KV_LENGTH, OFFSET, FULL_BEGIN, FULL_END = (u32(NUMBERS + 4 * i) for i in range(5))

    tiles_of = query_tiles(BLOCK_M, BLOCK_N)
    own_column, load_q, commit = block_copies(D, BLOCK_M, THREADS, TURING, ITEM)
    _, load_kv, _ = block_copies(D, BLOCK_N, THREADS, TURING, ITEM)
    wait_tile, wait_all = wait_copies(PRELOADED - 1, TURING), wait_copies(0, TURING)
    store_rows = warp_store(COLUMNS, ITEM)
    dtype, product = config.dtype, products(config)
    gemm_s = product.ss(S_TILES, QUERIES, D, BLOCK_N, BLOCK_M)
    gemm_dkv = product.ss(DKV_TILES, COLUMNS, BLOCK_M, BLOCK_N, BLOCK_M, b_mn_major=True, add=True)
    gemm_dq = product.ss(
        DQ_TILES, DQ_COLUMNS, BLOCK_N, BLOCK_N, BLOCK_N, a_mn_major=True, b_mn_major=True
    )
    a_k_major, a_mn_major = product.a_k_major, product.a_mn_major
    b_k_major, b_mn_major = product.b_k_major, product.b_mn_major
    FACTOR = f32(product.ss_factor)  # what is left out of each product
    red = red_global_add_f32 if config.hopper else red_global_add_f32_each
    red_global_add = red(BLOCK_M * D, DQ_SIZE, THREADS)
    poison = guard(dtype, BLOCK_N, D, fenced=False).poison
    clear = guard(dtype, BLOCK_M, D, fenced=False).clear
    mask, _, _ = scores(dtype, QUERIES, S_TILES)
    p_to_shared = fragment_to_shared(config, QUERIES, S_TILES, KV_STEP, as_factor=True)
    acc_to_shared = fragment_to_shared(config, COLUMNS, DKV_TILES, KV_STEP)

    @inlined
    def field(smem, i):
        return i32(ld_shared_u32(u32(smem + i)))

    @inlined
    def masked_tile(smem, m_block):
        """Whether some query of a tile does not see some key of the block."""
        return not field(smem, FULL_BEGIN) <= m_block < field(smem, FULL_END)

    @inlined
    def slot(start, n, size):
        return u32(start + n % SLOTS * size)

    @inlined
    def at(row, column, step):
        """Where a row and a column of a tile lie; `step` bytes from one sub-tile to the next."""
        subtile, rest = column // u32(SUBTILE), column % u32(SUBTILE)
        return u32((row << u32(7)) + subtile * u32(step) + rest * u32(ITEM))

    @inlined
    def steps(h, m_block, begin, end, count):
        """A later tile of queries: the one before, after a head's first the next head's last."""
        for _ in range(count):
            m_block = i32(m_block - 1)
            if m_block < begin:
                h, m_block = i32(h + 1), i32(end - 1)
        return h, m_block

    @inlined
    def load(smem, n, count, tile, b, column, q, do, stats):
        """Tile number n of Q, dO, lse and delta; zeros where there is none."""
        inside = n < count
        h, m_block = (tile[0], tile[1]) if inside else (i32(0), i32(0))
        row0, end = i32(m_block * BLOCK_M), field(smem, Q_LENGTH) if inside else MINUS_FAR
        load_q(slot(smem + Q, n, Q_BYTES), q[b, :, h, column:], row0, end)
        load_q(slot(smem + DO, n, Q_BYTES), do[b, :, h, column:], row0, end)
        if inside:
            for i in range(i32(cuda.threadIdx.x), i32(2 * BLOCK_M), i32(THREADS)):
                at = u32(slot(smem + STATS, n, STATS_BYTES) + u32(4 * i))
                st_shared_f32(at, stats[b, h, m_block, i])
        commit()

    @inlined
    def protect(smem, warp, n, poisoned):
        """K from queries that must not see it; Q and dO that see no key from all keys."""
        if n == u32(0):
            poison(smem, u32(smem + FLAGS), i32(warp), WARPS)
        stats = slot(smem + STATS, n, STATS_BYTES)
        if i32(warp) == 0:
            clear(slot(smem + Q, n, Q_BYTES), stats)
        if i32(warp) == WARPS - 1:
            clear(slot(smem + DO, n, Q_BYTES), stats)
        cuda.syncthreads()
        if n == u32(0):
            for i in range(WARPS):
                flag = ld_shared_u32(u32(smem + FLAGS + u32(4 * (BLOCK_N + i))))
                poisoned = poisoned or flag != u32(0)
        return poisoned

    @inlined
    def read_stats(smem, n, query0, part, x):
        """Of this thread's queries: lse, or delta where `part` is 1."""
        pair = cuda.local.array(2, np.float32)
        lane = u32(lane_index()) & u32(3)
        start = u32(slot(smem + STATS, n, STATS_BYTES) + u32(4 * BLOCK_M * part) + lane * u32(8))
        for j in range(QUERIES // 8):
            ld_shared_v2_f32(pair, u32(start + query0 * u32(4) + u32(32 * j)))
            x[2 * j], x[2 * j + 1] = pair[0], pair[1]

    @inlined
    def probabilities(s, lse, scale_log2):
        """s becomes p = e^(s - lse)."""
        for j in range(QUERIES // 8):
            for r in range(2 * S_TILES):
                for x in range(2):
                    i = r // 2 * (QUERIES // 2) + 4 * j + r % 2 * 2 + x
                    s[i] = ex2(s[i] * scale_log2 - lse[2 * j + x])

    @inlined
    def score_gradients(dp, p, delta):
        """dp becomes ds = p (dp - delta)."""
        for j in range(QUERIES // 8):
            for r in range(2 * S_TILES):
                for x in range(2):
                    i = r // 2 * (QUERIES // 2) + 4 * j + r % 2 * 2 + x
                    dp[i] = p[i] * (FACTOR * dp[i] - delta[2 * j + x])

    @inlined
    def add_poison(smem, key0, s):
        """Scores of keys that are not finite become NaN."""
        row = u32(key0 + (u32(lane_index()) >> u32(2)))
        for r in range(2 * S_TILES):
            bad = ld_shared_f32(u32(smem + FLAGS + u32(4) * (row + u32(8 * r))))
            for j in range(QUERIES // 8):
                for x in range(2):
                    s[r // 2 * (QUERIES // 2) + 4 * j + r % 2 * 2 + x] += bad

    @inlined
    def hide(x, smem, key0, query0, left, right):
        """0 where a query does not see a key; key0 and query0 are this warp's first."""
        q_length, kv_length = field(smem, Q_LENGTH), field(smem, KV_LENGTH)
        offset = field(smem, OFFSET)
        lane = u32(lane_index())
        key, first = i32(key0 + i32(lane >> u32(2))), i32(query0 + i32(lane << ONE & u32(6)))
        for r in range(2 * S_TILES):
            middle = i32(key + 8 * r - offset - first)
            end = min(i32(middle + left + 1), i32(q_length - first))
            if key + 8 * r >= kv_length:
                end = i32(0)
            mask(x, r, i32(middle - right), end, ZERO)

    @inlined
    def await_turn(turns, n_block, m_block, before):
        """The block of the keys before these has added its dq, if it has any."""
        if before[0] <= m_block < before[1]:
            if cuda.threadIdx.x == 0:
                wait_acquire_u32(turns, u32(m_block), u32(n_block))
            cuda.syncthreads()

    @inlined
    def pass_turn(turns, n_block, m_block):
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            st_release_u32(turns, u32(m_block), u32(n_block + 1))

    @inlined
    def add_dq(smem, warp, dq_tiles, m_block, dq):
        """dq = ds^T k, added in global memory; a pass has neighbouring columns."""
        warp = opaque(warp)  # or what follows is kept in registers all along
        query = warp % u32(DQ_SPLIT) * u32(16 * DQ_TILES)
        column = warp // u32(DQ_SPLIT) * u32(DQ_COLUMNS * DQ_PASSES)
        ds = a_mn_major(u32(smem + DS + at(u32(0), query, KV_STEP)))
        for i in range(DQ_PASSES):
            k = b_mn_major(u32(smem + at(u32(0), u32(column + u32(DQ_COLUMNS * i)), KV_STEP)))
            gemm_dq(dq, ds, k)
            part = u32(u32(cuda.threadIdx.x) + DQ_PARTS * u32(i))
            red_global_add(dq_tiles, u32(m_block), part, dq)

    @inlined
    def write(tile, acc, x, key0, column0, row0, row_end):
        """A warp's part of dk or dv by way of shared memory."""
        own = u32(tile + at(key0, column0, KV_STEP))
        acc_to_shared(acc, own)
        cuda.syncwarp()
        store_rows(x, own, KV_STEP, DKV_KEYS, i32(row0 + i32(key0)), row_end)

    def backward(
        do, q, k, v, stats, dq, turns, dk, dv, q_lengths, kv_lengths, scale, scale_log2, left,
        right, upper_left, together,
    ):  # fmt: skip
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        warp = u32(cuda.shfl_sync(ALL_LANES, i32(u32(cuda.threadIdx.x) >> u32(5)), 0))
        s = cuda.local.array(S_SIZE, np.float32)
        dp = cuda.local.array(S_SIZE, np.float32)
        lse = cuda.local.array(STATS_SIZE, np.float32)
        delta = cuda.local.array(STATS_SIZE, np.float32)
        dq_acc = cuda.local.array(DQ_SIZE, np.float32)
        dk_acc = cuda.local.array(ACC_SIZE, np.float32)
        dv_acc = cuda.local.array(ACC_SIZE, np.float32)
        for i in range(ACC_SIZE):
            dk_acc[i], dv_acc[i] = ZERO, ZERO

        scale_log2 = f32(scale_log2 * FACTOR)
        heads_kv, seqlen_kv = u32(k.shape[2]), i32(k.shape[1])
        n_blocks = u32((seqlen_kv + BLOCK_N - 1) // BLOCK_N)
        all_heads = u32(heads_kv * u32(k.shape[0]))
        last, head = place(u32(cuda.blockIdx.x), u32(together), all_heads, n_blocks)
        n_block = i32(n_blocks - ONE - last)  # the first keys have the most queries if causal
        kv_head, b = head % heads_kv, head // heads_kv
        group = i32(u32(q.shape[2]) // heads_kv)
        q_length = i32(length(q_lengths, b, i32(q.shape[1])))
        kv_length = i32(length(kv_lengths, b, seqlen_kv))
        offset = i32(alignment(q_length, kv_length, upper_left))
        begin, full_begin, full_end, end = tiles_of(
            n_block, q_length, kv_length, offset, left, right
        )
        if cuda.threadIdx.x == 0:
            at_number = NUMBERS
            for x in (q_length, kv_length, offset, full_begin, full_end):
                st_shared_u32(u32(smem + at_number), u32(x))
                at_number = u32(at_number + u32(4))
        cuda.syncthreads()
        before = i32(0), i32(0)
        if DETERMINISTIC and n_block > 0:
            others = tiles_of(i32(n_block - 1), q_length, kv_length, offset, left, right)
            before = others[0], others[3]

        # Of this warp: its first key and query in s and dp; key and column in dk and dv.
        s_key, s_query = warp % u32(S_SPLIT) * u32(S_KEYS), warp // u32(S_SPLIT) * u32(QUERIES)
        d_key, d_column = (
            warp % u32(DKV_SPLIT) * u32(DKV_KEYS),
            warp // u32(DKV_SPLIT) * u32(COLUMNS),
        )
        s_rows = at(s_key, u32(0), 0)
        s_columns = at(s_query, u32(0), 0)
        p_own = at(s_key, s_query, KV_STEP)
        p_rows, d_columns = at(d_key, u32(0), 0), at(u32(0), d_column, Q_STEP)

        column, kv_row0 = own_column(), i32(n_block * BLOCK_N)
        load_kv(smem, k[b, :, kv_head, column:], kv_row0, kv_length)
        load_kv(u32(smem + V), v[b, :, kv_head, column:], kv_row0, kv_length)
        n, h, m_block = u32(0), i32(i32(kv_head) * group), i32(end - 1)
        count = u32(group * (end - begin))
        masked, poisoned = begin < full_begin or full_end < end, False
        for stage in range(PRELOADED):
            tile = steps(h, m_block, begin, end, stage)
            load(smem, u32(stage), count, tile, b, column, q, do, stats)

        while n < count:
            wait_tile()
            cuda.syncthreads()
            q_tile, do_tile = slot(smem + Q, n, Q_BYTES), slot(smem + DO, n, Q_BYTES)
            if masked:
                poisoned = protect(smem, warp, n, poisoned)
            gemm_s(s, a_k_major(u32(smem + s_rows)), b_k_major(u32(q_tile + s_columns)))
            tile = steps(h, m_block, begin, end, PRELOADED)
            if STAGES > 1:
                load(smem, u32(n + u32(PRELOADED)), count, tile, b, column, q, do, stats)
            gemm_s(dp, a_k_major(u32(smem + V + s_rows)), b_k_major(u32(do_tile + s_columns)))
            if poisoned:
                add_poison(smem, s_key, s)
            to_mask = masked_tile(smem, m_block)
            key0, query0 = i32(kv_row0 + i32(s_key)), i32(m_block * BLOCK_M + i32(s_query))
            read_stats(smem, n, s_query, 0, lse)
            probabilities(s, lse, scale_log2)
            if to_mask:
                hide(s, smem, key0, query0, left, right)
            p_to_shared(s, u32(smem + P + p_own))
            read_stats(smem, n, s_query, 1, delta)
            score_gradients(dp, s, delta)
            if to_mask:
                hide(dp, smem, key0, query0, left, right)
            p_to_shared(dp, u32(smem + DS + p_own))
            cuda.syncthreads()
            gemm_dkv(
                dv_acc, a_k_major(u32(smem + P + p_rows)), b_mn_major(u32(do_tile + d_columns))
            )
            if DETERMINISTIC:
                await_turn(turns[b, h], n_block, m_block, before)
            add_dq(smem, warp, dq[b, h], m_block, dq_acc)
            gemm_dkv(
                dk_acc, a_k_major(u32(smem + DS + p_rows)), b_mn_major(u32(q_tile + d_columns))
            )
            if DETERMINISTIC:
                pass_turn(turns[b, h], n_block, m_block)
            if STAGES == 1:
                cuda.syncthreads()  # all are done with the only slot
                load(smem, u32(n + ONE), count, tile, b, column, q, do, stats)
            n = u32(n + ONE)
            h, m_block = steps(h, m_block, begin, end, 1)

        wait_all()
        cuda.syncthreads()
        for i in range(ACC_SIZE):
            dk_acc[i] *= f32(scale * FACTOR)
            dv_acc[i] *= FACTOR
        first, stop = i32(d_column), i32(d_column) + COLUMNS
        write(smem, dk_acc, dk[b, :, kv_head, first:stop], d_key, d_column, kv_row0, seqlen_kv)
        dv_part = dv[b, :, kv_head, first:stop]
        write(u32(smem + V), dv_acc, dv_part, d_key, d_column, kv_row0, seqlen_kv)

    x = types.Array(types.uint16 if ITEM == 2 else types.float32, 4, "A")
    n = types.Array(types.int64, 1, "A")
    rows, turns = types.Array(types.float32, 4, "C"), types.Array(types.int32, 3, "C")
    signature = types.void(
        x, x, x, x, rows, rows, turns, x, x, n, n, types.float32, types.float32, types.int32,
        types.int32, types.int64, types.int32,
    )  # fmt: skip
    key = f"mma backward {config}"
    return Kernel(
        key, backward, signature, config.threads, config.shared_bytes, blocks=config.blocks
    )
