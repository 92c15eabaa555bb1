"""Where a work is: its batch entry, head and rows, and which key tiles those rows visit."""

import numpy as np
from numba import cuda
from numba.cuda.extending import register_jitable

from flashnumba.window import alignment, interval, tiles

u32 = np.uint32

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
