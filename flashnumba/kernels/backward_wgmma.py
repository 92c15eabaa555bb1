"""The backward pass on Hopper: dK, dV and dQ with S and P computed again, from lse.

A block owns a tile of keys, 64 a consumer, and walks the query tiles that see them, head by head of
its group. All products are transposed, keys are rows: so P^T and dS^T leave the tensor cores in the
registers that the next product takes as its left factor. In a tile, and what the tensor cores do
meanwhile:

    s  = k q^T              issue
    dp = v do^T             issue
    p  = e^(s - lse)        wait for s                                          dp
    dv += p do              issue
    ds = p (dp - delta)     wait for dp; ds to shared memory                    dv
    dq = ds^T k             issue, when ds of all keys is there
    dk += ds q              issue
                            wait for dq, add it in global memory                dk
                            wait for dk

Each consumer computes half of dq's columns. At head_dim 128 dq is that of the tile before, so that
consumers need not keep in step: one computes p and ds beside the other's products. At 64, where
registers are left, it goes with the next tile's dp, and consumers take turns to compute all of it.
At 256 they share 64 keys: each has half of the queries in s and dp, half of the columns in dk and
dv, and p and ds reach it through shared memory.

    warp 0       load     K V  Q dO  Q dO  Q dO ..
    warp 1       add      dq from shared memory to global, or says whose turn it is
    warps 2, 3   guard    what is not finite in K, Q and dO (device/guard.py)
    warps 4 ..   consume

delta = rowsum(do o) - dlse comes from kernels/backward_passes.py. All blocks add to dq, in float32
and in the order of fragments; there it becomes an array. Query tiles come from the last to the
first: blocks that start together then add to a tile in the order of their keys, as they must if
sums are to be deterministic. Each then waits for the one before, which was started earlier.

Source: Dao, FlashAttention-2 (2023), algorithm 2; Shah et al., FlashAttention-3 (2024).
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.copy import copies
from flashnumba.device.fragment import output, scores
from flashnumba.device.guard import guard
from flashnumba.device.pipeline import lane_index, ring
from flashnumba.device.sequence import leave_works, length, next_work
from flashnumba.device.sequence import place as place_of_work
from flashnumba.ptx.barrier import (
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    setmaxnreg_dec,
    setmaxnreg_inc,
)
from flashnumba.ptx.layout import descriptor_constant, k_major, mn_major
from flashnumba.ptx.memory import (
    fence_proxy_async_global,
    red_global_add_f32,
    st_release_u32,
    wait_acquire_u32,
)
from flashnumba.ptx.shared import (
    cvta_to_shared,
    fence_proxy_async,
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_v2_f32,
    st_shared_u32,
    st_shared_v4_f32,
)
from flashnumba.ptx.thread import ex2, nanosleep, opaque
from flashnumba.ptx.tma import (
    cp_async_bulk_commit_group,
    cp_async_bulk_load,
    cp_async_bulk_wait_group,
    cp_async_bulk_wait_group_read,
    cp_reduce_async_bulk_add_f32,
)
from flashnumba.ptx.wgmma import (
    wgmma_commit_group,
    wgmma_fence,
    wgmma_fence_of,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait_group,
    zero,
)
from flashnumba.window import alignment, tiles

ALL_LANES = 0xFFFFFFFF
i32, u32, u64, f32 = np.int32, np.uint32, np.uint64, np.float32


@cache
def make_backward(config):
    """dk, dv, and dq in the order of fragments."""
    D, BLOCK_M, BLOCK_N = config.head_dim, config.block_m, config.block_n
    CONSUMERS, STAGES, DS_STAGES = config.consumers, config.stages, config.ds_slots
    SHARED, STAGED, DETERMINISTIC = config.shared_keys, config.staged, config.deterministic
    DEFERRED, LAGGING, ADDS = config.deferred, config.lagging, STAGED or DETERMINISTIC
    BURST, STAGGER = config.dq_burst, u32(config.stagger)
    QUERIES = BLOCK_M // CONSUMERS if SHARED else BLOCK_M  # of s and dp, of one consumer
    COLUMNS = i32(D // CONSUMERS if SHARED else D)  # of dk and dv
    S_SIZE, P_SIZE = QUERIES // 2, QUERIES // 4
    COLUMNS_DQ = config.dq_columns
    ACC_SIZE, DQ_SIZE = int(COLUMNS) // 2, COLUMNS_DQ // 2
    ONE, TWO, ZERO = u32(1), u32(2), f32(0)
    M_ROWS, N_ROWS = i32(BLOCK_M), i32(BLOCK_N)
    DQ_CONSUMERS = 1 if DEFERRED else CONSUMERS  # that compute a tile of dq
    THREADS, DQ_THREADS = u32(128 * CONSUMERS), u32(128 * DQ_CONSUMERS)
    Q_SUBTILE, KV_SUBTILE = 128 * BLOCK_M, 128 * BLOCK_N

    # Shared memory: K, V; Q, dO; dS, dQ; lse and delta; barriers.
    KV_BYTES, Q_BYTES, DS_BYTES = u32(config.kv_bytes), u32(config.q_bytes), u32(config.ds_bytes)
    STATS_BYTES, STATS, DQ_BYTES = u32(8 * BLOCK_M), u32(4 * BLOCK_M), u32(config.dq_bytes)
    SLOTS, DS_SLOTS = u32(STAGES), u32(DS_STAGES)
    V_AT = KV_BYTES
    Q_AT = u32(V_AT + KV_BYTES)
    DO_AT = u32(Q_AT + STAGES * Q_BYTES)
    DS_AT = u32(DO_AT + STAGES * Q_BYTES)
    DQ_AT = u32(DS_AT + DS_STAGES * DS_BYTES)
    P_AT = u32(DQ_AT + 2 * STAGED * config.dq_bytes)
    STATS_AT = u32(P_AT + DS_STAGES * SHARED * DS_BYTES)
    FLAGS_AT = u32(STATS_AT + STAGES * STATS_BYTES)
    FOUR, NO_WORK = u32(4), i32(-1)
    WORK_AT = u32(FLAGS_AT + 4 * BLOCK_N + 8)
    (
        N_BLOCK, KV_HEAD, BATCH, HEAD, COUNT, BEGIN, FULL_BEGIN, FULL_END, END, Q_LENGTH, KV_LENGTH,
        OFFSET, BEFORE_BEGIN, BEFORE_END,
    ) = (u32(WORK_AT + 4 * i) for i in range(14))  # fmt: skip
    EVENTS = u32(WORK_AT + 64)
    KV_FULL, KV_READY, KV_EMPTY = (u32(EVENTS + 8 * i) for i in range(3))
    DQ_FULL, DQ_EMPTY, DS_FULL = (u32(EVENTS + 24 + 16 * i) for i in range(3))
    DV_AT, DK_AT = (V_AT, u32(0)) if SHARED else (DS_AT, u32(DS_AT + KV_BYTES))  # on the way out
    Q_EVENTS = DS_FULL + 8 * DS_STAGES
    Q_FULL, Q_READY, Q_EMPTY, DO_FULL, DO_READY, DO_EMPTY = (
        u32(Q_EVENTS + 8 * STAGES * i) for i in range(6)
    )
    assert DO_EMPTY + 8 * STAGES <= config.shared_bytes
    one_event, wait_one, wait_one_before, arrive_one = ring(1)
    two_events, wait_two, wait_two_before, arrive_two = ring(2)
    ds_event, wait_ds, _, arrive_ds = ring(DS_STAGES)
    q_event, wait_q, wait_q_before, arrive_q = ring(STAGES)

    K_MAJOR = u64(descriptor_constant())
    DS_MN, Q_MN, KV_MN = (u64(descriptor_constant(n)) for n in (16, Q_SUBTILE, KV_SUBTILE))
    kv_steps, q_steps = (
        tuple(k_major(rows, k) for k in range(D // 16)) for rows in (BLOCK_N, BLOCK_M)
    )
    keys, queries = (tuple(mn_major(k) for k in range(n // 16)) for n in (BLOCK_N, BLOCK_M))
    gemm_s = wgmma_ss(QUERIES, config.dtype, kv_steps, q_steps)
    gemm_dkv = wgmma_rs(int(COLUMNS), config.dtype, queries)
    p_steps = tuple(k_major(BLOCK_N, k) for k in range(BLOCK_M // 16))
    gemm_dkv_shared = wgmma_ss(
        int(COLUMNS), config.dtype, p_steps, queries, b_mn_major=True, add=True
    )
    gemm_dq = wgmma_ss(COLUMNS_DQ, config.dtype, keys, keys, True, True)
    red_global_add = red_global_add_f32(BLOCK_M * D, BURST, int(DQ_THREADS))
    wait_s, wait_last_s = wgmma_wait_group(1, S_SIZE), wgmma_wait_group(0, S_SIZE)
    wait_dq, wait_dq_alone = wgmma_wait_group(1, DQ_SIZE), wgmma_wait_group(0, DQ_SIZE)
    wait_acc, zero_acc = wgmma_wait_group(0, ACC_SIZE), zero(ACC_SIZE)
    fence_acc = wgmma_fence_of(ACC_SIZE, P_SIZE)
    release_registers = setmaxnreg_dec(config.registers[0])
    take_registers = setmaxnreg_inc(config.registers[1])
    see_map, load_tile, store_rows, wait_stores = copies(D, True)
    mask, to_halves, halves_to_shared = scores(config.dtype, QUERIES)
    _, _, to_shared = output(config.dtype, int(COLUMNS))
    poison, clear = guard(config.dtype, BLOCK_N, D).poison, guard(config.dtype, BLOCK_M, D).clear

    @inlined
    def slot(start, n):
        return u32(start + n % SLOTS * Q_BYTES)

    @inlined
    def descriptor(constant, address):
        return constant | u64(u32(address) >> u32(4) & u32(0x3FFF))

    @inlined
    def step(head, m_block, begin, end):
        """The tile of queries before this one, after a head's first the last of the next head."""
        m_block = i32(m_block - 1)
        return (head, m_block) if m_block >= begin else (i32(head + 1), i32(end - 1))

    @inlined
    def tiles_of(n_block, q_length, kv_length, offset, left, right):
        """(begin, full_begin, full_end, end) of the query tiles that see a block's keys."""
        first = i32(n_block * BLOCK_N)
        last = min(i32(first + BLOCK_N), kv_length) - 1
        begin, full_begin, full_end, end = tiles(
            first, last, -offset, right, left, q_length, BLOCK_M
        )
        full_end = i32(full_end) if first + BLOCK_N <= kv_length else i32(full_begin)
        return i32(begin), i32(full_begin), full_end, i32(end)

    # --- works: a tile of keys each ------------------------------------------------------

    @inlined
    def field(smem, i):
        """A number of the work whose keys are there."""
        return i32(ld_shared_u32(u32(smem + i)))

    @inlined
    def uniform(x):
        """x, which is the same in all lanes: now ptxas knows it."""
        return cuda.shfl_sync(ALL_LANES, x, 0)

    @inlined
    def describe(smem, work, lengths, window, sizes):
        """Write down where a work is and which tiles of queries see its keys, by a warp."""
        (q_lengths, kv_lengths), (left, right, upper_left) = lengths, window
        blocks, together, seqlen_q, seqlen_kv, heads_kv, heads, group = sizes
        last, head = place_of_work(u32(work), u32(together), u32(heads), u32(blocks))
        n_block = i32(blocks - 1 - last)  # the first keys have the most queries under a causal mask
        kv_h, b = i32(head % u32(heads_kv)), i32(head // u32(heads_kv))
        q_length = i32(length(q_lengths, b, seqlen_q))
        kv_length = i32(length(kv_lengths, b, seqlen_kv))
        offset = i32(alignment(q_length, kv_length, upper_left))
        begin, full_begin, full_end, end = tiles_of(
            n_block, q_length, kv_length, offset, left, right
        )
        before = i32(0), i32(0)
        if DETERMINISTIC and n_block > 0:
            others = tiles_of(i32(n_block - 1), q_length, kv_length, offset, left, right)
            before = others[0], others[3]
        if lane_index() == 0:
            i = WORK_AT
            for x in (
                n_block, kv_h, b, i32(kv_h * group), i32(group * (end - begin)), begin, full_begin,
                full_end, end, q_length, kv_length, offset, before[0], before[1],
            ):  # fmt: skip
                st_shared_u32(u32(smem + i), u32(x))
                i = u32(i + FOUR)
        cuda.syncwarp()

    @inlined
    def masked(smem):
        """Whether some query that sees a key of the work does not see another."""
        begin, end = field(smem, BEGIN), field(smem, END)
        return begin < field(smem, FULL_BEGIN) or field(smem, FULL_END) < end

    @inlined
    def masked_tile(full, m_block):
        return not full[0] <= m_block < full[1]

    # --- warp 0: load --------------------------------------------------------------------

    @inlined
    def load(smem, stats, maps, counter, works, lengths, window, sizes):
        lane, n, turn, work = lane_index(), u32(0), u32(0), i32(cuda.blockIdx.x)
        q_map, k_map, v_map, do_map = maps
        for x_map in maps:
            see_map(x_map)
        while work < works:
            wait_one_before(smem, KV_EMPTY, turn)
            describe(smem, work, lengths, window, sizes)
            kv_h, b, head = field(smem, KV_HEAD), field(smem, BATCH), field(smem, HEAD)
            begin, end = field(smem, BEGIN), field(smem, END)
            full, row0 = one_event(smem, KV_FULL, turn), i32(field(smem, N_BLOCK) * BLOCK_N)
            load_tile(smem, None, k_map, full, N_ROWS, row0, kv_h, b)
            load_tile(smem + V_AT, None, v_map, full, N_ROWS, row0, kv_h, b)
            m_block, stop = i32(end - 1), u32(n + u32(field(smem, COUNT)))
            while n != stop:
                row0 = i32(m_block * BLOCK_M)
                wait_q_before(smem, Q_EMPTY, n)
                full = q_event(smem, Q_FULL, n)
                load_tile(slot(u32(smem + Q_AT), n), None, q_map, full, M_ROWS, row0, head, b)
                if lane == 0:  # what is exp(s) divided by, and delta
                    mbarrier_arrive_expect_tx(full, STATS_BYTES)
                    at = u32(smem + STATS_AT + n % SLOTS * STATS_BYTES)
                    cp_async_bulk_load(at, stats[b, head, m_block], STATS_BYTES, full)
                wait_q_before(smem, DO_EMPTY, n)
                full = q_event(smem, DO_FULL, n)
                load_tile(slot(u32(smem + DO_AT), n), None, do_map, full, M_ROWS, row0, head, b)
                n = u32(n + ONE)
                head, m_block = step(head, m_block, begin, end)
            work, turn = next_work(counter), u32(turn + ONE)
        wait_one_before(smem, KV_EMPTY, turn)
        if lane == 0:
            st_shared_u32(u32(smem + N_BLOCK), u32(NO_WORK))
            arrive_one(smem, KV_FULL, turn)
            arrive_one(smem, KV_FULL, turn)
        leave_works(counter)

    # --- warp 1: add dQ ------------------------------------------------------------------

    @inlined
    def await_turn(turns, n_block, m_block, before):
        """The block of the keys before these has added its dq, if it has any."""
        if before[0] <= m_block < before[1]:
            wait_acquire_u32(turns, u32(m_block), u32(n_block))
            fence_proxy_async_global()

    @inlined
    def add_tiles(smem, dq, turns):
        """Two lanes, every other tile each; DQ_EMPTY says "there is room", or "it is your turn"."""
        n, turn, n_block = u32(0), u32(0), i32(0)
        while n_block != NO_WORK:
            wait_one(smem, KV_FULL, turn)
            n_block, b, head = field(smem, N_BLOCK), field(smem, BATCH), field(smem, HEAD)
            begin, end, stop = (
                field(smem, BEGIN),
                field(smem, END),
                u32(n + u32(field(smem, COUNT))),
            )
            before = field(smem, BEFORE_BEGIN), field(smem, BEFORE_END)
            arrive_one(smem, KV_READY, turn)
            m_block = i32(end - 1)
            if n_block == NO_WORK:
                stop = n
            if u32(lane_index()) != n & ONE:
                n = u32(n + ONE)
                head, m_block = step(head, m_block, begin, end)
            while i32(stop - n) > 0 and lane_index() < 2:
                if DETERMINISTIC:
                    await_turn(turns[b, head], n_block, m_block, before)
                if STAGED:
                    wait_two(smem, DQ_FULL, n)
                    at = u32(smem + DQ_AT + n % TWO * DQ_BYTES)
                    cp_reduce_async_bulk_add_f32(dq[b, head, m_block], at, DQ_BYTES)
                    cp_async_bulk_commit_group()
                    cp_async_bulk_wait_group_read()
                arrive_two(smem, DQ_EMPTY, n)
                if not STAGED:
                    wait_two(smem, DQ_FULL, n)
                if DETERMINISTIC:
                    cp_async_bulk_wait_group()
                    st_release_u32(turns[b, head], u32(m_block), u32(n_block + 1))
                for _ in range(2):
                    n = u32(n + ONE)
                    head, m_block = step(head, m_block, begin, end)
            cuda.syncwarp()
            n, turn = stop, u32(turn + ONE)

    # --- warps 2 and 3: guard ------------------------------------------------------------

    @inlined
    def guard_tiles(smem, warp):
        """K from queries that must not see it; Q and dO that see no key from all keys."""
        n, turn, full, ready, at = u32(0), u32(0), DO_FULL, DO_READY, DO_AT
        if warp == 2:
            full, ready, at = Q_FULL, Q_READY, Q_AT
        wait_one(smem, KV_FULL, turn)
        while field(smem, N_BLOCK) != NO_WORK:
            stop = u32(n + u32(field(smem, COUNT)))
            if masked(smem):
                poison(smem, u32(smem + FLAGS_AT), i32(warp - 2), i32(2))
            arrive_one(smem, KV_READY, turn)
            while n != stop:
                wait_q(smem, Q_FULL, n)
                wait_q(smem, full, n)
                clear(slot(u32(smem + at), n), u32(smem + STATS_AT + n % SLOTS * STATS_BYTES))
                arrive_q(smem, ready, n)
                n = u32(n + ONE)
            turn = u32(turn + ONE)
            wait_one(smem, KV_FULL, turn)
        arrive_one(smem, KV_READY, turn)

    # --- warps 4 and up: consume ---------------------------------------------------------

    @inlined
    def consumer_of(warp):
        return u32(u32(warp) >> u32(2)) - ONE

    @inlined
    def row0_of(warp):
        """The first of a warp's 16 keys in the tile."""
        return i32(u32(warp) & u32(3)) * i32(16) if SHARED else i32(warp * 16 - 64)

    @inlined
    def query0_of(warp):
        """The first query of its consumer's s and dp."""
        return u32(consumer_of(warp) * u32(QUERIES)) if SHARED else u32(0)

    @inlined
    def load_stats(smem, n, query0, offset, x):
        """Of this thread's queries: lse, or delta where `offset` is STATS."""
        pair = cuda.local.array(2, np.float32)
        lane = u32(lane_index()) & u32(3)
        at = u32(smem + STATS_AT + offset + n % SLOTS * STATS_BYTES)
        at = u32(at + query0 * u32(4) + lane * u32(8))
        for j in range(QUERIES // 8):
            ld_shared_v2_f32(pair, u32(at + u32(32 * j)))
            x[2 * j], x[2 * j + 1] = pair[0], pair[1]

    @inlined
    def place_of(warp):
        """Of a thread: its key in the tile (and key + 8), its first query (and the next)."""
        lane = opaque(u32(lane_index()))  # or it is kept in registers all along
        column = i32(u32(query0_of(warp)) + (lane << ONE & u32(6)))
        return i32(row0_of(warp) + i32(lane >> u32(2))), column

    @inlined
    def add_poison(smem, warp, s):
        """Scores of keys that are not finite become NaN."""
        row, _ = place_of(warp)
        for r in range(2):
            bad = ld_shared_f32(u32(smem + FLAGS_AT + u32(4 * (row + 8 * r))))
            for j in range(QUERIES // 8):
                for x in range(2):
                    s[4 * j + 2 * r + x] += bad

    @inlined
    def hide(x, smem, warp, m_block, window):
        """0 where a query does not see a key."""
        left, right, _ = window
        q_length, kv_length = field(smem, Q_LENGTH), field(smem, KV_LENGTH)
        offset, n_block = field(smem, OFFSET), field(smem, N_BLOCK)
        row, column = place_of(warp)
        key, first = i32(n_block * BLOCK_N + row), i32(m_block * BLOCK_M + column)
        for r in range(2):
            middle = i32(key + 8 * r - offset - first)
            end = min(i32(middle + left + 1), i32(q_length - first))
            if key + 8 * r >= kv_length:
                end = i32(0)
            mask(x, r, i32(middle - right), end, ZERO)

    @inlined
    def write(start, warp, place, kv_row_end, x_map, acc):
        """A warp's 16 keys of dk or dv, by way of shared memory that nobody else uses."""
        n_block, kv_h, b = place
        warp = i32(opaque(u32(warp)))  # or what follows is kept in registers all along
        rows, column0 = i32(row0_of(warp)), u32(0)
        if SHARED:
            column0 = u32(consumer_of(warp) * u32(COLUMNS))
        tile = u32(start + u32(rows) * u32(128) + (column0 >> u32(6)) * u32(KV_SUBTILE))
        to_shared(acc, tile, i32(0), COLUMNS, i32(KV_SUBTILE))
        fence_proxy_async()
        cuda.syncwarp()
        row0 = i32(n_block * BLOCK_N + rows)
        store_rows(
            None, x_map, tile, i32(KV_SUBTILE), COLUMNS, row0, kv_row_end, i32(column0), kv_h, b
        )  # fmt: skip

    @inlined
    def issue_scores(tile, warp, q_tile, s):
        """s = k q^T, or dp = v do^T."""
        rows, k_rows = query0_of(warp) * u32(128), u32(tile)
        if not SHARED:
            k_rows = u32(tile + u32(64 * 128) * consumer_of(warp))
        wgmma_fence()
        gemm_s(s, descriptor(K_MAJOR, k_rows), descriptor(K_MAJOR, q_tile + rows))

    @inlined
    def own_rows(warp, n):
        """A warp's keys in a tile of P or dS."""
        return u32(n % DS_SLOTS * DS_BYTES + u32(row0_of(warp)) * u32(128))

    @inlined
    def computes_dq(warp, n):
        return not DEFERRED or n & ONE == consumer_of(warp)

    @inlined
    def issue_dq(smem, warp, n, there, dq):
        """dq = ds^T k, when both consumers' ds is there.

        Before a work's first tile, what it computes is not used: in a branch, wgmma would be
        serialised.
        """
        column0 = u32(0) if DEFERRED else consumer_of(warp) * u32(COLUMNS_DQ)
        k_columns = u32(smem + (column0 >> u32(6)) * u32(KV_SUBTILE) + (column0 & u32(63)) * u32(2))
        if there:
            wait_ds(smem, DS_FULL, n)
        wgmma_fence()
        ds_tile = u32(smem + DS_AT + n % DS_SLOTS * DS_BYTES)
        gemm_dq(dq, descriptor(DS_MN, ds_tile), descriptor(KV_MN, k_columns))

    @inlined
    def give_tiles_back(smem, n):
        """All threads have read lse and delta; of Q and dO tensor cores alone."""
        arrive_q(smem, Q_EMPTY, n)
        if u32(cuda.threadIdx.x) & u32(127) == u32(0):
            arrive_q(smem, DO_EMPTY, n)

    @inlined
    def add(smem, n, dq, dq_parts, tile):
        """dq to shared memory for warp 1 to add it, or to global memory at once."""
        part = u32(u32(cuda.threadIdx.x) - u32(128))
        if STAGED:
            part = u32(part & u32(127))
            wait_two_before(smem, DQ_EMPTY, n)
            for i in range(DQ_SIZE // 4):
                x, at = 4 * i, u32(part + u32(i) * DQ_THREADS)
                at = u32(smem + DQ_AT + n % TWO * DQ_BYTES + at * u32(16))
                st_shared_v4_f32(at, dq[x], dq[x + 1], dq[x + 2], dq[x + 3])
            fence_proxy_async()
        else:
            if DETERMINISTIC:
                wait_two(smem, DQ_EMPTY, n)
            x_frag = cuda.local.array(BURST, np.float32)
            for i in range(DQ_SIZE // BURST):
                for j in range(BURST):
                    x_frag[j] = dq[BURST * i + j]
                first = u32(part + u32(BURST // 4 * i) * DQ_THREADS)
                red_global_add(dq_parts, tile, first, x_frag)
        if ADDS:
            arrive_two(smem, DQ_FULL, n)

    @inlined
    def probabilities_of(smem, warp, n, m_block, full, window, poisoned, s, p, scale_log2):
        """s, when it has arrived, becomes p = e^(s - lse)."""
        lse = cuda.local.array(P_SIZE, np.float32)
        load_stats(smem, n, query0_of(warp), u32(0), lse)
        wait_s(s)
        if poisoned:
            add_poison(smem, warp, s)
        for j in range(QUERIES // 8):
            for r in range(2):
                for x in range(2):
                    i = 4 * j + 2 * r + x
                    s[i] = ex2(s[i] * scale_log2 - lse[2 * j + x])
        if masked_tile(full, m_block):
            hide(s, smem, warp, m_block, window)
        to_halves(p, s)

    @inlined
    def score_gradients_of(smem, warp, n, m_block, full, window, s, dp, ds):
        """ds = p (dp - delta), when dp has arrived; to shared memory, too."""
        delta = cuda.local.array(P_SIZE, np.float32)
        load_stats(smem, n, query0_of(warp), STATS, delta)
        if SHARED:
            wait_last_s(dp)
        else:
            wait_s(dp)
        for j in range(QUERIES // 8):
            for r in range(2):
                for x in range(2):
                    i = 4 * j + 2 * r + x
                    dp[i] = s[i] * (dp[i] - delta[2 * j + x])
        if masked_tile(full, m_block):
            hide(dp, smem, warp, m_block, window)
        to_halves(ds, dp)
        halves_to_shared(ds, u32(smem + DS_AT + own_rows(warp, n)), query0_of(warp))
        fence_proxy_async()
        arrive_ds(smem, DS_FULL, n)

    @inlined
    def consume_tiles(
        smem, warp, start, dq_parts, window, scale_log2, dk_acc, dv_acc
    ):  # fmt: skip
        """dk and dv of a tile of keys, and what it adds to dq."""
        s = cuda.local.array(S_SIZE, np.float32)
        dp = cuda.local.array(S_SIZE, np.float32)
        p = cuda.local.array(P_SIZE, np.uint32)
        ds = cuda.local.array(P_SIZE, np.uint32)
        dq = cuda.local.array(DQ_SIZE, np.float32)
        zero_acc(dk_acc)
        zero_acc(dv_acc)
        columns = u32(0)  # of dk and dv, in Q and dO
        if SHARED:
            columns = (consumer_of(warp) * u32(COLUMNS) >> u32(6)) * u32(Q_SUBTILE)
        poisoned = False
        if masked(smem):
            flags = u32(smem + FLAGS_AT + u32(4 * BLOCK_N))
            found = ld_shared_u32(flags) | ld_shared_u32(u32(flags + u32(4)))
            poisoned = i32(cuda.shfl_sync(ALL_LANES, i32(found), 0)) != 0
        full = uniform(field(smem, FULL_BEGIN)), uniform(field(smem, FULL_END))
        m_blocks = u32(dq_parts.shape[2])
        head = i32(field(smem, BATCH) * i32(dq_parts.shape[1]) + field(smem, HEAD))
        head, tile_before = uniform(head), u32(0)  # of all batches; the tile of queries before
        begin, end = uniform(field(smem, BEGIN)), uniform(field(smem, END))
        n, m_block, stop = start, i32(end - 1), u32(start + u32(uniform(field(smem, COUNT))))
        while n != stop:
            before, q_tile = u32(n - ONE), slot(u32(smem + Q_AT), n)
            do_tile = slot(u32(smem + DO_AT), n)
            wait_q(smem, Q_READY, n)
            issue_scores(smem, warp, q_tile, s)
            wgmma_commit_group()
            if DEFERRED and n != start and computes_dq(warp, before):
                issue_dq(smem, warp, before, True, dq)
            wait_q(smem, DO_READY, n)
            issue_scores(u32(smem + V_AT), warp, do_tile, dp)
            wgmma_commit_group()
            probabilities_of(smem, warp, n, m_block, full, window, poisoned, s, p, scale_log2)
            if SHARED:
                halves_to_shared(p, u32(smem + P_AT + own_rows(warp, n)), query0_of(warp))
            else:
                fence_acc(dv_acc, p)
                gemm_dkv(dv_acc, p, descriptor(Q_MN, do_tile))
                wgmma_commit_group()
            if DEFERRED and n != start:
                give_tiles_back(smem, before)
            score_gradients_of(smem, warp, n, m_block, full, window, s, dp, ds)
            tile = u32(u32(head) * m_blocks + u32(m_block))
            if DEFERRED:
                if n != start and computes_dq(warp, before):
                    add(smem, before, dq, dq_parts, tile_before)
            else:
                if SHARED:
                    wait_ds(smem, DS_FULL, n)
                    wgmma_fence()
                    p_tile = descriptor(K_MAJOR, smem + P_AT + n % DS_SLOTS * DS_BYTES)
                    gemm_dkv_shared(dv_acc, p_tile, descriptor(Q_MN, do_tile + columns))
                    wgmma_commit_group()
                issue_dq(smem, warp, before if LAGGING else n, not LAGGING or n != start, dq)
                wgmma_commit_group()
            if SHARED:
                ds_tile = descriptor(K_MAJOR, smem + DS_AT + n % DS_SLOTS * DS_BYTES)
                gemm_dkv_shared(dk_acc, ds_tile, descriptor(Q_MN, q_tile + columns))
            else:
                fence_acc(dk_acc, ds)
                gemm_dkv(dk_acc, ds, descriptor(Q_MN, q_tile))
            wgmma_commit_group()
            if not DEFERRED:
                wait_dq(dq)
                if not LAGGING:
                    add(smem, n, dq, dq_parts, tile)
                elif n != start:
                    add(smem, before, dq, dq_parts, tile_before)
                wait_acc(dk_acc)
                give_tiles_back(smem, n)
            tile_before, n = tile, u32(n + ONE)
            head, m_block = step(head, m_block, begin, end)
        if (DEFERRED or LAGGING) and n != start:
            if computes_dq(warp, u32(n - ONE)):
                issue_dq(smem, warp, u32(n - ONE), True, dq)
                wgmma_commit_group()
                wait_dq_alone(dq)
                add(smem, u32(n - ONE), dq, dq_parts, tile_before)
        wait_acc(dk_acc)
        wait_acc(dv_acc)
        if DEFERRED and n != start:
            give_tiles_back(smem, u32(n - ONE))
        return stop

    @inlined
    def consume(smem, warp, dq_parts, dk_map, dv_map, window, seqlen_kv, scale, scale_log2):
        dk_acc = cuda.local.array(ACC_SIZE, np.float32)
        dv_acc = cuda.local.array(ACC_SIZE, np.float32)
        if lane_index() == 0:  # which stores
            see_map(dk_map)
            see_map(dv_map)
        n, turn = u32(0), u32(0)
        wait_one(smem, KV_READY, turn)
        while uniform(field(smem, N_BLOCK)) != NO_WORK:
            if STAGGER and consumer_of(warp) == ONE:
                nanosleep(STAGGER)
            wait_stores()  # of the work before, which dS takes the place of
            n = consume_tiles(smem, warp, n, dq_parts, window, scale_log2, dk_acc, dv_acc)
            place = field(smem, N_BLOCK), field(smem, KV_HEAD), field(smem, BATCH)
            if not SHARED:  # K and V may be replaced; when nobody reads dS any more, it may too
                arrive_one(smem, KV_EMPTY, turn)
                wait_one(smem, KV_EMPTY, turn)
            for i in range(ACC_SIZE):
                dk_acc[i] *= scale
            write(u32(smem + DV_AT), warp, place, seqlen_kv, dv_map, dv_acc)
            write(u32(smem + DK_AT), warp, place, seqlen_kv, dk_map, dk_acc)
            if SHARED:
                wait_stores()
                arrive_one(smem, KV_EMPTY, turn)
            turn = u32(turn + ONE)
            wait_one(smem, KV_READY, turn)
        wait_stores()  # shared memory lives no longer than the block

    @inlined
    def make_barriers(smem):
        for i in range(DS_STAGES):
            mbarrier_init(ds_event(smem, DS_FULL, u32(i)), THREADS)
        for i in range(2):
            mbarrier_init(two_events(smem, DQ_FULL, u32(i)), DQ_THREADS)
            mbarrier_init(two_events(smem, DQ_EMPTY, u32(i)), ONE)
        mbarrier_init(one_event(smem, KV_FULL, u32(0)), u32(2))
        mbarrier_init(one_event(smem, KV_READY, u32(0)), u32(64 + 32 * ADDS))
        mbarrier_init(one_event(smem, KV_EMPTY, u32(0)), THREADS)
        for i in range(STAGES):
            mbarrier_init(q_event(smem, Q_FULL, u32(i)), u32(2))
            mbarrier_init(q_event(smem, Q_READY, u32(i)), u32(32))
            mbarrier_init(q_event(smem, DO_READY, u32(i)), u32(32))
            mbarrier_init(q_event(smem, Q_EMPTY, u32(i)), THREADS)
            mbarrier_init(q_event(smem, DO_FULL, u32(i)), ONE)
            mbarrier_init(q_event(smem, DO_EMPTY, u32(i)), u32(CONSUMERS))
        fence_mbarrier_init()

    def backward(
        stats, dq, turns, q_map, k_map, v_map, do_map, dk_map, dv_map, q_lengths, kv_lengths,
        counter, scale, scale_log2, left, right, upper_left, works, blocks, together, seqlen_q,
        seqlen_kv, heads_kv,
    ):  # fmt: skip
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        thread = u32(cuda.threadIdx.x)
        warp = cuda.shfl_sync(ALL_LANES, i32(thread >> u32(5)), 0)  # the same, and ptxas knows it
        lengths, window = (q_lengths, kv_lengths), (left, right, upper_left)
        heads, group = i32(heads_kv * dq.shape[0]), i32(u32(dq.shape[1]) // u32(heads_kv))
        sizes = blocks, together, seqlen_q, seqlen_kv, heads_kv, heads, group
        if thread == 0:
            make_barriers(smem)
        cuda.syncthreads()
        if warp < 4:
            release_registers()
            if warp == 0:
                maps = q_map, k_map, v_map, do_map
                load(smem, stats, maps, counter, works, lengths, window, sizes)
            elif warp == 1 and ADDS:
                add_tiles(smem, dq, turns)
            elif warp > 1:
                guard_tiles(smem, warp)
        else:
            take_registers()
            consume(smem, warp, dq, dk_map, dv_map, window, seqlen_kv, scale, scale_log2)

    n, rows = types.Array(types.int64, 1, "A"), types.Array(types.float32, 4, "C")
    turns, counter = types.Array(types.int32, 3, "C"), types.Array(types.int32, 1, "A")
    signature = types.void(
        rows, rows, turns, *[types.uint64] * 6, n, n, counter, types.float32, types.float32,
        types.int32, types.int32, types.int64, *[types.int32] * 6,
    )  # fmt: skip
    key = f"wgmma backward {config}"
    return Kernel(key, backward, signature, config.threads, config.shared_bytes, "a")
