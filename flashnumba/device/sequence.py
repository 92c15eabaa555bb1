"""Where a work is: its batch entry, head and rows, and which key tiles those rows visit.

One warp finds out and describes the work in shared memory; the others read what they need.
"""

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda.extending import register_jitable

from flashnumba.ptx.shared import ld_shared_u32, st_shared_u32
from flashnumba.window import alignment, interval, tiles

# The numbers that describe a work: the key tiles that the 64 rows of consumers 0, 1 and 2 visit and
# those that all its rows do, four numbers each; its rows; whether V was cleaned (device/guard.py).
CONSUMER_TILES, ALL_ROWS = 4, 3
BEGIN, FULL_BEGIN, FULL_END, END = range(CONSUMER_TILES * ALL_ROWS, CONSUMER_TILES * ALL_ROWS + 4)
ROW0, HEAD, KV_HEAD, BATCH, Q_LENGTH, KV_LENGTH, BAD = range(END + 1, END + 8)
DESCRIPTION_BYTES = 96
i32, u32 = np.int32, np.uint32

for function in (alignment, interval, tiles):
    register_jitable(function)  # callable in kernels; on the host they stay plain Python


@cuda.jit(device=True, forceinline=True)
def length(lengths, b, seqlen):
    """How many rows of batch entry b count; all if `lengths` is empty. Values are clamped."""
    if lengths.shape[0] == 0:
        return seqlen
    return min(max(lengths[b], 0), seqlen)


@cuda.jit(device=True, forceinline=True)
def place(work, group, heads, m_blocks):
    """(m_block, head) of a work, over all `heads` of the batch; unsigned 32-bit throughout.

    Works come in groups of heads whose keys fit the L2 cache together, and in a group the last rows
    first, which have the most keys under a causal mask: what is left at the end is short.
    """
    first = u32(work // u32(group * m_blocks)) * group
    size = min(group, u32(heads - first))
    work = u32(work - u32(first * m_blocks))
    return u32(m_blocks - 1 - work // size), u32(first + work % size)


@cache
def descriptions(at, slots):
    """(describe, field, masked) of works described in `slots` slots from byte `at`."""

    @cuda.jit(device=True, forceinline=True)
    def place_of(smem, turn, i):
        return smem + u32(at) + u32(4 * i) + turn % u32(slots) * u32(DESCRIPTION_BYTES)

    @cuda.jit(device=True, forceinline=True)
    def describe(smem, turn, i, value):
        """Set number i of this block's work number `turn`."""
        st_shared_u32(place_of(smem, turn, i), u32(value))

    @cuda.jit(device=True, forceinline=True)
    def field(smem, turn, i):
        """Read it."""
        return i32(ld_shared_u32(place_of(smem, turn, i)))

    @cuda.jit(device=True, forceinline=True)
    def masked(smem, turn, n_block):
        """Whether some row of the work does not see some key of a tile."""
        return not field(smem, turn, FULL_BEGIN) <= n_block < field(smem, turn, FULL_END)

    return describe, field, masked
