"""The forward pass of float32 on Hopper: six products of bfloat16 for one (device/parts.py).

First `split` writes q, k and v part by part, each part in columns of its own: a row of head_dim
float32 becomes one of 3 head_dim bfloat16. Then blocks and warp roles are those of
forward_wgmma.py. With so much to multiply tensor cores need no second product in flight: while one
consumer computes its softmax, the other multiplies. Of a tile of keys, each consumer:

    s = q k^T                    all six products, the smallest first; K is given back
    m' = max(m, max s); a = e^(m - m'); p = e^(s - m'); l' = a l + sum p; acc = a acc
    tile = p v                   p in three parts in registers, V is given back
    acc = acc + tile

Tensor cores cut off what does not fit an accumulator. Over thousands of products that would be a
bias of many bits; so each tile's sum begins at 0, and acc is a sum of rounded float32 additions. O
takes the place of Q.

Source: Henry et al., Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations (2019): three-part numbers; Dao, FlashAttention-2 (2023).
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from flashnumba.config import Kernel
from flashnumba.device import inlined
from flashnumba.device.copy import warp_store
from flashnumba.device.fragment import descriptor, floats_to_shared, output
from flashnumba.device.parts import cut_off, factors, to_parts
from flashnumba.device.pipeline import lane_index
from flashnumba.device.sequence import BAD, BATCH, END, HEAD, ROW0, ROW_END
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
from flashnumba.launches import ROWS_AT_ONCE
from flashnumba.ptx.barrier import bar_sync, setmaxnreg_dec, setmaxnreg_inc
from flashnumba.ptx.layout import descriptor_constant, k_major, mn_major
from flashnumba.ptx.shared import cvta_to_shared, fence_proxy_async
from flashnumba.ptx.thread import cvt_bf16x2
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
def make_split(config):
    """Rows of float32 as bfloat16, part by part; columns past head_dim are zeros.

    What is not finite is its first part alone: what it leaves would be NaN.
    """
    D, PARTS, ROWS = config.head_dim, config.parts, u32(ROWS_AT_ONCE)

    @inlined
    def column_of(x, b, s, h, column):
        return x[b, s, h, column] if column < x.shape[3] else f32(0)

    @inlined
    def part_of(x, part):
        return cut_off(x) if part < PARTS - 1 and abs(x) < f32(np.inf) else x

    @inlined
    def rest_of(x):
        return f32(x - cut_off(x)) if abs(x) < f32(np.inf) else f32(0)

    def split(x, out):
        lane = lane_index()
        row = u32(cuda.blockIdx.x) * ROWS + (u32(cuda.threadIdx.x) >> u32(5))
        heads, seqlen = u32(x.shape[2]), u32(x.shape[1])
        h, s, b = row % heads, row // heads % seqlen, row // heads // seqlen
        words = out.view(np.uint32)  # two bfloat16
        if b < u32(x.shape[0]):
            for i in range(D // 64):
                column = i32(2 * lane + 64 * i)
                y, z = column_of(x, b, s, h, column), column_of(x, b, s, h, i32(column + 1))
                for part in range(PARTS):
                    pair = cvt_bf16x2(part_of(y, part), part_of(z, part))
                    words[b, s, h, lane + 32 * i + D // 2 * part] = pair
                    y, z = rest_of(y), rest_of(z)

    x, y = types.Array(types.float32, 4, "A"), types.Array(types.uint16, 4, "C")
    return Kernel(f"split {config}", split, types.void(x, y), 32 * ROWS_AT_ONCE)


@cache
def make_forward(config):
    """o and lse."""
    D, BLOCK_M, BLOCK_N, PARTS = config.head_dim, config.block_m, config.block_n, config.parts
    S_SIZE, P_SIZE, ACC_SIZE = BLOCK_N // 2, PARTS * BLOCK_N // 4, D // 2
    K_MAJOR, MN_MAJOR = u64(descriptor_constant()), u64(descriptor_constant(128 * BLOCK_N))
    ROWS_64, Q_STEP, NEGATIVE = u32(64 * 128), 128 * BLOCK_M, config.negative
    O_APART = config.o_bytes > 0

    to, of = layout(config), consumer(config)
    consumer_of, speaks, give_back, hide, restart, close, add_bad_rows, skip, visit = (
        of.consumer_of, of.speaks, of.give_back, of.hide, of.restart, of.close, of.add_bad_rows,
        of.skip, of.visit,
    )  # fmt: skip
    q_slot, k_slot, v_slot, O_AT = to.q_slot, to.k_slot, to.v_slot, to.O
    WORK_EMPTY, Q_FULL, Q_EMPTY = to.WORK_EMPTY, to.Q_FULL, to.Q_EMPTY
    K_FULL, K_EMPTY, V_READY, V_EMPTY = to.K_FULL, to.K_EMPTY, to.V_READY, to.V_EMPTY
    _, _, _, arrive_work = events(config).work
    _, wait_q, _, arrive_q = events(config).q
    _, wait_kv, _, _ = events(config).kv
    _, _, _, field, _, _ = works(config)
    make_barriers, load, guard_v = barriers(config), loader(config), guards(config)

    # Steps of 16 along the sum, of one pair of parts after the other.
    pairs, of_d, of_keys = factors(PARTS), range(D // 16), range(BLOCK_N // 16)
    q_steps = tuple(k_major(BLOCK_M, i * (D // 16) + k) for i, _ in pairs for k in of_d)
    k_steps = tuple(k_major(BLOCK_N, j * (D // 16) + k) for _, j in pairs for k in of_d)
    p_steps = tuple(i * (BLOCK_N // 16) + k for i, _ in pairs for k in of_keys)
    v_steps = tuple(j * (D // 64) * 128 * BLOCK_N + mn_major(k) for _, j in pairs for k in of_keys)
    gemm_qk = wgmma_ss(BLOCK_N, config.factors, q_steps, k_steps)
    gemm_pv = wgmma_rs(D, config.factors, v_steps, a_steps=p_steps, add=False)
    wait_s, wait_tile = wgmma_wait_group(0, S_SIZE), wgmma_wait_group(0, ACC_SIZE)
    fence_p, clear = wgmma_fence_of(0, P_SIZE), zero(ACC_SIZE)
    release_registers = setmaxnreg_dec(config.registers[0])
    take_registers = setmaxnreg_inc(config.registers[1])
    softmax, split = online_softmax(BLOCK_N), to_parts(PARTS, S_SIZE)
    rescale, divide, _ = output(config.factors, D)
    to_shared, store_rows = floats_to_shared(D, 1, Q_STEP), warp_store(D, 4)

    @inlined
    def scores_of(smem, warp, turn, n, s):
        """s = q k^T."""
        wait_kv(smem, K_FULL, n)
        wgmma_fence()
        q_tile = q_slot(smem, turn) + ROWS_64 * consumer_of(warp)
        gemm_qk(s, descriptor(K_MAJOR, q_tile), descriptor(K_MAJOR, k_slot(smem, n)))
        wgmma_commit_group()
        wait_s(s)
        give_back(smem, K_EMPTY, n)
        if NEGATIVE:
            for i in range(S_SIZE):
                s[i] = -s[i]

    @inlined
    def add_pv(smem, n, p, tile, acc):
        """acc += p v."""
        wait_kv(smem, V_READY, n)
        fence_p(p)
        gemm_pv(tile, p, descriptor(MN_MAJOR, v_slot(smem, n)))
        wgmma_commit_group()
        wait_tile(tile)
        give_back(smem, V_EMPTY, n)
        for i in range(ACC_SIZE):
            acc[i] += tile[i]

    @inlined
    def o_at(smem, turn):
        return u32(smem + O_AT) if O_APART else u32(q_slot(smem, turn))

    @inlined
    def write_o(smem, warp, turn, acc, v, o, left, right, upper_left):
        """By way of shared memory: of Q, when the whole consumer is done with it."""
        together = u32(ONE + consumer_of(warp))
        row = i32(warp * 16 - 64)
        tile, row0 = u32(o_at(smem, turn) + u32(row * 128)), i32(field(smem, turn, ROW0) + row)
        h, b = field(smem, turn, HEAD), field(smem, turn, BATCH)
        bar_sync(together, u32(128))
        to_shared(acc, tile)
        cuda.syncwarp()
        if field(smem, turn, BAD) != 0:
            add_bad_rows(smem, turn, tile, row0, i32(0), v, left, right, upper_left)
            cuda.syncwarp()
        store_rows(o[b, :, h], tile, Q_STEP, 16, row0, field(smem, turn, ROW_END))
        fence_proxy_async()  # TMA writes there next
        bar_sync(together, u32(128))
        if speaks():
            arrive_q(smem, Q_EMPTY, turn)

    @inlined
    def consume(smem, warp, v, o, lse, scale, left, right, upper_left):
        s = cuda.local.array(S_SIZE, np.float32)
        p = cuda.local.array(P_SIZE, np.uint32)
        tile = cuda.local.array(ACC_SIZE, np.float32)
        acc = cuda.local.array(ACC_SIZE, np.float32)
        m = cuda.local.array(2, np.float32)
        l = cuda.local.array(2, np.float32)
        a = cuda.local.array(2, np.float32)
        shift = cuda.local.array(2, np.float32)
        turn, n = u32(0), u32(0)
        before, begin, full_begin, full_end, end, after = visit(smem, warp, turn)
        while field(smem, turn, END) > 0:
            clear(acc)
            restart(m, l, shift)
            large, n_block = False, end
            n = skip(smem, warp, n, before)
            wait_q(smem, Q_FULL, turn)
            while n_block > begin:
                n_block = i32(n_block - 1)
                scores_of(smem, warp, turn, n, s)
                if not full_begin <= n_block < full_end:
                    hide(smem, warp, turn, n_block, s, left, right, upper_left)
                raised, large = softmax(s, m, l, a, shift, large, scale)
                if raised:
                    rescale(acc, a)
                split(p, s)
                add_pv(smem, n, p, tile, acc)
                n = u32(n + ONE)
            close(smem, warp, turn, m, l, a, lse, scale)
            divide(acc, a)
            write_o(smem, warp, turn, acc, v, o, left, right, upper_left)
            arrive_work(smem, WORK_EMPTY, turn)  # by all lanes, so that racecheck can follow
            n, turn = skip(smem, warp, n, after), u32(turn + ONE)
            before, begin, full_begin, full_end, end, after = visit(smem, warp, turn)

    def forward(
        v, o, lse, q_map, k_map, v_map, q_lengths, kv_lengths, counter,
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
                    smem, None, None, v, lse, q_map, k_map, v_map, q_lengths, kv_lengths, counter,
                    left, right, upper_left, works, group,
                )  # fmt: skip
            elif warp <= GUARDS:
                guard_v(smem, warp)
        else:
            take_registers()
            consume(smem, warp, v, o, lse, scale, left, right, upper_left)

    x, n = types.Array(types.float32, 4, "A"), types.Array(types.int64, 1, "A")
    signature = types.void(
        x, x, types.Array(types.float32, 3, "A"), *[types.uint64] * 3, n, n,
        types.Array(types.int32, 1, "A"), types.float32, types.int32, types.int32, types.int64,
        types.int32, types.int32,
    )  # fmt: skip
    key = f"split forward {config}"
    return Kernel(key, forward, signature, config.threads, config.shared_bytes, "a")
