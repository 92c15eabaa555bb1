"""The forward pass on Hopper: TMA brings tiles, wgmma multiplies them, mbarriers keep the order.

The same m, l and acc (u) as in `reference.attention_tiled`; what is new is who does what, when. A
block stays on its multiprocessor and takes one tile of query rows (a "work") after another from a
counter until there are none. One warpgroup moves data, two or three compute, 64 rows each:

    warp 0       load     Q  K  K  V  K  V  K  V .. | next work: Q  K  V  K  V  K  V ..
    warps 1, 2   guard    what is not finite in V, from queries that must not see it
    warps 4 ..   consume     s  s|acc  s|acc  ..      s|acc -> o  s|acc  s|acc ..

`s` is the product q k^T of a key tile, `acc` is p v of the tile *before* it. They are issued
together, so the tensor cores multiply p v while the softmax of the newer scores is computed:

    issue s_j = q k_j^T          issue acc += p_{j-1} v_{j-1}
    wait for s_j                 m' = max(m, max s_j); a = e^(m - m'); p_j = e^(s_j - m'); l
    wait for acc                 acc *= a

With two slots for Q this runs on across works: the first s of the next work is issued with the last
acc of this one. Consumers fall out of step by themselves: one computes its softmax while another
has the tensor cores. Key tiles come from the last to the first, so causal's masked tile is the
first; a tile that only other consumers' rows see is given back unused. O leaves by a tile of each
warp in shared memory, 128 columns at a time, so that the next Q need not wait for it.

Events, by slots of rings (descriptions of works have WORK_SLOTS, Q has Q_SLOTS, K and V STAGES):

    work_full   a work is described         work_empty  every consumer is done with it
    q_full      Q is there                  q_empty     every consumer has its last scores
    k_full      K is there                  k_empty     every consumer has its scores
    v_full      V is there                  v_empty     every consumer has added it
    v_ready     ... and guarded

Source: Shah et al., FlashAttention-3 (2024): warp roles, two products in flight.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.copy import copies
from flashnumba.device.fragment import descriptor, output, scores
from flashnumba.device.guard import guard
from flashnumba.device.pipeline import lane_index, ring
from flashnumba.device.sequence import (
    BAD,
    BATCH,
    BEGIN,
    DESCRIPTION_BYTES,
    END,
    HEAD,
    KV_HEAD,
    KV_LENGTH,
    Q_LENGTH,
    ROW0,
    ROW_END,
    WRITERS,
    alignment,
    descriptions,
    leave_works,
    next_work,
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
from flashnumba.ptx.thread import lg2, rcp
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
    CONSUMERS, STAGES = config.consumers, config.stages
    Q_SLOTS, WORK_SLOTS, GUARDS = config.q_slots, 4, i32(2)
    LANES = 1 if config.tma else 32  # that arrive for a warp; all, where each moves data itself
    NEGATIVE, OVERLAP = config.negative, config.q_slots > 1
    S_SIZE, P_SIZE, ACC_SIZE = BLOCK_N // 2, BLOCK_N // 4, D // 2
    K_MAJOR, MN_MAJOR = u64(descriptor_constant()), u64(descriptor_constant(128 * BLOCK_N))
    MINUS_INF, ZERO, LN2 = f32(-np.inf), f32(0), f32(np.log(2))
    TINY = f32(np.finfo(np.float32).tiny)  # stands for a scale of 0
    ONE, ROWS_64, Q_ROWS, KV_ROWS = u32(1), u32(64 * 128), i32(BLOCK_M), i32(BLOCK_N)

    # Shared memory: Q, K, V, a warp's rows of O, barriers of each event, descriptions, scratch.
    O_COLUMNS, O_BYTES = i32(config.o_columns), u32(2 * 16 * config.o_columns)
    Q_BYTES, KV_BYTES = u32(config.q_bytes), u32(config.kv_bytes)
    Q_RING, KV_RING = u32(Q_SLOTS), u32(STAGES)
    K_AT = u32(Q_SLOTS * Q_BYTES)
    V_AT = u32(K_AT + STAGES * KV_BYTES)
    O_AT = u32(V_AT + STAGES * KV_BYTES)
    EVENTS = u32(O_AT + 4 * CONSUMERS * O_BYTES)
    WORK_FULL, WORK_EMPTY = (u32(EVENTS + 8 * WORK_SLOTS * i) for i in range(2))
    Q_FULL, Q_EMPTY = (u32(WORK_EMPTY + 8 * (WORK_SLOTS + Q_SLOTS * i)) for i in range(2))
    K_FULL, K_EMPTY, V_FULL, V_READY, V_EMPTY = (
        u32(Q_EMPTY + 8 * (Q_SLOTS + STAGES * i)) for i in range(5)
    )
    WORKS_AT = u32(V_EMPTY + 8 * STAGES)
    SCRATCH = u32(WORKS_AT + DESCRIPTION_BYTES * WORK_SLOTS)
    assert SCRATCH + 4 <= config.shared_bytes
    READERS = u32(128 * CONSUMERS + 32 * int(GUARDS))  # of descriptions
    work_event, wait_work, wait_work_before, arrive_work = ring(WORK_SLOTS)
    q_event, wait_q, wait_q_before, arrive_q = ring(Q_SLOTS)
    kv_event, wait_kv, wait_kv_before, arrive_kv = ring(STAGES)
    find, describe, write, field, tiles_of, masked = descriptions(
        WORKS_AT, WORK_SLOTS, BLOCK_M, BLOCK_N
    )

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
    see_map, load_tile, store_rows, wait_stores = copies(D, config.tma)
    of_v = guard(config.dtype, BLOCK_N, D)
    clean, restore = of_v.clean, of_v.restore
    softmax = online_softmax(BLOCK_N)
    mask, to_halves, _ = scores(config.dtype, BLOCK_N)
    rescale, divide, to_shared = output(config.dtype, D)

    @inlined
    def q_slot(smem, turn):
        return smem + turn % Q_RING * Q_BYTES

    @inlined
    def k_slot(smem, n):
        return smem + K_AT + n % KV_RING * KV_BYTES

    @inlined
    def v_slot(smem, n):
        return smem + V_AT + n % KV_RING * KV_BYTES

    # --- warp 0: load --------------------------------------------------------------------

    @inlined
    def load_kv(smem, turn, n, n_block, slot, empty, full, x, x_map):
        wait_kv_before(smem, empty, n)
        h, b = field(smem, turn, KV_HEAD), field(smem, turn, BATCH)
        row0 = i32(n_block * BLOCK_N)
        load_tile(slot, x, x_map, kv_event(smem, full, n), KV_ROWS, row0, h, b)

    @inlined
    def load_k(smem, turn, n, n_block, k, k_map):
        load_kv(smem, turn, n, n_block, k_slot(smem, n), K_EMPTY, K_FULL, k, k_map)

    @inlined
    def load_v(smem, turn, n, n_block, v, v_map):
        load_kv(smem, turn, n, n_block, v_slot(smem, n), V_EMPTY, V_FULL, v, v_map)

    @inlined
    def load_last_v(smem, turn, n, v, v_map):
        """Of the work before `turn`, whose last tile is number n - 1."""
        if turn > u32(0):
            before = u32(turn - ONE)
            load_v(smem, before, u32(n - ONE), field(smem, before, BEGIN), v, v_map)

    @inlined
    def load(
        smem, q, k, v, lse, q_map, k_map, v_map, q_lengths, kv_lengths, counter,
        left, right, upper_left, works, group,
    ):  # fmt: skip
        """K is one tile ahead of V, as the consumers use them; with OVERLAP across works."""
        lane, work, turn, n = lane_index(), i32(cuda.blockIdx.x), u32(0), u32(0)
        see_map(q_map)
        see_map(k_map)
        see_map(v_map)
        while work < works:
            if not OVERLAP:
                load_last_v(smem, turn, n, v, v_map)
            visited, rows = find(
                work, group, lse, v, q_lengths, kv_lengths, left, right, upper_left
            )
            wait_work_before(smem, WORK_EMPTY, turn)
            describe(smem, turn, visited, rows)
            if lane < WRITERS:
                arrive_work(smem, WORK_FULL, turn)
            wait_q_before(smem, Q_EMPTY, turn)
            row0, h, b = field(smem, turn, ROW0), field(smem, turn, HEAD), field(smem, turn, BATCH)
            full = q_event(smem, Q_FULL, turn)
            load_tile(q_slot(smem, turn), q, q_map, full, Q_ROWS, row0, h, b)
            n_block = i32(field(smem, turn, END) - 1)
            load_k(smem, turn, n, n_block, k, k_map)
            if OVERLAP:
                load_last_v(smem, turn, n, v, v_map)
            work = next_work(counter)
            while n_block > field(smem, turn, BEGIN):
                load_k(smem, turn, u32(n + ONE), i32(n_block - 1), k, k_map)
                load_v(smem, turn, n, n_block, v, v_map)
                n_block = i32(n_block - 1)
                n = u32(n + ONE)
            n = u32(n + ONE)
            turn = u32(turn + ONE)
        if not OVERLAP:
            load_last_v(smem, turn, n, v, v_map)
        wait_work_before(smem, WORK_EMPTY, turn)
        if lane == 0:
            write(smem, turn, END, i32(0))  # there is no such work
        if lane < WRITERS:
            arrive_work(smem, WORK_FULL, turn)
        if OVERLAP:
            load_last_v(smem, turn, n, v, v_map)
        leave_works(counter)

    # --- warps 1 and 2: guard ------------------------------------------------------------

    @inlined
    def guard_v(smem, warp):
        lane, turn, n = lane_index(), u32(0), u32(0)
        wait_work(smem, WORK_FULL, turn)
        while field(smem, turn, END) > 0:
            n_block, begin = field(smem, turn, END), field(smem, turn, BEGIN)
            while n_block > begin:
                n_block = i32(n_block - 1)
                wait_kv(smem, V_FULL, n)
                if masked(smem, turn, n_block) and clean(v_slot(smem, n), i32(warp - 1), GUARDS):
                    if lane == 0:
                        write(smem, turn, BAD, i32(1))
                cuda.syncwarp()  # no lane reads the description after the last arrival
                if lane < LANES:
                    arrive_kv(smem, V_READY, n)
                n = u32(n + ONE)
            arrive_work(smem, WORK_EMPTY, turn)
            turn = u32(turn + ONE)
            wait_work(smem, WORK_FULL, turn)

    # --- warps 4 and up: consume ---------------------------------------------------------

    @inlined
    def consumer_of(warp):
        return u32(u32(warp) >> u32(2)) - ONE

    @inlined
    def rows_of(warp):
        """Of a thread: its row in the tile (and row + 8), its first column (and the next)."""
        lane = u32(lane_index())
        return i32(warp * 16 - 64 + i32(lane >> u32(2))), i32(lane << ONE & u32(6))

    @inlined
    def speaks():
        """Whether this is the thread that arrives for its consumer."""
        return u32(cuda.threadIdx.x) & u32(127) == u32(0)

    @inlined
    def give_back(smem, event, n):
        """A consumer has read tile n."""
        if speaks():
            arrive_kv(smem, event, n)

    @inlined
    def issue_qk(smem, warp, turn, n, s):
        wgmma_fence()
        q_tile = q_slot(smem, turn) + ROWS_64 * consumer_of(warp)
        gemm_qk(s, descriptor(K_MAJOR, q_tile), descriptor(K_MAJOR, k_slot(smem, n)))
        wgmma_commit_group()

    @inlined
    def issue_pv(smem, n, acc, p):
        fence_acc(acc, p)
        gemm_pv(acc, p, descriptor(MN_MAJOR, v_slot(smem, n)))
        wgmma_commit_group()

    @inlined
    def issue_both(smem, warp, turn, n_next, n, s, acc, p):
        """s of tile n_next, which belongs to work `turn`, and acc of tile n before it."""
        wait_kv(smem, K_FULL, n_next)
        wait_kv(smem, V_READY, n)
        issue_qk(smem, warp, turn, n_next, s)
        issue_pv(smem, n, acc, p)

    @inlined
    def weights(
        smem, warp, turn, n, n_block, begin, to_mask, large, s, m, l, a, shift,
        scale, left, right, upper_left,
    ):  # fmt: skip
        """s has arrived: release K, after the last also Q; mask s, and make it p."""
        give_back(smem, K_EMPTY, n)
        if n_block == begin and speaks():
            arrive_q(smem, Q_EMPTY, turn)
        if NEGATIVE:
            for i in range(S_SIZE):
                s[i] = -s[i]
        if to_mask:
            row, column = rows_of(warp)
            q_length, kv_length = field(smem, turn, Q_LENGTH), field(smem, turn, KV_LENGTH)
            start = i32(n_block * BLOCK_N + column)
            end = i32(kv_length - start)
            offset = alignment(q_length, kv_length, upper_left)
            key = i32(field(smem, turn, ROW0) + row + offset - start)
            for r in range(2):
                mask(
                    s, r, i32(key + 8 * r - left), min(i32(key + 8 * r + right + 1), end), MINUS_INF
                )
        raised, large = softmax(s, m, l, a, shift, large, scale)
        # ptxas would move the wait for acc before the exponentials, and tensor cores and softmax
        # would no longer overlap (D 256, T 16384: 655 against 732 TFLOP/s). The sum of
        # exponentials is never negative, so nothing is stored.
        st_shared_f32_if_negative(u32(smem + SCRATCH), l[0] + l[1])
        return raised, large

    @inlined
    def finish_acc(smem, n, acc):
        wait_acc(acc)
        give_back(smem, V_EMPTY, n)

    @inlined
    def restart(m, l, shift):
        for r in range(2):
            m[r], l[r], shift[r] = MINUS_INF, ZERO, ZERO

    @inlined
    def close(smem, warp, turn, m, l, inverse, lse, scale):
        """lse = m + log l, and 1 / l; nothing seen: -inf, and 0."""
        row, column = rows_of(warp)
        for r in range(2):
            q_idx = i32(field(smem, turn, ROW0) + row + 8 * r)
            total = row_sum(l[r])
            seen = total != ZERO and q_idx < field(smem, turn, Q_LENGTH)
            if column == 0 and q_idx < field(smem, turn, ROW_END):
                log_m = m[r] * f32(scale * LN2) if scale > TINY else ZERO
                value = log_m + lg2(total) * LN2
                h, b = field(smem, turn, HEAD), field(smem, turn, BATCH)
                lse[b, h, q_idx] = value if seen else MINUS_INF
            inverse[r] = rcp(total) if seen else ZERO

    @inlined
    def add_bad_rows(smem, turn, tile, row0, column0, v, left, right, upper_left):
        """O += what was kept from it, of the tiles that are masked."""
        q_length, kv_length = field(smem, turn, Q_LENGTH), field(smem, turn, KV_LENGTH)
        offset = alignment(q_length, kv_length, upper_left)
        for n_block in range(field(smem, turn, BEGIN), field(smem, turn, END)):
            if masked(smem, turn, n_block):
                key = i32(n_block * BLOCK_N)
                end = min(i32(key + BLOCK_N), kv_length)
                while key < end:
                    row = i32(key - offset - row0)  # sees this key, as do its neighbours
                    first = max(i32(row - right), i32(0))
                    last = min(i32(row + left + 1), i32(q_length - row0), i32(16))
                    v_row = v[field(smem, turn, BATCH), key, field(smem, turn, KV_HEAD)]
                    restore(tile, O_COLUMNS, v_row, column0, first, last, u32(2048))
                    key = i32(key + 1)

    @inlined
    def write_o(smem, warp, turn, column0, acc, v, o, o_map, left, right, upper_left):
        """What acc holds of O_COLUMNS columns, by way of this warp's tile in shared memory."""
        tile = smem + O_AT + u32(warp - 4) * O_BYTES
        row0 = i32(field(smem, turn, ROW0) + warp * 16 - 64)
        h, b = field(smem, turn, HEAD), field(smem, turn, BATCH)
        wait_stores()
        to_shared(acc, tile, column0, O_COLUMNS, i32(2048))
        cuda.syncwarp()
        if field(smem, turn, BAD) != 0:
            add_bad_rows(smem, turn, tile, row0, column0, v, left, right, upper_left)
        row_end = field(smem, turn, ROW_END)
        fence_proxy_async()
        cuda.syncwarp()  # no lane reads the description after it is given back
        store_rows(o, o_map, tile, i32(2048), O_COLUMNS, row0, row_end, column0, h, b)

    @inlined
    def finish(smem, warp, turn, acc, inverse, v, o, o_map, left, right, upper_left):
        """o = acc / l; the work is done."""
        divide(acc, inverse)
        write_o(smem, warp, turn, i32(0), acc, v, o, o_map, left, right, upper_left)
        if D > O_COLUMNS:
            write_o(smem, warp, turn, O_COLUMNS, acc, v, o, o_map, left, right, upper_left)
        arrive_work(smem, WORK_EMPTY, turn)  # by all lanes, so that racecheck can follow
        zero_acc(acc)

    @inlined
    def skip(smem, warp, n, tiles):
        """Give back tiles that only other consumers need; what comes after them.

        All warps must have waited before one gives back: where a barrier is two phases on, a wait
        cannot tell.
        """
        while tiles > 0:
            wait_kv(smem, K_FULL, n)
            wait_kv(smem, V_READY, n)
            bar_sync(u32(ONE + consumer_of(warp)), u32(128))
            give_back(smem, K_EMPTY, n)
            give_back(smem, V_EMPTY, n)
            n = u32(n + ONE)
            tiles = i32(tiles - 1)
        return n

    @inlined
    def visit(smem, warp, turn):
        """The next work is there: how many tiles are before this consumer's, its own, and after."""
        wait_work(smem, WORK_FULL, turn)
        begin, full_begin, full_end, end = tiles_of(smem, turn, consumer_of(warp))
        before, after = i32(field(smem, turn, END) - end), i32(begin - field(smem, turn, BEGIN))
        return before, begin, full_begin, full_end, end, after

    @inlined
    def consume(smem, warp, v, o, lse, o_map, scale, left, right, upper_left):
        s = cuda.local.array(S_SIZE, np.float32)
        p = cuda.local.array(P_SIZE, np.uint32)
        acc = cuda.local.array(ACC_SIZE, np.float32)
        m = cuda.local.array(2, np.float32)
        l = cuda.local.array(2, np.float32)
        a = cuda.local.array(2, np.float32)
        shift = cuda.local.array(2, np.float32)
        inverse = cuda.local.array(2, np.float32)
        turn, n, alone, raised, large = u32(0), u32(0), True, False, False
        for i in range(P_SIZE):
            p[i] = u32(0)
        zero_acc(acc)
        restart(m, l, shift)
        see_map(o_map)
        before, begin, full_begin, full_end, end, after = visit(smem, warp, turn)
        while field(smem, turn, END) > 0:
            n_block = i32(end - 1)
            if alone:  # no acc has been issued beside the first s
                n = skip(smem, warp, n, before)
                wait_q(smem, Q_FULL, turn)
                wait_kv(smem, K_FULL, n)
                issue_qk(smem, warp, turn, n, s)
                to_mask = not full_begin <= n_block < full_end
                wait_s_alone(s)
                raised, large = weights(
                    smem, warp, turn, n, n_block, begin, to_mask, large, s, m, l, a, shift,
                    scale, left, right, upper_left,
                )  # fmt: skip
                to_halves(p, s)
            while n_block > begin:
                n_block, next_n = i32(n_block - 1), u32(n + ONE)
                issue_both(smem, warp, turn, next_n, n, s, acc, p)
                to_mask = not full_begin <= n_block < full_end
                wait_s(s)
                raised, large = weights(
                    smem, warp, turn, next_n, n_block, begin, to_mask, large, s, m, l, a, shift,
                    scale, left, right, upper_left,
                )  # fmt: skip
                finish_acc(smem, n, acc)
                to_halves(p, s)
                if raised:
                    rescale(acc, a)
                n = next_n
            this, rest, turn = turn, after, u32(turn + ONE)
            if OVERLAP:
                before, begin, full_begin, full_end, end, after = visit(smem, warp, turn)
                # Until acc is finished its V and the tiles skipped are held.
                alone = field(smem, turn, END) == 0 or rest > 0 or before > STAGES - 2
            if alone:
                wait_kv(smem, V_READY, n)
                issue_pv(smem, n, acc, p)
                close(smem, warp, this, m, l, inverse, lse, scale)
                restart(m, l, shift)
                large = False
                finish_acc(smem, n, acc)
                finish(smem, warp, this, acc, inverse, v, o, o_map, left, right, upper_left)
                n = skip(smem, warp, u32(n + ONE), rest)
                if not OVERLAP:
                    before, begin, full_begin, full_end, end, after = visit(smem, warp, turn)
            else:
                n_block, next_n = i32(end - 1), skip(smem, warp, u32(n + ONE), before)
                wait_q(smem, Q_FULL, turn)
                issue_both(smem, warp, turn, next_n, n, s, acc, p)
                close(smem, warp, this, m, l, inverse, lse, scale)
                restart(m, l, shift)
                large = False
                to_mask = not full_begin <= n_block < full_end
                wait_s(s)
                raised, large = weights(
                    smem, warp, turn, next_n, n_block, begin, to_mask, large, s, m, l, a, shift,
                    scale, left, right, upper_left,
                )  # fmt: skip
                finish_acc(smem, n, acc)
                finish(smem, warp, this, acc, inverse, v, o, o_map, left, right, upper_left)
                to_halves(p, s)
                n = next_n
        if lane_index() == 0:
            cp_async_bulk_wait_group()

    @inlined
    def make_barriers(smem):
        lanes, consumers = u32(LANES), u32(CONSUMERS)
        for i in range(WORK_SLOTS):
            mbarrier_init(work_event(smem, WORK_FULL, u32(i)), u32(WRITERS))
            mbarrier_init(work_event(smem, WORK_EMPTY, u32(i)), READERS)
        for i in range(Q_SLOTS):
            mbarrier_init(q_event(smem, Q_FULL, u32(i)), lanes)
            mbarrier_init(q_event(smem, Q_EMPTY, u32(i)), consumers)
        for i in range(STAGES):
            mbarrier_init(kv_event(smem, K_FULL, u32(i)), lanes)
            mbarrier_init(kv_event(smem, K_EMPTY, u32(i)), consumers)
            mbarrier_init(kv_event(smem, V_FULL, u32(i)), lanes)
            mbarrier_init(kv_event(smem, V_READY, u32(i)), u32(GUARDS * LANES))
            mbarrier_init(kv_event(smem, V_EMPTY, u32(i)), consumers)
        fence_mbarrier_init()

    def forward(
        q, k, v, o, lse, q_map, k_map, v_map, o_map, q_lengths, kv_lengths, counter,
        scale, left, right, upper_left, works, group,
    ):  # fmt: skip
        smem = cvta_to_shared(cuda.shared.array(0, np.uint8, alignment=1024))
        thread = u32(cuda.threadIdx.x)
        warp = cuda.shfl_sync(ALL_LANES, i32(thread >> u32(5)), 0)  # the same, and ptxas knows it
        if thread == 0:
            make_barriers(smem)
        cuda.syncthreads()
        if warp < 4:
            release_registers()
            if warp == 0:
                load(
                    smem, q, k, v, lse, q_map, k_map, v_map, q_lengths, kv_lengths, counter,
                    left, right, upper_left, works, group,
                )  # fmt: skip
            elif warp <= GUARDS:
                guard_v(smem, warp)
        else:
            take_registers()
            consume(smem, warp, v, o, lse, o_map, scale, left, right, upper_left)

    x = types.none if config.tma else types.Array(types.uint16, 4, "A")
    n = types.Array(types.int64, 1, "A")
    signature = types.void(
        x, x, types.Array(types.uint16, 4, "A"), x, types.Array(types.float32, 3, "A"),
        *[types.uint64 if config.tma else types.none] * 4, n, n, types.Array(types.int32, 1, "A"),
        types.float32, types.int32, types.int32, types.int64, types.int32, types.int32,
    )  # fmt: skip
    key = f"wgmma forward {config}"
    return Kernel(key, forward, signature, config.threads, config.shared_bytes, "a")
