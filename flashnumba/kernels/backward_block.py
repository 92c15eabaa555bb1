"""A block of the Hopper backwards (backward_wgmma.py, backward_split.py), but for what computes.

What is where in shared memory, which keys and queries a work is, the warps that load, add dq in
global memory, and guard against what is not finite, and what both backwards' consumers do alike.
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
from flashnumba.device.sequence import leave_works, length, next_work, query_tiles
from flashnumba.device.sequence import place as place_of_work
from flashnumba.ptx.barrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init
from flashnumba.ptx.memory import fence_proxy_async_global, st_release_u32, wait_acquire_u32
from flashnumba.ptx.shared import (
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_v2_f32,
    st_shared_u32,
)
from flashnumba.ptx.thread import opaque
from flashnumba.ptx.tma import (
    cp_async_bulk_commit_group,
    cp_async_bulk_load,
    cp_async_bulk_wait_group,
    cp_async_bulk_wait_group_read,
    cp_reduce_async_bulk_add_f32,
)
from flashnumba.window import alignment

ALL_LANES = 0xFFFFFFFF
i32, u32, f32 = np.int32, np.uint32, np.float32
ONE, TWO, FOUR, NO_WORK = u32(1), u32(2), u32(4), i32(-1)


@cache
def layout(config):
    """Where things are in shared memory, in bytes, and how many bytes a tile has.

    K, V; Q, dO; dS, dQ, P; lse and delta; flags of keys that are not finite; the work; barriers.
    """
    to = SimpleNamespace()
    to.KV_BYTES, to.Q_BYTES = u32(config.kv_bytes), u32(config.q_bytes)
    to.DS_BYTES, to.DQ_BYTES = u32(config.ds_bytes), u32(config.dq_bytes)
    to.STATS, to.STATS_BYTES = u32(4 * config.block_m), u32(8 * config.block_m)  # delta after lse
    stages, ds_slots = config.stages, config.ds_slots
    to.K, to.V = u32(0), to.KV_BYTES
    to.Q = u32(to.V + to.KV_BYTES)
    to.DO = u32(to.Q + stages * to.Q_BYTES)
    to.DS = u32(to.DO + stages * to.Q_BYTES)
    to.DQ = u32(to.DS + ds_slots * to.DS_BYTES)
    to.P = u32(to.DQ + 2 * config.staged * config.dq_bytes)
    to.LSE = u32(to.P + ds_slots * config.p_bytes)
    to.FLAGS = u32(to.LSE + config.stats_slots * to.STATS_BYTES)
    to.WORK = u32(to.FLAGS + 4 * config.block_n + 8)
    (
        to.N_BLOCK, to.KV_HEAD, to.BATCH, to.HEAD, to.COUNT, to.BEGIN, to.FULL_BEGIN, to.FULL_END,
        to.END, to.Q_LENGTH, to.KV_LENGTH, to.OFFSET, to.BEFORE_BEGIN, to.BEFORE_END,
    ) = (u32(to.WORK + 4 * i) for i in range(14))  # fmt: skip
    at = u32(to.WORK + 64)
    to.KV_FULL, to.KV_READY, to.KV_EMPTY = (u32(at + 8 * i) for i in range(3))
    to.DQ_FULL, to.DQ_EMPTY, to.DS_FULL = (u32(at + 24 + 16 * i) for i in range(3))
    at = u32(to.DS_FULL + 8 * ds_slots)
    to.Q_FULL, to.Q_READY, to.Q_EMPTY, to.DO_FULL, to.DO_READY, to.DO_EMPTY = (
        u32(at + 8 * stages * i) for i in range(6)
    )
    to.Q_EMPTY_2, to.DO_EMPTY_2 = (u32(at + 8 * stages * i) for i in (6, 7))  # of second pieces
    at = u32(at + 8 * stages * (4 + 2 * config.pieces))
    to.P_FULL, to.P_EMPTY = at, u32(at + 8)
    assert at + 16 <= config.shared_bytes
    return to


@inlined
def field(smem, i):
    """A number of the work whose keys are there."""
    return i32(ld_shared_u32(u32(smem + i)))


@inlined
def step(head, m_block, begin, end):
    """The tile of queries before this one, after a head's first the last of the next head."""
    m_block = i32(m_block - 1)
    return (head, m_block) if m_block >= begin else (i32(head + 1), i32(end - 1))


@cache
def descriptions(config):
    """(describe, masked): a work is a tile of keys of one head, and the queries that see it."""
    to, tiles_of = layout(config), query_tiles(config.block_m, config.block_n)
    WORK, BEGIN, FULL_BEGIN, FULL_END, END = to.WORK, to.BEGIN, to.FULL_BEGIN, to.FULL_END, to.END
    DETERMINISTIC = config.deterministic

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
            i = WORK
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

    return describe, masked


