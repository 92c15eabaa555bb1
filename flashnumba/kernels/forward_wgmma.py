"""The forward pass on Hopper: TMA brings tiles, wgmma multiplies them, mbarriers keep the order.

The same m, l and acc (u) as in `reference.attention_tiled`; what is new is who does what, when. A
block stays on its multiprocessor and takes one tile of query rows (a "work") after another from a
counter until there are none. One warpgroup moves data, two or three compute, 64 rows each:

    warp 0       load     Q  K  K  V  K  V  K  V .. | next work: Q  K  V  K  V  K  V ..
    warps 2, 3   guard    what is not finite in V, from queries that must not see it
    warps 4 ..   consume     s  s|acc  s|acc  ..      s|acc -> o  s|acc  s|acc ..
    warp 1       store                                         O

`s` is the product q k^T of a key tile, `acc` is p v of the tile *before* it. They are issued
together, so the tensor cores multiply p v while the softmax of the newer scores is computed:

    issue s_j = q k_j^T          issue acc += p_{j-1} v_{j-1}
    wait for s_j                 m' = max(m, max s_j); a = e^(m - m'); p_j = e^(s_j - m'); l
    wait for acc                 acc *= a

With two slots for Q this runs on across works: the first s of the next work is issued with the last
acc of this one. Consumers fall out of step by themselves: one computes its softmax while another
has the tensor cores. Key tiles come from the last to the first, so causal's masked tile is the
first; a tile that only other consumers' rows see is given back unused.

Events, by slots of rings (Q has Q_SLOTS; K and V have STAGES):

    q_full   a work and its Q are there     q_empty   its O, written over Q, is stored
    k_full   K is there                     k_empty   every consumer has its scores
    v_full   V is there                     v_empty   every consumer has added it
    v_ready  ... and guarded                o_full    every consumer has written its O over Q

Source: Shah et al., FlashAttention-3 (2024): warp roles, two products in flight.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device.copy import copies
from flashnumba.device.fragment import output, scores
from flashnumba.device.guard import guard
from flashnumba.device.pipeline import event, lane_index
from flashnumba.device.sequence import (
    ALL_ROWS,
    BAD,
    BATCH,
    BEGIN,
    CONSUMER_TILES,
    DESCRIPTION_BYTES,
    END,
    HEAD,
    KV_HEAD,
    KV_LENGTH,
    Q_LENGTH,
    ROW0,
    alignment,
    descriptions,
    length,
    place,
    tiles,
)
from flashnumba.device.softmax import online_softmax, row_sum
from flashnumba.ptx.barrier import (
    bar_sync,
    fence_mbarrier_init,
    mbarrier_init,
    setmaxnreg_dec,
    setmaxnreg_inc,
)
from flashnumba.ptx.layout import descriptor_constant, k_major, mn_major
from flashnumba.ptx.shared import cvta_to_shared, fence_proxy_async, st_shared_f32_if_negative
from flashnumba.ptx.thread import lg2, opaque, rcp
from flashnumba.ptx.tma import cp_async_bulk_wait_group
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
def make_forward(config):
    """o and lse."""
    D, BLOCK_M, BLOCK_N = config.head_dim, config.block_m, config.block_n
    CONSUMERS, STAGES, Q_SLOTS = config.consumers, config.stages, config.q_slots
    LANES = 1 if config.tma else 32  # that arrive for a warp; all, where each moves data itself
    NEGATIVE, OVERLAP = config.negative, config.q_slots > 1
    Q_BYTES, KV_BYTES = config.q_bytes, config.kv_bytes
    S_SIZE, P_SIZE, ACC_SIZE = BLOCK_N // 2, BLOCK_N // 4, D // 2
    K_MAJOR, MN_MAJOR = descriptor_constant(), descriptor_constant(128 * BLOCK_N)
    MINUS_INF, ZERO, LN2 = f32(-np.inf), f32(0), f32(np.log(2))
    TINY = f32(np.finfo(np.float32).tiny)  # stands for a scale of 0

    # Shared memory: Q, K, V, the barriers of each event, the descriptions of works, scratch.
    K_AT = Q_SLOTS * Q_BYTES
    V_AT = K_AT + STAGES * KV_BYTES
    Q_EVENTS_AT = V_AT + STAGES * KV_BYTES
    KV_EVENTS_AT = Q_EVENTS_AT + 3 * 8 * Q_SLOTS
    WORKS_AT = KV_EVENTS_AT + 5 * 8 * STAGES
    SCRATCH_AT = WORKS_AT + DESCRIPTION_BYTES * Q_SLOTS
    of_q = lambda i: event(Q_EVENTS_AT + 8 * Q_SLOTS * i, Q_SLOTS)
    of_kv = lambda i: event(KV_EVENTS_AT + 8 * STAGES * i, STAGES)
    q_full, wait_q, _, arrive_q = of_q(0)
    q_empty, _, wait_q_empty, release_q = of_q(1)
    o_full, wait_o, _, arrive_o = of_q(2)
    k_full, wait_k, _, _ = of_kv(0)
    k_empty, _, wait_k_empty, release_k = of_kv(1)
    v_full, wait_v, _, _ = of_kv(2)
    v_ready, wait_v_ready, _, arrive_v_ready = of_kv(3)
    v_empty, _, wait_v_empty, release_v = of_kv(4)
    describe, field, masked = descriptions(WORKS_AT, Q_SLOTS)

    q_steps, k_steps = (
        tuple(k_major(rows, k) for k in range(D // 16)) for rows in (BLOCK_M, BLOCK_N)
    )
    gemm_qk = wgmma_ss(BLOCK_N, config.dtype, q_steps, k_steps)
    gemm_pv = wgmma_rs(D, config.dtype, tuple(mn_major(k) for k in range(BLOCK_N // 16)))
    wait_s_alone, wait_s = wgmma_wait_group(0, S_SIZE), wgmma_wait_group(1, S_SIZE)
    fence_acc = wgmma_fence_of(ACC_SIZE, P_SIZE)
    wait_acc, zero_acc = wgmma_wait_group(0, ACC_SIZE), zero(ACC_SIZE)
    release_registers = setmaxnreg_dec(config.registers[0])
    take_registers = setmaxnreg_inc(config.registers[1])
    see_map, load_tile, store_tile = copies(D, config.tma)
    clean, restore = guard(config.dtype, BLOCK_N, D)
    softmax = online_softmax(BLOCK_N)
    mask, to_halves = scores(config.dtype, BLOCK_N)
    rescale, to_shared = output(config.dtype, D, BLOCK_M)

    @cuda.jit(device=True, forceinline=True)
    def q_slot(smem, turn):
        return smem + turn % u32(Q_SLOTS) * u32(Q_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def k_slot(smem, n):
        return smem + u32(K_AT) + n % u32(STAGES) * u32(KV_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def v_slot(smem, n):
        return smem + u32(V_AT) + n % u32(STAGES) * u32(KV_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def descriptor(constant, address):
        return u64(constant) | u64((address >> u32(4)) & u32(0x3FFF))

    def forward(
        q, k, v, o, lse, q_map, k_map, v_map, o_map, q_lengths, kv_lengths, counter,
        scale, left, right, upper_left, works, group,
    ):  # fmt: skip
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        thread, lane = u32(cuda.threadIdx.x), lane_index()
        warp = cuda.shfl_sync(ALL_LANES, i32(thread >> u32(5)), 0)  # the same, and ptxas knows it

        def announce(turn, work):
            """Describe a work in its slot, and load its Q."""
            heads, seqlen_q = opaque(u32(lse.shape[1])), opaque(u32(lse.shape[2]))
            m_blocks = u32(seqlen_q + u32(BLOCK_M - 1)) // u32(BLOCK_M)
            all_heads = u32(heads * u32(lse.shape[0]))
            m_block, head = place(u32(work), opaque(u32(group)), all_heads, u32(m_blocks))
            row0, h, b = i32(m_block * BLOCK_M), i32(head % heads), i32(head // heads)
            q_length = length(q_lengths, b, i32(seqlen_q))
            kv_length = length(kv_lengths, b, v.shape[1])
            offset = alignment(q_length, kv_length, upper_left)
            # Lane 3 asks for all rows, those before it for one consumer's.
            first, rows = row0, i32(BLOCK_M)
            if lane < ALL_ROWS:
                first, rows = i32(row0 + 64 * lane), i32(64)
            begin, full_begin, full_end, end = tiles(
                first, min(first + rows, q_length) - 1, offset, left, right, kv_length, BLOCK_N
            )
            # Rows without keys, and works without, visit one tile, all of it masked.
            all_begin = cuda.shfl_sync(ALL_LANES, i32(begin), ALL_ROWS)
            all_end = max(cuda.shfl_sync(ALL_LANES, i32(end), ALL_ROWS), i32(all_begin + 1))
            begin = min(max(i32(begin), all_begin), i32(all_end - 1))
            end = min(max(i32(end), i32(begin + 1)), all_end)
            wait_q_empty(smem, turn)
            if lane <= ALL_ROWS:
                at = i32(CONSUMER_TILES * lane)
                describe(smem, turn, at, begin)
                describe(smem, turn, at + 1, full_begin)
                describe(smem, turn, at + 2, full_end)
                describe(smem, turn, at + 3, end)
            if lane == 0:
                describe(smem, turn, ROW0, row0)
                describe(smem, turn, HEAD, h)
                describe(smem, turn, KV_HEAD, u32(h) // (heads // u32(v.shape[2])))
                describe(smem, turn, BATCH, b)
                describe(smem, turn, Q_LENGTH, q_length)
                describe(smem, turn, KV_LENGTH, kv_length)
                describe(smem, turn, BAD, 0)
            cuda.syncwarp()
            load_tile(q_slot(smem, turn), q, q_map, q_full(smem, turn), BLOCK_M, row0, h, b)

        def load_k(turn, n, n_block):
            wait_k_empty(smem, n)
            h, b, row0 = field(smem, turn, KV_HEAD), field(smem, turn, BATCH), n_block * BLOCK_N
            load_tile(k_slot(smem, n), k, k_map, k_full(smem, n), BLOCK_N, i32(row0), h, b)

        def load_v(turn, n, n_block):
            wait_v_empty(smem, n)
            h, b, row0 = field(smem, turn, KV_HEAD), field(smem, turn, BATCH), n_block * BLOCK_N
            load_tile(v_slot(smem, n), v, v_map, v_full(smem, n), BLOCK_N, i32(row0), h, b)

        def load_last_v(turn, n):
            load_v(turn, n, field(smem, turn, BEGIN))

        def load():
            """K is one tile ahead of V, as the consumers use them; with OVERLAP across works."""
            work, turn, n = i32(cuda.blockIdx.x), u32(0), u32(0)
            see_map(q_map)
            see_map(k_map)
            see_map(v_map)
            while work < works:
                if not OVERLAP and turn > u32(0):
                    load_last_v(turn - u32(1), n - u32(1))
                announce(turn, work)
                n_block = i32(field(smem, turn, END) - 1)
                load_k(turn, n, n_block)
                if OVERLAP and turn > u32(0):
                    load_last_v(turn - u32(1), n - u32(1))
                work = i32(0)
                if lane == 0:
                    work = i32(cuda.atomic.add(counter, 0, 1)) + i32(cuda.gridDim.x)
                work = cuda.shfl_sync(ALL_LANES, work, 0)
                while n_block > field(smem, turn, BEGIN):
                    load_k(turn, n + u32(1), i32(n_block - 1))
                    load_v(turn, n, n_block)
                    n_block = i32(n_block - 1)
                    n += u32(1)
                n += u32(1)
                turn += u32(1)
            if not OVERLAP:
                load_last_v(turn - u32(1), n - u32(1))
            wait_q_empty(smem, turn)
            if lane == 0:
                describe(smem, turn, END, 0)  # there is no such work
            if lane < LANES:
                arrive_q(smem, turn)
            if OVERLAP:
                load_last_v(turn - u32(1), n - u32(1))
            # The last block to end leaves the counter as it was: zeros.
            if lane == 0 and cuda.atomic.add(counter, 1, 1) == cuda.gridDim.x - 1:
                counter[0] = 0
                counter[1] = 0

        def add_bad_rows(turn):
            """O += what was kept from it, of the tiles that are masked."""
            for n_block in range(field(smem, turn, BEGIN), field(smem, turn, END)):
                if masked(smem, turn, n_block):
                    key = i32(n_block * BLOCK_N)
                    end = min(i32(key + BLOCK_N), field(smem, turn, KV_LENGTH))
                    while key < end:
                        q_length, row0 = field(smem, turn, Q_LENGTH), field(smem, turn, ROW0)
                        offset = alignment(q_length, field(smem, turn, KV_LENGTH), upper_left)
                        row = i32(key - offset - row0)  # sees this key, as do its neighbours
                        first = max(i32(row - right), i32(0))
                        last = min(i32(row + left + 1), i32(q_length - row0), i32(BLOCK_M))
                        v_row = v[field(smem, turn, BATCH), key, field(smem, turn, KV_HEAD)]
                        restore(q_slot(smem, turn), BLOCK_M, v_row, first, last)
                        key = i32(key + 1)
            fence_proxy_async()
            cuda.syncwarp()

        def store():
            turn = u32(0)
            see_map(o_map)
            wait_q(smem, turn)
            while field(smem, turn, END) > 0:
                wait_o(smem, turn)
                if field(smem, turn, BAD) != 0:
                    add_bad_rows(turn)
                row0, h = field(smem, turn, ROW0), field(smem, turn, HEAD)
                b = field(smem, turn, BATCH)
                store_tile(o, o_map, q_slot(smem, turn), BLOCK_M, row0, h, b)
                if lane < LANES:
                    release_q(smem, turn)
                turn += u32(1)
                wait_q(smem, turn)
            if lane == 0:
                cp_async_bulk_wait_group()

        def guard_v():
            turn, n = u32(0), u32(0)
            wait_q(smem, turn)
            while field(smem, turn, END) > 0:
                n_block, begin = field(smem, turn, END), field(smem, turn, BEGIN)
                while n_block > begin:
                    n_block = i32(n_block - 1)
                    wait_v(smem, n)
                    if masked(smem, turn, n_block) and clean(v_slot(smem, n), warp - 2, 2):
                        if lane == 0:
                            describe(smem, turn, BAD, 1)
                    cuda.syncwarp()  # no lane reads the description after the last arrival
                    if lane < LANES:
                        arrive_v_ready(smem, n)
                    n += u32(1)
                turn += u32(1)
                wait_q(smem, turn)

        def consume():
            s = cuda.local.array(S_SIZE, np.float32)
            p = cuda.local.array(P_SIZE, np.uint32)
            acc = cuda.local.array(ACC_SIZE, np.float32)
            m = cuda.local.array(2, np.float32)
            l = cuda.local.array(2, np.float32)
            a = cuda.local.array(2, np.float32)
            shift = cuda.local.array(2, np.float32)
            inverse = cuda.local.array(2, np.float32)
            consumer = i32(u32(warp) >> u32(2)) - i32(1)
            first = thread & u32(127) == 0
            row0 = i32(warp * 16 - 64)  # of this warp in the tile
            row = row0 + i32(u32(lane) >> u32(2))  # this thread's, and row + 8
            column = i32(u32(lane) << u32(1) & u32(6))  # and column + 1, then 8 further, ...

            def issue_qk(turn, n):
                wgmma_fence()
                q_tile = q_slot(smem, turn) + u32(64 * 128) * u32(consumer)
                gemm_qk(s, descriptor(K_MAJOR, q_tile), descriptor(K_MAJOR, k_slot(smem, n)))
                wgmma_commit_group()

            def issue_pv(n):
                fence_acc(acc, p)
                gemm_pv(acc, p, descriptor(MN_MAJOR, v_slot(smem, n)))
                wgmma_commit_group()

            def issue_both(turn, n_next, n):
                """s of tile n_next, which belongs to work `turn`, and acc of tile n before it."""
                wait_k(smem, n_next)
                wait_v_ready(smem, n)
                issue_qk(turn, n_next)
                issue_pv(n)

            def finish_acc(n):
                wait_acc(acc)
                if first:
                    release_v(smem, n)

            def weights(turn, n, n_block, to_mask, large):
                """s has arrived: release K, mask, and make it p."""
                if first:
                    release_k(smem, n)
                if NEGATIVE:
                    for i in range(S_SIZE):
                        s[i] = -s[i]
                if to_mask:
                    q_length, kv_length = field(smem, turn, Q_LENGTH), field(smem, turn, KV_LENGTH)
                    start = i32(n_block * BLOCK_N + column)
                    end = i32(kv_length - start)
                    offset = alignment(q_length, kv_length, upper_left)
                    key = i32(field(smem, turn, ROW0) + row + offset - start)
                    for r in range(2):
                        mask(s, r, i32(key + 8 * r - left), min(i32(key + 8 * r + right + 1), end))
                raised, large = softmax(s, m, l, a, shift, large, scale)
                # ptxas would move the wait for acc before the exponentials, and tensor cores and
                # softmax would no longer overlap (D 256, T 16384: 655 against 732 TFLOP/s). The sum
                # of exponentials is never negative, so nothing is stored.
                st_shared_f32_if_negative(smem + u32(SCRATCH_AT), l[0] + l[1])
                return raised, large

            def restart():
                for r in range(2):
                    m[r], l[r], shift[r] = MINUS_INF, ZERO, ZERO

            def close(turn):
                """lse = m + log l, and 1 / l; nothing seen: -inf, and 0."""
                for r in range(2):
                    q_idx = field(smem, turn, ROW0) + row + 8 * r
                    total = row_sum(l[r])
                    seen = total != ZERO and q_idx < field(smem, turn, Q_LENGTH)
                    if lane % 4 == 0 and q_idx < lse.shape[2]:
                        log_m = m[r] * f32(scale * LN2) if scale > TINY else ZERO
                        value = log_m + lg2(total) * LN2
                        h, b = field(smem, turn, HEAD), field(smem, turn, BATCH)
                        lse[b, h, q_idx] = value if seen else MINUS_INF
                    inverse[r] = rcp(total) if seen else ZERO

            def finish(turn):
                """o = acc / l."""
                for j in range(D // 8):
                    for r in range(2):
                        for x in range(2):
                            i = 4 * j + 2 * r + x
                            acc[i] = acc[i] * inverse[r] if inverse[r] != ZERO else ZERO
                to_shared(acc, q_slot(smem, turn), row0)
                arrive_o(smem, turn)
                zero_acc(acc)

            def tiles_of(turn):
                """Tiles to skip before these rows', their four numbers, the last of all rows."""
                at = i32(CONSUMER_TILES * consumer)
                begin, end = field(smem, turn, at), field(smem, turn, at + 3)
                full_begin, full_end = field(smem, turn, at + 1), field(smem, turn, at + 2)
                before = i32(field(smem, turn, END) - end)
                return before, begin, full_begin, full_end, end, field(smem, turn, BEGIN)

            def skip(n, tiles):
                """Give back tiles that only other consumers need; what comes after them.

                All warps must have waited before one gives back: where a barrier is two phases on,
                a wait cannot tell.
                """
                while tiles > 0:
                    wait_k(smem, n)
                    wait_v_ready(smem, n)
                    bar_sync(u32(1 + consumer), u32(128))
                    if first:
                        release_k(smem, n)
                        release_v(smem, n)
                    n += u32(1)
                    tiles = i32(tiles - 1)
                return n

            def begin_work(turn, n, n_block, to_mask):
                wait_k(smem, n)
                issue_qk(turn, n)
                wait_s_alone(s)
                raised, large = weights(turn, n, n_block, to_mask, False)
                to_halves(p, s)
                return large

            turn, n = u32(0), u32(0)
            for i in range(P_SIZE):
                p[i] = u32(0)
            zero_acc(acc)
            restart()
            large = False
            wait_q(smem, turn)
            before, begin, full_begin, full_end, end, bottom = tiles_of(turn)
            if field(smem, turn, END) > 0:
                n = skip(n, before)
                large = begin_work(turn, n, end - 1, not full_begin < end <= full_end)
            while field(smem, turn, END) > 0:
                n_block = i32(end - 2)
                while n_block >= begin:
                    issue_both(turn, n + u32(1), n)
                    to_mask = not full_begin <= n_block < full_end
                    wait_s(s)
                    raised, large = weights(turn, n + u32(1), n_block, to_mask, large)
                    finish_acc(n)
                    to_halves(p, s)
                    if raised:
                        rescale(acc, a)
                    n += u32(1)
                    n_block = i32(n_block - 1)
                after = i32(begin - bottom)
                turn += u32(1)
                more = False
                if OVERLAP:
                    wait_q(smem, turn)
                    before, begin, full_begin, full_end, end, bottom = tiles_of(turn)
                    more = field(smem, turn, END) > 0
                to_mask = not full_begin < end <= full_end
                if more and after == 0 and before <= STAGES - 2:  # acc holds V of n up meanwhile
                    n_next = skip(n + u32(1), before)
                    issue_both(turn, n_next, n)
                    close(turn - u32(1))
                    restart()
                    wait_s(s)
                    raised, large = weights(turn, n_next, end - 1, to_mask, False)
                    finish_acc(n)
                    finish(turn - u32(1))
                    to_halves(p, s)
                    n = n_next
                else:
                    wait_v_ready(smem, n)
                    issue_pv(n)
                    close(turn - u32(1))
                    restart()
                    finish_acc(n)
                    finish(turn - u32(1))
                    n = skip(n + u32(1), after)
                    if not OVERLAP:
                        wait_q(smem, turn)
                        before, begin, full_begin, full_end, end, bottom = tiles_of(turn)
                        to_mask = not full_begin < end <= full_end
                        more = field(smem, turn, END) > 0
                    if more:
                        n = skip(n, before)
                        large = begin_work(turn, n, end - 1, to_mask)

        if thread == 0:
            for i in range(Q_SLOTS):
                mbarrier_init(q_full(smem, u32(i)), u32(LANES))
                mbarrier_init(q_empty(smem, u32(i)), u32(LANES))
                mbarrier_init(o_full(smem, u32(i)), u32(128 * CONSUMERS))
            for i in range(STAGES):
                mbarrier_init(k_full(smem, u32(i)), u32(LANES))
                mbarrier_init(k_empty(smem, u32(i)), u32(CONSUMERS))
                mbarrier_init(v_full(smem, u32(i)), u32(LANES))
                mbarrier_init(v_ready(smem, u32(i)), u32(2 * LANES))
                mbarrier_init(v_empty(smem, u32(i)), u32(CONSUMERS))
            fence_mbarrier_init()
        cuda.syncthreads()
        if warp < 4:
            release_registers()
            if warp == 0:
                load()
            elif warp == 1:
                store()
            else:
                guard_v()
        else:
            take_registers()
            consume()

    x = types.none if config.tma else types.Array(types.uint16, 4, "A")
    n = types.Array(types.int64, 1, "A")
    signature = types.void(
        x, x, types.Array(types.uint16, 4, "A"), x, types.Array(types.float32, 3, "A"),
        *[types.uint64 if config.tma else types.none] * 4, n, n, types.Array(types.int32, 1, "A"),
        types.float32, types.int32, types.int32, types.int64, types.int32, types.int32,
    )  # fmt: skip
    key = f"wgmma forward {config}"
    return Kernel(key, forward, signature, config.threads, config.shared_bytes, "a")
