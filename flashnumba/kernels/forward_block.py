"""A block of the Hopper forwards, but for the warps that compute.

What is where in shared memory, the warps that load and guard, and what consumers of both forwards
do alike (those: forward_wgmma.py). Events, by slots of rings (descriptions of
works have WORK_SLOTS, Q has Q_SLOTS, K and V STAGES):

    work_full   a work is described         work_empty  every consumer is done with it
    q_full      Q is there                  q_empty     every consumer has its last scores
    k_full      K is there                  k_empty     every consumer has its scores
    v_full      V is there                  v_empty     every consumer has added it
    v_ready     ... and guarded
"""

from functools import cache
from types import SimpleNamespace

import numpy as np
from numba import cuda

from flashnumba.device import inlined
from flashnumba.device.copy import copies
from flashnumba.device.fragment import scores
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
from flashnumba.device.softmax import row_sum
from flashnumba.ptx.barrier import bar_sync, fence_mbarrier_init, mbarrier_init
from flashnumba.ptx.thread import lg2, rcp

i32, u32, f32 = np.int32, np.uint32, np.float32
ONE, WORK_SLOTS, GUARDS = u32(1), 4, i32(2)
MINUS_INF, ZERO, LN2 = f32(-np.inf), f32(0), f32(np.log(2))
TINY = f32(np.finfo(np.float32).tiny)  # stands for a scale of 0


@cache
def layout(config):
    """Where things are in shared memory: Q, K, V, rows of O, barriers, descriptions, scratch.

    `q_slot`, `k_slot` and `v_slot` say where tile number n of a ring lies.
    """
    to = SimpleNamespace()
    stages, q_slots = config.stages, config.q_slots
    to.Q_BYTES, to.KV_BYTES = u32(config.q_bytes), u32(config.kv_bytes)
    to.K = u32(q_slots * to.Q_BYTES)
    to.V = u32(to.K + stages * to.KV_BYTES)
    to.O = u32(to.V + stages * to.KV_BYTES)
    first = u32(to.O + config.o_bytes)
    to.WORK_FULL, to.WORK_EMPTY = (u32(first + 8 * WORK_SLOTS * i) for i in range(2))
    to.Q_FULL, to.Q_EMPTY = (u32(to.WORK_EMPTY + 8 * (WORK_SLOTS + q_slots * i)) for i in range(2))
    to.K_FULL, to.K_EMPTY, to.V_FULL, to.V_READY, to.V_EMPTY = (
        u32(to.Q_EMPTY + 8 * (q_slots + stages * i)) for i in range(5)
    )
    to.WORKS = u32(to.V_EMPTY + 8 * stages)
    to.SCRATCH = u32(to.WORKS + DESCRIPTION_BYTES * WORK_SLOTS)
    assert to.SCRATCH + 4 <= config.shared_bytes
    K_AT, V_AT, Q_BYTES, KV_BYTES = to.K, to.V, to.Q_BYTES, to.KV_BYTES
    Q_RING, KV_RING = u32(q_slots), u32(stages)

    @inlined
    def q_slot(smem, turn):
        return smem + turn % Q_RING * Q_BYTES

    @inlined
    def k_slot(smem, n):
        return smem + K_AT + n % KV_RING * KV_BYTES

    @inlined
    def v_slot(smem, n):
        return smem + V_AT + n % KV_RING * KV_BYTES

    to.q_slot, to.k_slot, to.v_slot = q_slot, k_slot, v_slot
    return to


@cache
def events(config):
    """(barrier, wait, wait_before, arrive) of events of works, of Q, and of K and V."""
    return SimpleNamespace(work=ring(WORK_SLOTS), q=ring(config.q_slots), kv=ring(config.stages))


@cache
def works(config):
    """`descriptions` of the works of a block."""
    return descriptions(layout(config).WORKS, WORK_SLOTS, config.block_m, config.block_n)


# --- warp 0 --------------------------------------------------------------------------------------


@cache
def loader(config):
    """The warp that describes works and loads their tiles."""
    to, BLOCK_N, OVERLAP = layout(config), config.block_n, config.q_slots > 1
    STAGES = config.stages
    Q_ROWS, KV_ROWS = i32(config.block_m), i32(BLOCK_N)
    WORK_FULL, WORK_EMPTY, Q_FULL, Q_EMPTY = to.WORK_FULL, to.WORK_EMPTY, to.Q_FULL, to.Q_EMPTY
    K_FULL, K_EMPTY, V_FULL, V_EMPTY = to.K_FULL, to.K_EMPTY, to.V_FULL, to.V_EMPTY
    q_slot, k_slot, v_slot = to.q_slot, to.k_slot, to.v_slot
    _, _, wait_work_before, arrive_work = events(config).work
    q_event, _, wait_q_before, _ = events(config).q
    kv_event, _, wait_kv_before, _ = events(config).kv
    see_map, load_tile, _, _ = copies(config.loaded_columns, config.tma)
    find, describe, write, field, _, _ = works(config)

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
                if STAGES == 1:  # the next K has to wait until this one's V is there
                    load_v(smem, turn, n, n_block, v, v_map)
                load_k(smem, turn, u32(n + ONE), i32(n_block - 1), k, k_map)
                if STAGES > 1:
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

    return load


