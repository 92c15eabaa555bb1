"""Where a work is: its batch entry, head and rows, and which key tiles those rows visit.

One warp finds out and describes the work in shared memory; the others read what they need.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.extending import register_jitable

from flashnumba.device import inlined
from flashnumba.device.pipeline import lane_index
from flashnumba.ptx.shared import ld_shared_u32, st_shared_u32
from flashnumba.ptx.thread import opaque
from flashnumba.window import alignment, interval, tiles

i32, u32 = np.int32, np.uint32
ALL_LANES = 0xFFFFFFFF
# The numbers that describe a work, by their place in bytes: the key tiles that the 64 rows of
# consumers 0, 1 and 2 visit and those that all its rows do, four numbers each; its rows; whether V
# was cleaned (device/guard.py).
TILES_BYTES, ALL_ROWS = 16, 3
WRITERS = ALL_ROWS + 1  # lanes that describe
BEGIN, FULL_BEGIN, FULL_END, END = (u32(TILES_BYTES * ALL_ROWS + 4 * i) for i in range(4))
ROW0, ROW_END, HEAD, KV_HEAD, BATCH, Q_LENGTH, KV_LENGTH, BAD = (
    u32(END + 4 + 4 * i) for i in range(8)
)
DESCRIPTION_BYTES = 96

for function in (alignment, interval, tiles):
    register_jitable(function)  # callable in kernels; on the host they stay plain Python


@inlined
def length(lengths, b, seqlen):
    """How many rows of batch entry b count; all if `lengths` is empty. Values are clamped."""
    if lengths.shape[0] == 0:
        return seqlen
    return min(max(lengths[b], 0), seqlen)


@inlined
def place(work, group, heads, m_blocks):
    """(m_block, head) of a work, over all `heads` of the batch; unsigned 32-bit throughout.

    Works come in groups of heads whose keys fit the L2 cache together, and in a group the last rows
    first, which have the most keys under a causal mask: what is left at the end is short.
    """
    first = u32(work // u32(group * m_blocks)) * group
    size = min(group, u32(heads - first))
    work = u32(work - u32(first * m_blocks))
    return u32(m_blocks - 1 - work // size), u32(first + work % size)


@inlined
def next_work(counter):
    """What a warp's block works on after its first work, whose number is that of the block."""
    work = i32(0)
    if lane_index() == 0:
        work = i32(cuda.atomic.add(counter, 0, 1) + i32(cuda.gridDim.x))
    return cuda.shfl_sync(ALL_LANES, work, 0)


@inlined
def leave_works(counter):
    """The last block to end leaves the counter as it was: zeros."""
    if lane_index() == 0 and cuda.atomic.add(counter, 1, 1) == cuda.gridDim.x - 1:
        counter[0] = 0
        counter[1] = 0


@cache
def query_tiles(block_m, block_n):
    """Which tiles of `block_m` queries see a tile of `block_n` keys, and which see all of it."""
    BLOCK_M, BLOCK_N = block_m, block_n

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

    return tiles_of


@cache
def descriptions(at, slots, block_m, block_n):
    """(find, describe, write, field, tiles_of, masked) of works in `slots` slots from byte `at`."""
    AT, SLOTS, BYTES, CONSUMERS = u32(at), u32(slots), u32(DESCRIPTION_BYTES), block_m // 64
    NOTHING, TILES, FOUR, EIGHT, TWELVE = i32(0), u32(TILES_BYTES), u32(4), u32(8), u32(12)

    @inlined
    def write(smem, turn, i, value):
        st_shared_u32(u32(smem + AT + i + turn % SLOTS * BYTES), u32(value))

    @inlined
    def field(smem, turn, i):
        """A number of this block's work number `turn`."""
        return i32(ld_shared_u32(u32(smem + AT + i + turn % SLOTS * BYTES)))

    @inlined
    def find(work, group, lse, v, q_lengths, kv_lengths, left, right, upper_left):
        """Where a work is, for `describe`; each lane has tiles of its own.

        Where rows do not fill the last tile of them, the first is the short one: under a causal
        mask, it has the fewest keys. Lanes 0 to 2 find the tiles of one consumer's rows, lane 3
        those of all. Rows without keys, and works without, visit one tile, all of it masked.
        """
        lane = lane_index()
        heads, seqlen_q = opaque(u32(lse.shape[1])), opaque(u32(lse.shape[2]))
        parts = u32(seqlen_q + u32(63)) // u32(64)
        m_blocks = u32(parts + u32(CONSUMERS - 1)) // u32(CONSUMERS)
        all_heads = u32(heads * u32(lse.shape[0]))
        m_block, head = place(u32(work), opaque(u32(group)), all_heads, u32(m_blocks))
        row_end = i32(64 * (parts - (m_blocks - 1 - m_block) * CONSUMERS))
        row0, h, b = max(i32(row_end - block_m), i32(0)), i32(head % heads), i32(head // heads)
        row_end = min(row_end, i32(seqlen_q))
        q_length = i32(length(q_lengths, b, i32(seqlen_q)))
        kv_length = i32(length(kv_lengths, b, v.shape[1]))
        offset = alignment(q_length, kv_length, upper_left)
        first, rows = row0, i32(block_m)
        if lane < ALL_ROWS:
            first, rows = i32(row0 + 64 * lane), i32(64)
        last = min(i32(first + rows), row_end, q_length) - 1
        begin, full_begin, full_end, end = tiles(
            first, last, offset, left, right, kv_length, block_n
        )
        all_begin = cuda.shfl_sync(ALL_LANES, i32(begin), ALL_ROWS)
        all_end = max(cuda.shfl_sync(ALL_LANES, i32(end), ALL_ROWS), i32(all_begin + 1))
        begin = min(max(i32(begin), all_begin), i32(all_end - 1))
        end = min(max(i32(end), i32(begin + 1)), all_end)
        kv_h = i32(u32(h) // (heads // u32(v.shape[2])))
        visited = begin, i32(full_begin), i32(full_end), end
        return visited, (row0, row_end, h, kv_h, b, q_length, kv_length, NOTHING)

    @inlined
    def describe(smem, turn, visited, rows):
        """Write down what `find` found, by a warp."""
        lane = lane_index()
        if lane < WRITERS:
            i = u32(TILES * u32(lane))
            for number in visited:
                write(smem, turn, i, number)
                i = u32(i + FOUR)
        if lane == 0:
            i = ROW0
            for number in rows:
                write(smem, turn, i, number)
                i = u32(i + FOUR)
        cuda.syncwarp()

    @inlined
    def tiles_of(smem, turn, consumer):
        """(begin, full_begin, full_end, end) of one consumer's rows."""
        i = u32(TILES * consumer)
        begin, full_begin = field(smem, turn, i), field(smem, turn, u32(i + FOUR))
        full_end, end = field(smem, turn, u32(i + EIGHT)), field(smem, turn, u32(i + TWELVE))
        return begin, full_begin, full_end, end

    @inlined
    def masked(smem, turn, n_block):
        """Whether some row of the work does not see some key of a tile."""
        return not field(smem, turn, FULL_BEGIN) <= n_block < field(smem, turn, FULL_END)

    return find, describe, write, field, tiles_of, masked
