"""The backward pass of float32 on Hopper: six products of bfloat16 for one (device/parts.py).

First `split` (forward_split.py) writes q, k, v and do part by part. Then blocks, works and the
warps that load, guard and take turns are those of backward_wgmma.py. A work is 64 keys; products
are transposed, keys are rows, so p and ds are in the registers that the next product takes. The
consumers share the keys, each with products of its own:

    s  = k q^T                                        dp = v do^T
    p  = e^(s - lse), to shared memory     ------>    ds = p (dp - delta), to shared memory
    dv += p do                                        dk += ds q
                                                      dq = ds^T k, added in global memory

While one computes p or ds, the other multiplies. p as float32 and ds in parts take turns in one
place: there is room for the next p when dq is done. At head_dim 128 there is one slot for Q and one
for dO: half of the next tile is loaded when dv or dk of that half is done.

Tensor cores cut off what does not fit an accumulator. Over thousands of products that would be a
bias of many bits; so each tile's sum begins at 0, and dk, dv and dq are sums of rounded float32
additions.

In a product of 64 x 64 tensor cores would wait for shared memory. So the first two parts of its
right factor, which follow each other there, are multiplied at once as far as they can be, 64 x 128;
the results are added in registers, the smallest first.

Source: Henry et al., Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations (2019): three-part numbers; Dao, FlashAttention-2 (2023), algorithm 2.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.copy import warp_store
from flashnumba.device.fragment import descriptor, floats_to_shared
from flashnumba.device.parts import by_pairs, factors, parts_to_shared, to_parts
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
from flashnumba.kernels.backward_passes import place as place_of_tile
from flashnumba.ptx.barrier import bar_sync, setmaxnreg_dec, setmaxnreg_inc
from flashnumba.ptx.layout import descriptor_constant, k_major, mn_major
from flashnumba.ptx.memory import ld_global_v4_f32, red_global_add_f32, st_global_fragment
from flashnumba.ptx.shared import (
    cvta_to_shared,
    fence_proxy_async,
    ld_shared_v4_u32,
    st_shared_v4_f32,
)
from flashnumba.ptx.thread import ex2, opaque
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
OWN = u32(1)  # the numbered barrier of the consumer of dk and dq


@cache
def products(config):
    """(multiply, multiply_ds): k q^T and v do^T; at head_dim 64 ds^T k, else None."""
    D, PARTS, SIZE, SUBTILE = config.head_dim, config.parts, 32, 128 * 64
    PAIRED = PARTS > 1
    wide, narrow = by_pairs(PARTS)
    wait_wide, wait_narrow = wgmma_wait_group(0, 2 * SIZE), wgmma_wait_group(0, SIZE)

    def pair(a_steps, b_steps, **form):
        """The product whose factors' steps, of each part, are given by two functions."""
        gemm_narrow = wgmma_ss(
            64,
            config.factors,
            tuple(step for i, _ in narrow for step in a_steps(i)),
            tuple(step for _, j in narrow for step in b_steps(j)),
            **form,
        )
        gemm_wide = PAIRED and wgmma_ss(
            128,
            config.factors,
            tuple(step for i in wide for step in a_steps(i)),
            tuple(step for _ in wide for step in b_steps(0)),
            **form,
        )

        @inlined
        def multiply(a, b, both, x):
            """x = a b, in sum; `both` has room for products by two parts of b."""
            wgmma_fence()
            gemm_narrow(x, a, b)
            if PAIRED:
                gemm_wide(both, a, b)
            wgmma_commit_group()
            if PAIRED:
                wait_wide(both)
            wait_narrow(x)
            if PAIRED:
                for i in range(SIZE):
                    x[i] = f32(x[i] + both[SIZE + i]) + both[i]

        return multiply

    def of_columns(part):
        return [k_major(64, 4 * (k // 4 * PARTS + part) + k % 4) for k in range(D // 16)]

    def of_keys(part):
        return [SUBTILE * part + mn_major(k) for k in range(64 // 16)]

    multiply = pair(of_columns, of_columns)
    if D > 64:
        return multiply, None
    return multiply, pair(of_keys, of_keys, a_mn_major=True, b_mn_major=True)


@cache
def make_backward(config):
    """dk, dv, and dq in the order of fragments."""
    D, PARTS, DETERMINISTIC = config.head_dim, config.parts, config.deterministic
    BLOCK_M, BLOCK_N, SUBTILE = config.block_m, config.block_n, 128 * 64
    assert BLOCK_M == BLOCK_N == 64
    S_SIZE, STATS_SIZE, P_SIZE, ACC_SIZE = 32, 16, 16 * PARTS, D // 2
    BOTH, ONE, FOURS = 2 * S_SIZE, u32(1), u32(128 * 16)

    to, of = layout(config), consumer(config)
    V, Q, DO, DS, STATS = to.V, to.Q, to.DO, to.DS, to.STATS
    N_BLOCK, KV_HEAD, BATCH, HEAD, COUNT = to.N_BLOCK, to.KV_HEAD, to.BATCH, to.HEAD, to.COUNT
    BEGIN, FULL_BEGIN, FULL_END, END = to.BEGIN, to.FULL_BEGIN, to.FULL_END, to.END
    KV_READY, KV_EMPTY, DQ_FULL, DQ_EMPTY = to.KV_READY, to.KV_EMPTY, to.DQ_FULL, to.DQ_EMPTY
    Q_READY, Q_EMPTY, DO_READY, DO_EMPTY = to.Q_READY, to.Q_EMPTY, to.DO_READY, to.DO_EMPTY
    PIECES, Q_EMPTY_2, DO_EMPTY_2 = config.pieces, to.Q_EMPTY_2, to.DO_EMPTY_2
    P_FULL, P_EMPTY = to.P_FULL, to.P_EMPTY
    _, wait_one, wait_one_before, arrive_one = ring(1)
    _, wait_two, _, arrive_two = ring(2)
    _, wait_q, _, arrive_q = ring(config.stages)
    slot, uniform, masked_tile, row0_of, load_stats, add_poison, hide, find_poison = (
        of.slot, of.uniform, of.masked_tile, of.row0_of, of.load_stats, of.add_poison, of.hide,
        of.find_poison,
    )  # fmt: skip

    # In a tile, sub-tiles of the same 64 columns of all parts follow each other.
    K_MAJOR, DS_MN = u64(descriptor_constant()), u64(descriptor_constant())
    PARTS_MN, COLUMNS_MN = (u64(descriptor_constant(SUBTILE * n)) for n in (1, PARTS))
    pairs, PIECE = factors(PARTS), 4 // PIECES  # in steps of 16 queries

    def of_rows(steps, add):
        """dv = p do of some of the queries, and dk = ds q."""
        left = tuple(4 * i + k for i, _ in pairs for k in steps)
        right = tuple(SUBTILE * j + mn_major(k) for _, j in pairs for k in steps)
        return wgmma_rs(D, config.factors, right, a_steps=left, add=add)

    ds_steps, k_steps = (
        tuple(SUBTILE * pair[x] + mn_major(k) for pair in pairs for k in range(4)) for x in (0, 1)
    )
    gemm_dkv = of_rows(range(PIECE), False)
    gemm_dkv_2 = PIECES > 1 and of_rows(range(PIECE, 4), True)
    gemm_dq = wgmma_ss(D, config.factors, ds_steps, k_steps, True, True)
    multiply, multiply_ds = products(config)
    wait_acc, fence_left = wgmma_wait_group(0, ACC_SIZE), wgmma_fence_of(0, P_SIZE)
    wait_piece = wgmma_wait_group(1, 0)
    clear, red_global_add = zero(ACC_SIZE), red_global_add_f32(BLOCK_M * D, ACC_SIZE, 128)
    store_fragment = st_global_fragment(D)
    release_registers = setmaxnreg_dec(config.registers[0])
    take_registers = setmaxnreg_inc(config.registers[1])
    split, to_shared = to_parts(PARTS, S_SIZE), parts_to_shared(PARTS, BLOCK_M, SUBTILE)
    make_barriers, load, add_tiles = barriers(config), loader(config), adder(config)
    guard_tiles = guards(config)

    @inlined
    def own_p(smem):
        """Where a thread has p for the one of the other consumer that computes its ds."""
        return u32(smem + DS + (u32(cuda.threadIdx.x) & u32(127)) * u32(16))

    @inlined
    def give(smem, n, s):
        """p to shared memory."""
        wait_one_before(smem, P_EMPTY, n)
        at = own_p(smem)
        for i in range(S_SIZE // 4):
            x = 4 * i
            st_shared_v4_f32(u32(at + u32(i) * FOURS), s[x], s[x + 1], s[x + 2], s[x + 3])
        arrive_one(smem, P_FULL, n)

    @inlined
    def probabilities(s, smem, warp, n, m_block, full, window, poisoned, scale_log2):
        """s becomes p = e^(s - lse)."""
        lse = cuda.local.array(STATS_SIZE, np.float32)
        load_stats(smem, n, u32(0), u32(0), lse)
        if poisoned:
            add_poison(smem, warp, s)
        for j in range(BLOCK_M // 8):
            for r in range(2):
                for x in range(2):
                    i = 4 * j + 2 * r + x
                    s[i] = ex2(s[i] * scale_log2 - lse[2 * j + x])
        if masked_tile(full, m_block):
            hide(s, smem, warp, m_block, window)

    @inlined
    def score_gradients(dp, smem, warp, n, m_block, full, window):
        """dp becomes ds = p (dp - delta), when p is there."""
        delta = cuda.local.array(STATS_SIZE, np.float32)
        p = cuda.local.array(4, np.uint32)
        load_stats(smem, n, u32(0), STATS, delta)
        wait_one(smem, P_FULL, n)
        at = own_p(smem)
        for j in range(BLOCK_M // 8):
            ld_shared_v4_u32(p, u32(at + u32(j) * FOURS))
            for r in range(2):
                for x in range(2):
                    i = 4 * j + 2 * r + x
                    dp[i] = p[2 * r + x].view(np.float32) * (dp[i] - delta[2 * j + x])
        if masked_tile(full, m_block):
            hide(dp, smem, warp, m_block, window)

    @inlined
    def share(smem, warp, ds):
        """ds in parts to shared memory, where all threads have read p."""
        bar_sync(OWN, u32(128))
        to_shared(ds, u32(smem + DS + u32(row0_of(warp)) * u32(128)))
        fence_proxy_async()
        bar_sync(OWN, u32(128))

    @inlined
    def give_back(smem, n, empty, one):
        """This consumer, or if `one` is None this thread, needs a tile or piece no more."""
        if one is None or u32(cuda.threadIdx.x) & u32(127) == u32(0):
            arrive_q(smem, empty, n)

    @inlined
    def multiply_tile(smem, n, tile, left, right, empty, empty_2, one):
        """A tile's part of dv = p do, or of dk = ds q; its right factor is given back."""
        right = descriptor(COLUMNS_MN, right)
        fence_left(left)
        gemm_dkv(tile, left, right)
        wgmma_commit_group()
        if PIECES > 1:
            gemm_dkv_2(tile, left, right)
            wgmma_commit_group()
            wait_piece(tile)
            give_back(smem, n, empty, one)
        wait_acc(tile)
        give_back(smem, n, empty_2 if PIECES > 1 else empty, one)

    @inlined
    def accumulate(acc, tile):
        for i in range(ACC_SIZE):
            acc[i] += tile[i]

    @inlined
    def add_dq(smem, n, dq, dq_parts, tile):
        """In global memory, when it is this block's turn."""
        if DETERMINISTIC:
            wait_two(smem, DQ_EMPTY, n)
        part = opaque(u32(cuda.threadIdx.x) & u32(127))
        red_global_add(dq_parts, tile, part, dq)
        if DETERMINISTIC:
            arrive_two(smem, DQ_FULL, n)

    @inlined
    def write(x, place, warp, acc):
        """A thread's part of dk or dv, from registers."""
        n_block, h, b = place
        row, lane = i32(row0_of(warp)), opaque(u32(lane_index()))
        key = i32(n_block * BLOCK_N + row + i32(lane >> u32(2)))
        column = i32(lane << ONE & u32(6))
        own = x[b, :, h, column:]
        pitch, width = i32(x.strides[1]), i32(own.shape[1] * 4)
        store_fragment(own, key, pitch, i32(x.shape[1]), width, acc)

    @inlined
    def visit(smem, n):
        """(tiles in full sight, begin, end, the number after the last) of the work's queries."""
        full = uniform(field(smem, FULL_BEGIN)), uniform(field(smem, FULL_END))
        stop = u32(n + u32(uniform(field(smem, COUNT))))
        return full, uniform(field(smem, BEGIN)), uniform(field(smem, END)), stop

    @inlined
    def keys_of(smem):
        """Where the work's keys are in an array."""
        return field(smem, N_BLOCK), u32(field(smem, KV_HEAD)), u32(field(smem, BATCH))

    @inlined
    def consume_v(smem, warp, dv, window, scale_log2):
        """dv of one work after the other, and p for the other consumer."""
        both = cuda.local.array(BOTH, np.float32)
        s = cuda.local.array(S_SIZE, np.float32)
        p = cuda.local.array(P_SIZE, np.uint32)
        tile = cuda.local.array(ACC_SIZE, np.float32)
        acc = cuda.local.array(ACC_SIZE, np.float32)
        n, turn, head = u32(0), u32(0), i32(0)
        wait_one(smem, KV_READY, turn)
        while uniform(field(smem, N_BLOCK)) != NO_WORK:
            clear(acc)
            poisoned = find_poison(smem)
            full, begin, end, stop = visit(smem, n)
            m_block = i32(end - 1)
            while n != stop:
                wait_q(smem, Q_READY, n)
                q_tile = slot(u32(smem + Q), n)
                multiply(descriptor(K_MAJOR, smem), descriptor(K_MAJOR, q_tile), both, s)
                probabilities(s, smem, warp, n, m_block, full, window, poisoned, scale_log2)
                give_back(smem, n, Q_EMPTY, None)
                if PIECES > 1:
                    give_back(smem, n, Q_EMPTY_2, None)
                give(smem, n, s)
                split(p, s)
                wait_q(smem, DO_READY, n)
                do_tile = slot(u32(smem + DO), n)
                multiply_tile(smem, n, tile, p, do_tile, DO_EMPTY, DO_EMPTY_2, True)
                accumulate(acc, tile)
                n = u32(n + ONE)
                head, m_block = step(head, m_block, begin, end)
            place = keys_of(smem)
            arrive_one(smem, KV_EMPTY, turn)
            write(dv, place, warp, acc)
            turn = u32(turn + ONE)
            wait_one(smem, KV_READY, turn)

    @inlined
    def consume_k(smem, warp, dk, dq_parts, window, scale):
        """dk of one work after the other, and what it adds to dq."""
        both = cuda.local.array(BOTH, np.float32)
        dp = cuda.local.array(S_SIZE, np.float32)
        ds = cuda.local.array(P_SIZE, np.uint32)
        tile = cuda.local.array(ACC_SIZE, np.float32)
        dq = cuda.local.array(ACC_SIZE, np.float32)
        acc = cuda.local.array(ACC_SIZE, np.float32)
        n, turn, m_blocks = u32(0), u32(0), u32(dq_parts.shape[2])
        wait_one(smem, KV_READY, turn)
        while uniform(field(smem, N_BLOCK)) != NO_WORK:
            clear(acc)
            full, begin, end, stop = visit(smem, n)
            m_block = i32(end - 1)
            head = i32(field(smem, BATCH) * i32(dq_parts.shape[1]) + field(smem, HEAD))
            head = uniform(head)  # of all batches
            while n != stop:
                wait_q(smem, DO_READY, n)
                do_tile = slot(u32(smem + DO), n)
                multiply(descriptor(K_MAJOR, smem + V), descriptor(K_MAJOR, do_tile), both, dp)
                give_back(smem, n, DO_EMPTY, True)
                if PIECES > 1:
                    give_back(smem, n, DO_EMPTY_2, True)
                wait_q(smem, Q_READY, n)
                score_gradients(dp, smem, warp, n, m_block, full, window)
                split(ds, dp)
                share(smem, warp, ds)
                q_tile = slot(u32(smem + Q), n)
                multiply_tile(smem, n, tile, ds, q_tile, Q_EMPTY, Q_EMPTY_2, None)
                ds_tile = descriptor(DS_MN, smem + DS)
                if D == 64:
                    accumulate(acc, tile)
                    multiply_ds(ds_tile, descriptor(PARTS_MN, smem), both, dq)
                else:
                    wgmma_fence()
                    gemm_dq(dq, ds_tile, descriptor(COLUMNS_MN, smem))
                    wgmma_commit_group()
                    accumulate(acc, tile)
                    wait_acc(dq)
                arrive_one(smem, P_EMPTY, n)
                add_dq(smem, n, dq, dq_parts, u32(u32(head) * m_blocks + u32(m_block)))
                n = u32(n + ONE)
                head, m_block = step(head, m_block, begin, end)
            place = keys_of(smem)
            arrive_one(smem, KV_EMPTY, turn)
            for i in range(ACC_SIZE):
                acc[i] *= scale
            write(dk, place, warp, acc)
            turn = u32(turn + ONE)
            wait_one(smem, KV_READY, turn)

    def backward(
        stats, dq, turns, q_map, k_map, v_map, do_map, dk, dv, q_lengths, kv_lengths, counter,
        scale, scale_log2, left, right, upper_left, works, blocks, together, seqlen_q, seqlen_kv,
        heads_kv,
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
            elif warp == 1 and DETERMINISTIC:
                add_tiles(smem, dq, turns)
            elif warp > 1:
                guard_tiles(smem, warp)
        elif warp < 8:
            take_registers()
            consume_v(smem, warp, dv, window, scale_log2)
        else:
            take_registers()
            consume_k(smem, warp, dk, dq, window, scale)

    n, rows = types.Array(types.int64, 1, "A"), types.Array(types.float32, 4, "C")
    x = types.Array(types.float32, 4, "A")
    turns, counter = types.Array(types.int32, 3, "C"), types.Array(types.int32, 1, "A")
    signature = types.void(
        rows, rows, turns, *[types.uint64] * 4, x, x, n, n, counter, types.float32, types.float32,
        types.int32, types.int32, types.int64, *[types.int32] * 6,
    )  # fmt: skip
    key = f"split backward {config}"
    return Kernel(key, backward, signature, config.threads, config.shared_bytes, "a")


@cache
def make_convert(config):
    """dq = scale times what was added up. A thread has what a thread of the consumer had."""
    BLOCK_M, D, THREADS = config.block_m, config.head_dim, 128
    SIZE, STEP = D // 2, 128 * BLOCK_M
    to_shared, store_rows = floats_to_shared(D, 1, STEP), warp_store(D, 4)

    def convert(parts, dq, scale):
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        thread = u32(cuda.threadIdx.x)
        acc, x = cuda.local.array(SIZE, np.float32), cuda.local.array(4, np.float32)
        m_block, h, b = place_of_tile(parts, u32(cuda.blockIdx.x))
        for i in range(SIZE // 4):
            ld_global_v4_f32(x, parts[b, h, m_block], u32(thread + u32(THREADS * i)))
            for j in range(4):
                acc[4 * i + j] = x[j] * scale
        row = i32(thread >> u32(5)) * i32(16)
        tile, row0 = u32(smem + u32(row) * u32(128)), i32(m_block * u32(BLOCK_M) + u32(row))
        to_shared(acc, tile)
        cuda.syncwarp()
        store_rows(dq[b, :, h], tile, STEP, 16, row0, i32(dq.shape[1]))

    x = types.Array(types.float32, 4, "A")
    signature = types.void(types.Array(types.float32, 4, "C"), x, types.float32)
    return Kernel(f"split backward convert {config}", convert, signature, THREADS, 4 * BLOCK_M * D)