@cache
def loader(config):
    """What warp 0 does: it finds the works, and loads K and V, and tile after tile Q and dO."""
    to, BLOCK_M, BLOCK_N = layout(config), config.block_m, config.block_n
    KV_FULL, KV_EMPTY, Q_FULL, Q_EMPTY = to.KV_FULL, to.KV_EMPTY, to.Q_FULL, to.Q_EMPTY
    DO_FULL, DO_EMPTY, N_BLOCK, KV_HEAD = to.DO_FULL, to.DO_EMPTY, to.N_BLOCK, to.KV_HEAD
    BATCH, HEAD, BEGIN, END, COUNT = to.BATCH, to.HEAD, to.BEGIN, to.END, to.COUNT
    V, Q, DO, LSE = to.V, to.Q, to.DO, to.LSE
    SLOTS, Q_BYTES, STATS_BYTES = u32(config.stages), to.Q_BYTES, to.STATS_BYTES
    STATS_SLOTS, DO_FIRST = u32(config.stats_slots), config.do_first
    PIECES, Q_EMPTY_2, DO_EMPTY_2 = config.pieces, to.Q_EMPTY_2, to.DO_EMPTY_2
    M_ROWS, N_ROWS = i32(BLOCK_M // config.pieces), i32(BLOCK_N)
    BESIDE = u32(128 * BLOCK_M // config.pieces)  # bytes from a piece of a sub-tile to the next
    one_event, _, wait_one_before, arrive_one = ring(1)
    q_event, _, wait_q_before, _ = ring(config.stages)
    see_map, load_tile, _, _ = copies(config.loaded_columns, True, config.parts)
    load_piece = copies(config.loaded_columns, True, config.parts, config.pieces)[1]
    describe, _ = descriptions(config)

    @inlined
    def load_second(smem, n, at, empty, full, x_map, row0, h, b):
        """The second piece of a tile, where it is loaded in two."""
        if PIECES > 1:
            wait_q_before(smem, empty, n)
            load_piece(u32(at + BESIDE), None, x_map, full, M_ROWS, i32(row0 + M_ROWS), h, b)

    @inlined
    def load_stats(smem, n, full, stats, tile):
        """What is exp(s) divided by, and delta."""
        if lane_index() == 0:
            mbarrier_arrive_expect_tx(full, STATS_BYTES)
            at = u32(smem + LSE + n % STATS_SLOTS * STATS_BYTES)
            cp_async_bulk_load(at, stats[tile], STATS_BYTES, full)

    @inlined
    def load_do(smem, n, do_map, row0, head, b):
        wait_q_before(smem, DO_EMPTY, n)
        full, at = q_event(smem, DO_FULL, n), u32(smem + n % SLOTS * Q_BYTES)
        load_piece(u32(at + DO), None, do_map, full, M_ROWS, row0, head, b)
        load_second(smem, n, u32(at + DO), DO_EMPTY_2, full, do_map, row0, head, b)
        return full

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
            load_tile(smem + V, None, v_map, full, N_ROWS, row0, kv_h, b)
            m_block, stop = i32(end - 1), u32(n + u32(field(smem, COUNT)))
            while n != stop:
                row0 = i32(m_block * BLOCK_M)
                if DO_FIRST:
                    full = load_do(smem, n, do_map, row0, head, b)
                    load_stats(smem, n, full, stats, (b, head, m_block))
                wait_q_before(smem, Q_EMPTY, n)
                full, at = q_event(smem, Q_FULL, n), u32(smem + n % SLOTS * Q_BYTES)
                load_piece(u32(at + Q), None, q_map, full, M_ROWS, row0, head, b)
                load_second(smem, n, u32(at + Q), Q_EMPTY_2, full, q_map, row0, head, b)
                if not DO_FIRST:
                    load_stats(smem, n, full, stats, (b, head, m_block))
                    load_do(smem, n, do_map, row0, head, b)
                n = u32(n + ONE)
                head, m_block = step(head, m_block, begin, end)
            work, turn = next_work(counter), u32(turn + ONE)
        wait_one_before(smem, KV_EMPTY, turn)
        if lane == 0:
            st_shared_u32(u32(smem + N_BLOCK), u32(NO_WORK))
            arrive_one(smem, KV_FULL, turn)
            arrive_one(smem, KV_FULL, turn)
        leave_works(counter)

    return load


@cache
def adder(config):
    """What warp 1 does: it adds dq from shared memory to global, or says whose turn it is."""
    to, STAGED, DETERMINISTIC = layout(config), config.staged, config.deterministic
    KV_FULL, KV_READY, DQ_FULL, DQ_EMPTY = to.KV_FULL, to.KV_READY, to.DQ_FULL, to.DQ_EMPTY
    N_BLOCK, BATCH, HEAD, COUNT = to.N_BLOCK, to.BATCH, to.HEAD, to.COUNT
    BEGIN, END, BEFORE_BEGIN, BEFORE_END = to.BEGIN, to.END, to.BEFORE_BEGIN, to.BEFORE_END
    DQ, DQ_BYTES = to.DQ, to.DQ_BYTES
    _, wait_one, _, arrive_one = ring(1)
    _, wait_two, _, arrive_two = ring(2)

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
            begin, end = field(smem, BEGIN), field(smem, END)
            stop = u32(n + u32(field(smem, COUNT)))
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
                    at = u32(smem + DQ + n % TWO * DQ_BYTES)
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

    return add_tiles


@cache
def guards(config):
    """What warps 2 and 3 do: they guard tensor cores against what is not finite."""
    to = layout(config)
    KV_FULL, KV_READY, Q_FULL, Q_READY = to.KV_FULL, to.KV_READY, to.Q_FULL, to.Q_READY
    DO_FULL, DO_READY, N_BLOCK, COUNT = to.DO_FULL, to.DO_READY, to.N_BLOCK, to.COUNT
    Q, DO, LSE, FLAGS = to.Q, to.DO, to.LSE, to.FLAGS
    SLOTS, Q_BYTES, STATS_BYTES = u32(config.stages), to.Q_BYTES, to.STATS_BYTES
    STATS_SLOTS, STATS_FULL = u32(config.stats_slots), DO_FULL if config.do_first else Q_FULL
    _, wait_one, _, arrive_one = ring(1)
    _, wait_q, _, arrive_q = ring(config.stages)
    poison = guard(config.factors, config.block_n, config.loaded_columns).poison
    clear = guard(config.factors, config.block_m, config.loaded_columns).clear
    _, masked = descriptions(config)

    @inlined
    def guard_tiles(smem, warp):
        """K from queries that must not see it; Q and dO that see no key from all keys."""
        n, turn, full, ready, at = u32(0), u32(0), DO_FULL, DO_READY, DO
        if warp == 2:
            full, ready, at = Q_FULL, Q_READY, Q
        wait_one(smem, KV_FULL, turn)
        while field(smem, N_BLOCK) != NO_WORK:
            stop = u32(n + u32(field(smem, COUNT)))
            if masked(smem):
                poison(smem, u32(smem + FLAGS), i32(warp - 2), i32(2))
            arrive_one(smem, KV_READY, turn)
            while n != stop:
                wait_q(smem, STATS_FULL, n)
                wait_q(smem, full, n)
                tile = u32(smem + at + n % SLOTS * Q_BYTES)
                clear(tile, u32(smem + LSE + n % STATS_SLOTS * STATS_BYTES))
                arrive_q(smem, ready, n)
                n = u32(n + ONE)
            turn = u32(turn + ONE)
            wait_one(smem, KV_FULL, turn)
        arrive_one(smem, KV_READY, turn)

    return guard_tiles


# --- warps 4 and up ------------------------------------------------------------------------------


@cache
def consumer(config):
    """What a warp that computes does beside its products."""
    to, BLOCK_M, BLOCK_N = layout(config), config.block_m, config.block_n
    SHARED, QUERIES = config.shared_keys, config.queries
    OWN_KEYS = config.block_n > 64  # a consumer has keys of its own
    SLOTS, Q_BYTES = u32(config.stages), to.Q_BYTES
    STATS_SLOTS, STATS_BYTES = u32(config.stats_slots), to.STATS_BYTES
    N_BLOCK, Q_LENGTH, KV_LENGTH, OFFSET = to.N_BLOCK, to.Q_LENGTH, to.KV_LENGTH, to.OFFSET
    LSE, FLAGS, ZERO = to.LSE, to.FLAGS, f32(0)
    _, masked = descriptions(config)
    mask, _, _ = scores(config.factors, QUERIES)

    @inlined
    def slot(start, n):
        return u32(start + n % SLOTS * Q_BYTES)

    @inlined
    def uniform(x):
        """x, which is the same in all lanes: now ptxas knows it."""
        return cuda.shfl_sync(ALL_LANES, x, 0)

    @inlined
    def masked_tile(full, m_block):
        return not full[0] <= m_block < full[1]

    @inlined
    def consumer_of(warp):
        return u32(u32(warp) >> u32(2)) - ONE

    @inlined
    def row0_of(warp):
        """The first of a warp's 16 keys in the tile."""
        return i32(warp * 16 - 64) if OWN_KEYS else i32(u32(warp) & u32(3)) * i32(16)

    @inlined
    def query0_of(warp):
        """The first query of its consumer's s and dp."""
        return u32(consumer_of(warp) * u32(QUERIES)) if SHARED else u32(0)

    @inlined
    def load_stats(smem, n, query0, offset, x):
        """Of this thread's queries: lse, or delta where `offset` is STATS."""
        pair = cuda.local.array(2, np.float32)
        lane = u32(lane_index()) & u32(3)
        at = u32(smem + LSE + offset + n % STATS_SLOTS * STATS_BYTES)
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
            bad = ld_shared_f32(u32(smem + FLAGS + u32(4 * (row + 8 * r))))
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
    def find_poison(smem):
        """Whether some key of the work is not finite and some query must not see it."""
        found = False
        if masked(smem):
            flags = u32(smem + FLAGS + u32(4 * BLOCK_N))
            bad = ld_shared_u32(flags) | ld_shared_u32(u32(flags + u32(4)))
            found = uniform(i32(bad)) != 0
        return found

    return SimpleNamespace(
        slot=slot,
        uniform=uniform,
        masked_tile=masked_tile,
        consumer_of=consumer_of,
        row0_of=row0_of,
        query0_of=query0_of,
        load_stats=load_stats,
        add_poison=add_poison,
        hide=hide,
        find_poison=find_poison,
    )


@cache
def barriers(config):
    """What one thread does first: it makes all barriers."""
    to, STAGES, DS_SLOTS = layout(config), config.stages, config.ds_slots
    KV_FULL, KV_READY, KV_EMPTY = to.KV_FULL, to.KV_READY, to.KV_EMPTY
    Q_FULL, Q_READY, Q_EMPTY = to.Q_FULL, to.Q_READY, to.Q_EMPTY
    DO_FULL, DO_READY, DO_EMPTY = to.DO_FULL, to.DO_READY, to.DO_EMPTY
    DQ_FULL, DQ_EMPTY, DS_FULL = to.DQ_FULL, to.DQ_EMPTY, to.DS_FULL
    P_FULL, P_EMPTY, WARPGROUP = to.P_FULL, to.P_EMPTY, u32(128)
    CONSUMERS, LANES = u32(config.consumers), u32(32)
    PIECES, Q_EMPTY_2, DO_EMPTY_2 = config.pieces, to.Q_EMPTY_2, to.DO_EMPTY_2
    Q_LOADS = u32(config.pieces + 1 - config.do_first)  # lse and delta come with one of both
    DO_LOADS = u32(config.pieces + config.do_first)
    THREADS, DQ_THREADS = u32(128 * config.consumers), u32(config.dq_threads)
    KV_GUARDS = u32(64 + 32 * (config.staged or config.deterministic))
    one_event, two_events, ds_event, q_event = (
        ring(slots)[0] for slots in (1, 2, DS_SLOTS, STAGES)
    )

    @inlined
    def make_barriers(smem):
        for i in range(DS_SLOTS):
            mbarrier_init(ds_event(smem, DS_FULL, u32(i)), THREADS)
        for i in range(2):
            mbarrier_init(two_events(smem, DQ_FULL, u32(i)), DQ_THREADS)
            mbarrier_init(two_events(smem, DQ_EMPTY, u32(i)), ONE)
        mbarrier_init(one_event(smem, KV_FULL, u32(0)), TWO)
        mbarrier_init(one_event(smem, KV_READY, u32(0)), KV_GUARDS)
        mbarrier_init(one_event(smem, KV_EMPTY, u32(0)), THREADS)
        mbarrier_init(one_event(smem, P_FULL, u32(0)), WARPGROUP)
        mbarrier_init(one_event(smem, P_EMPTY, u32(0)), WARPGROUP)
        for i in range(STAGES):
            mbarrier_init(q_event(smem, Q_FULL, u32(i)), Q_LOADS)
            mbarrier_init(q_event(smem, Q_READY, u32(i)), LANES)
            mbarrier_init(q_event(smem, DO_READY, u32(i)), LANES)
            mbarrier_init(q_event(smem, Q_EMPTY, u32(i)), THREADS)
            mbarrier_init(q_event(smem, DO_FULL, u32(i)), DO_LOADS)
            mbarrier_init(q_event(smem, DO_EMPTY, u32(i)), CONSUMERS)
            if PIECES > 1:
                mbarrier_init(q_event(smem, Q_EMPTY_2, u32(i)), THREADS)
                mbarrier_init(q_event(smem, DO_EMPTY_2, u32(i)), CONSUMERS)
        fence_mbarrier_init()

    return make_barriers
