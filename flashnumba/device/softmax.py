"""The online softmax on a fragment of scores (device/fragment.py)."""

from functools import cache

import numpy as np
from numba import cuda

from flashnumba.ptx.thread import ex2, max_f32

ALL_LANES = 0xFFFFFFFF
MINUS_INF, ZERO = np.float32(-np.inf), np.float32(0)
LARGE = np.float32(4096)  # whose rounding is 2^-13, a quarter of float16's


@cuda.jit(device=True, forceinline=True)
def row_max(x):
    """The largest x of the lanes that share a row."""
    x = max_f32(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))
    return max_f32(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))


@cuda.jit(device=True, forceinline=True)
def row_sum(x):
    """The sum over the lanes that share a row."""
    x += cuda.shfl_xor_sync(ALL_LANES, x, 1)
    return x + cuda.shfl_xor_sync(ALL_LANES, x, 2)


@cache
def online_softmax(columns):
    """The softmax of a fragment s of `columns` columns."""
    COLUMNS_8 = columns // 8

    @cuda.jit(device=True, forceinline=True)
    def softmax(s, m, l, a, scale):
        """s becomes p; m and l move on, and a is what acc has to be multiplied by.

        m' = max(m, max s), a = e^(m - m'), p = e^(s - m'), l' = a l + sum p, with exponentials to
        base 2 and `scale` = scale * log2(e), so that one FMA comes before each. l is this lane's
        part of the sum. A row that has seen nothing keeps m = -inf; subtracting 0 gives p = 0.
        """
        for r in range(2):
            m_new = m[r]
            for j in range(COLUMNS_8):
                m_new = max_f32(m_new, max_f32(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]))
            m_new = row_max(m_new)
            m_safe = m_new if m_new != MINUS_INF else ZERO
            a[r] = ex2((m[r] - m_safe) * scale)
            m[r] = m_new
            # The FMA below is off by the rounding of m * scale: subtract first where that is large.
            m_scaled = m_safe * scale
            if m_scaled > LARGE or m_scaled < -LARGE:
                m_scaled = ZERO
                for j in range(COLUMNS_8):
                    for x in range(2):
                        s[4 * j + 2 * r + x] -= m_safe
            l[r] *= a[r]
            for j in range(COLUMNS_8):
                for x in range(2):
                    p = ex2(s[4 * j + 2 * r + x] * scale - m_scaled)
                    s[4 * j + 2 * r + x] = p
                    l[r] += p

    return softmax