# --- warps 1 and 2 -------------------------------------------------------------------------------


@cache
def guards(config):
    """The warps that keep what is not finite in V from queries that must not see it.

    Of float32 from all: an infinity times a part of p that is 0 would be NaN.
    """
    to, LANES, ALL = layout(config), config.lanes, config.parts > 1
    WORK_FULL, WORK_EMPTY, V_FULL, V_READY = to.WORK_FULL, to.WORK_EMPTY, to.V_FULL, to.V_READY
    v_slot = to.v_slot
    _, wait_work, _, arrive_work = events(config).work
    _, wait_kv, _, arrive_kv = events(config).kv
    _, _, write, field, _, masked = works(config)
    clean = guard(config.factors, config.block_n, config.head_dim).clean

    @inlined
    def guard_v(smem, warp):
        lane, turn, n = lane_index(), u32(0), u32(0)
        wait_work(smem, WORK_FULL, turn)
        while field(smem, turn, END) > 0:
            n_block, begin = field(smem, turn, END), field(smem, turn, BEGIN)
            while n_block > begin:
                n_block = i32(n_block - 1)
                wait_kv(smem, V_FULL, n)
                if ALL or masked(smem, turn, n_block):
                    if clean(v_slot(smem, n), i32(warp - 1), GUARDS) and lane == 0:
                        write(smem, turn, BAD, i32(1))
                cuda.syncwarp()  # no lane reads the description after the last arrival
                if lane < LANES:
                    arrive_kv(smem, V_READY, n)
                n = u32(n + ONE)
            arrive_work(smem, WORK_EMPTY, turn)
            turn = u32(turn + ONE)
            wait_work(smem, WORK_FULL, turn)

    return guard_v


# --- warps 4 and up ------------------------------------------------------------------------------


@cache
def consumer(config):
    """What a warp that computes does beside its products."""
    to, BLOCK_N, ALL = layout(config), config.block_n, config.parts > 1
    WORK_FULL, K_FULL, K_EMPTY = to.WORK_FULL, to.K_FULL, to.K_EMPTY
    V_READY, V_EMPTY = to.V_READY, to.V_EMPTY
    _, wait_work, _, _ = events(config).work
    _, wait_kv, _, arrive_kv = events(config).kv
    _, _, _, field, tiles_of, masked = works(config)
    restore = guard(config.dtype, BLOCK_N, config.head_dim).restore
    mask, _, _ = scores(config.factors, BLOCK_N)
    O_COLUMNS, O_STEP = i32(config.o_columns), u32(config.o_step)

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
    def hide(smem, warp, turn, n_block, s, left, right, upper_left):
        """-inf where a query does not see a key."""
        row, column = rows_of(warp)
        q_length, kv_length = field(smem, turn, Q_LENGTH), field(smem, turn, KV_LENGTH)
        start = i32(n_block * BLOCK_N + column)
        end = i32(kv_length - start)
        offset = alignment(q_length, kv_length, upper_left)
        key = i32(field(smem, turn, ROW0) + row + offset - start)
        for r in range(2):
            mask(s, r, i32(key + 8 * r - left), min(i32(key + 8 * r + right + 1), end), MINUS_INF)

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
        """O += what was kept from it, of the tiles that are cleaned."""
        q_length, kv_length = field(smem, turn, Q_LENGTH), field(smem, turn, KV_LENGTH)
        offset = alignment(q_length, kv_length, upper_left)
        for n_block in range(field(smem, turn, BEGIN), field(smem, turn, END)):
            if ALL or masked(smem, turn, n_block):
                key = i32(n_block * BLOCK_N)
                end = min(i32(key + BLOCK_N), kv_length)
                while key < end:
                    row = i32(key - offset - row0)  # sees this key, as do its neighbours
                    first = max(i32(row - right), i32(0))
                    last = min(i32(row + left + 1), i32(q_length - row0), i32(16))
                    v_row = v[field(smem, turn, BATCH), key, field(smem, turn, KV_HEAD)]
                    restore(tile, O_COLUMNS, v_row, column0, first, last, O_STEP)
                    key = i32(key + 1)

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

    return SimpleNamespace(
        consumer_of=consumer_of,
        speaks=speaks,
        give_back=give_back,
        hide=hide,
        restart=restart,
        close=close,
        add_bad_rows=add_bad_rows,
        skip=skip,
        visit=visit,
    )


@cache
def barriers(config):
    """What makes them, by one thread."""
    to, Q_SLOTS, STAGES = layout(config), config.q_slots, config.stages
    LANES, CONSUMERS = config.lanes, config.consumers
    READERS = u32(128 * CONSUMERS + 32 * int(GUARDS))  # of descriptions
    WORK_FULL, WORK_EMPTY, Q_FULL, Q_EMPTY = to.WORK_FULL, to.WORK_EMPTY, to.Q_FULL, to.Q_EMPTY
    K_FULL, K_EMPTY, V_FULL = to.K_FULL, to.K_EMPTY, to.V_FULL
    V_READY, V_EMPTY = to.V_READY, to.V_EMPTY
    of = events(config)
    work_event, q_event, kv_event = of.work[0], of.q[0], of.kv[0]

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

    return make_barriers
