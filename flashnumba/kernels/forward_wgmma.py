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

Loads, guards and events are in forward_block.py.

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
from flashnumba.device.pipeline import lane_index
from flashnumba.device.sequence import (
    BAD,
    BATCH,
    END,
    HEAD,
    ROW0,
    ROW_END,
)
from flashnumba.device.softmax import online_softmax
from flashnumba.kernels.forward_block import (
    GUARDS,
    ONE,
    barriers,
    consumer,
    events,
    guards,
    layout,
    loader,
    works,
)
from flashnumba.ptx.barrier import setmaxnreg_dec, setmaxnreg_inc
from flashnumba.ptx.layout import descriptor_constant, k_major, mn_major
from flashnumba.ptx.shared import cvta_to_shared, fence_proxy_async, st_shared_f32_if_negative
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
    STAGES, NEGATIVE, OVERLAP = config.stages, config.negative, config.q_slots > 1
    S_SIZE, P_SIZE, ACC_SIZE = BLOCK_N // 2, BLOCK_N // 4, D // 2
    K_MAJOR, MN_MAJOR = u64(descriptor_constant()), u64(descriptor_constant(128 * BLOCK_N))
    ROWS_64 = u32(64 * 128)
    O_COLUMNS, O_BYTES = i32(config.o_columns), u32(2 * 16 * config.o_columns)

    to, of = layout(config), consumer(config)
    q_slot, k_slot, v_slot, O_AT, SCRATCH = to.q_slot, to.k_slot, to.v_slot, to.O, to.SCRATCH
    WORK_EMPTY, Q_FULL, Q_EMPTY, K_FULL, K_EMPTY = (
        to.WORK_EMPTY, to.Q_FULL, to.Q_EMPTY, to.K_FULL, to.K_EMPTY,
    )  # fmt: skip
    V_READY, V_EMPTY = to.V_READY, to.V_EMPTY
    _, _, _, arrive_work = events(config).work
    _, wait_q, _, arrive_q = events(config).q
    _, wait_kv, _, _ = events(config).kv
    _, _, _, field, _, _ = works(config)
    consumer_of, hide, speaks, give_back = of.consumer_of, of.hide, of.speaks, of.give_back
    restart, close, add_bad_rows, skip, visit = (
        of.restart, of.close, of.add_bad_rows, of.skip, of.visit,
    )  # fmt: skip
    make_barriers, load, guard_v = barriers(config), loader(config), guards(config)
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
    see_map, _, store_rows, wait_stores = copies(D, config.tma)
    softmax = online_softmax(BLOCK_N)
    _, to_halves, _ = scores(config.dtype, BLOCK_N)
    rescale, divide, to_shared = output(config.dtype, D)

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
            hide(smem, warp, turn, n_block, s, left, right, upper_left)
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
