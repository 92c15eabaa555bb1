"""The backward pass on Hopper: dK, dV and dQ with S and P computed again, from lse.

A work is a tile of keys, 64 a consumer, and the query tiles that see them, head by head of their
group. A block stays on its multiprocessor and takes one work after another: the next K and V arrive
while dk and dv leave through shared memory. All products are transposed, keys are rows: so P^T and
dS^T leave the tensor cores in the registers that the next product takes as its left factor. In a
tile, and what the tensor cores do meanwhile:

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

    warp 0       load     K V  Q dO  Q dO  Q dO ..                        backward_block.py
    warp 1       add      dq from shared memory to global, or says whose turn it is
    warps 2, 3   guard    what is not finite in K, Q and dO (device/guard.py)
    warps 4 ..   consume                                                  this file

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
from flashnumba.device.fragment import descriptor, output, scores
from flashnumba.device.pipeline import lane_index, ring
from flashnumba.kernels.backward_block import (
    NO_WORK,
    adder,
    barriers,
    consumer,
    field,
    guards,
    layout,
    loader,
    step,
)
from flashnumba.ptx.barrier import setmaxnreg_dec, setmaxnreg_inc
from flashnumba.ptx.layout import descriptor_constant, k_major, mn_major
from flashnumba.ptx.memory import red_global_add_f32
from flashnumba.ptx.shared import (
    cvta_to_shared,
    fence_proxy_async,
    st_shared_v4_f32,
)
from flashnumba.ptx.thread import ex2, nanosleep, opaque
from flashnumba.ptx.wgmma import (
    wgmma_commit_group,
    wgmma_fence,
    wgmma_fence_of,
    wgmma_rs,
    wgmma_ss,
    wgmma_wait_group,
    zero,
)

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
    QUERIES = config.queries  # of s and dp, of one consumer
    COLUMNS = i32(D // CONSUMERS if SHARED else D)  # of dk and dv
    S_SIZE, P_SIZE = QUERIES // 2, QUERIES // 4
    COLUMNS_DQ = config.dq_columns
    ACC_SIZE, DQ_SIZE = int(COLUMNS) // 2, COLUMNS_DQ // 2
    ONE, TWO = u32(1), u32(2)
    DQ_THREADS = u32(config.dq_threads)
    Q_SUBTILE, KV_SUBTILE = 128 * BLOCK_M, 128 * BLOCK_N

    to = layout(config)
    V, Q, DO, DS, DQ, P = to.V, to.Q, to.DO, to.DS, to.DQ, to.P
    DV, DK = (V, to.K) if SHARED else (DS, u32(DS + to.KV_BYTES))  # on the way out
    DS_BYTES, DQ_BYTES, STATS, DS_SLOTS = to.DS_BYTES, to.DQ_BYTES, to.STATS, u32(DS_STAGES)
    N_BLOCK, KV_HEAD, BATCH, HEAD, COUNT = to.N_BLOCK, to.KV_HEAD, to.BATCH, to.HEAD, to.COUNT
    BEGIN, FULL_BEGIN, FULL_END, END = to.BEGIN, to.FULL_BEGIN, to.FULL_END, to.END
    KV_READY, KV_EMPTY, DS_FULL = to.KV_READY, to.KV_EMPTY, to.DS_FULL
    Q_READY, Q_EMPTY, DO_READY, DO_EMPTY = to.Q_READY, to.Q_EMPTY, to.DO_READY, to.DO_EMPTY
    DQ_FULL, DQ_EMPTY = to.DQ_FULL, to.DQ_EMPTY
    _, wait_one, _, arrive_one = ring(1)
    _, wait_two, wait_two_before, arrive_two = ring(2)
    _, wait_ds, _, arrive_ds = ring(DS_STAGES)
    _, wait_q, _, arrive_q = ring(STAGES)

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
    see_map, _, store_rows, wait_stores = copies(D, True)
    _, to_halves, halves_to_shared = scores(config.dtype, QUERIES)
    _, _, to_shared = output(config.dtype, int(COLUMNS))
    make_barriers, load, add_tiles = barriers(config), loader(config), adder(config)
    guard_tiles, of = guards(config), consumer(config)
    slot, uniform, masked_tile, consumer_of, row0_of, query0_of, load_stats = (
        of.slot, of.uniform, of.masked_tile, of.consumer_of, of.row0_of, of.query0_of,
        of.load_stats,
    )  # fmt: skip
    add_poison, hide, find_poison = of.add_poison, of.hide, of.find_poison

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
        ds_tile = u32(smem + DS + n % DS_SLOTS * DS_BYTES)
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
                at = u32(smem + DQ + n % TWO * DQ_BYTES + at * u32(16))
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
        halves_to_shared(ds, u32(smem + DS + own_rows(warp, n)), query0_of(warp))
        fence_proxy_async()
        arrive_ds(smem, DS_FULL, n)

    @inlined
    def consume_tiles(smem, warp, start, dq_parts, window, scale_log2, dk_acc, dv_acc):
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
        poisoned = find_poison(smem)
        full = uniform(field(smem, FULL_BEGIN)), uniform(field(smem, FULL_END))
        m_blocks = u32(dq_parts.shape[2])
        head = i32(field(smem, BATCH) * i32(dq_parts.shape[1]) + field(smem, HEAD))
        head, tile_before = uniform(head), u32(0)  # of all batches; the tile of queries before
        begin, end = uniform(field(smem, BEGIN)), uniform(field(smem, END))
        n, m_block, stop = start, i32(end - 1), u32(start + u32(uniform(field(smem, COUNT))))
        while n != stop:
            before, q_tile = u32(n - ONE), slot(u32(smem + Q), n)
            do_tile = slot(u32(smem + DO), n)
            wait_q(smem, Q_READY, n)
            issue_scores(smem, warp, q_tile, s)
            wgmma_commit_group()
            if DEFERRED and n != start and computes_dq(warp, before):
                issue_dq(smem, warp, before, True, dq)
            wait_q(smem, DO_READY, n)
            issue_scores(u32(smem + V), warp, do_tile, dp)
            wgmma_commit_group()
            probabilities_of(smem, warp, n, m_block, full, window, poisoned, s, p, scale_log2)
            if SHARED:
                halves_to_shared(p, u32(smem + P + own_rows(warp, n)), query0_of(warp))
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
                    p_tile = descriptor(K_MAJOR, smem + P + n % DS_SLOTS * DS_BYTES)
                    gemm_dkv_shared(dv_acc, p_tile, descriptor(Q_MN, do_tile + columns))
                    wgmma_commit_group()
                issue_dq(smem, warp, before if LAGGING else n, not LAGGING or n != start, dq)
                wgmma_commit_group()
            if SHARED:
                ds_tile = descriptor(K_MAJOR, smem + DS + n % DS_SLOTS * DS_BYTES)
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
            write(u32(smem + DV), warp, place, seqlen_kv, dv_map, dv_acc)
            write(u32(smem + DK), warp, place, seqlen_kv, dk_map, dk_acc)
            if SHARED:
                wait_stores()
                arrive_one(smem, KV_EMPTY, turn)
            turn = u32(turn + ONE)
            wait_one(smem, KV_READY, turn)
        wait_stores()  # shared memory lives no longer than the block

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
