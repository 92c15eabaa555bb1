"""The online softmax on a fragment of scores (device/fragment.py)."""

from functools import cache

import numpy as np
from numba import cuda

from flashnumba.device import inlined
from flashnumba.ptx.thread import ex2, max_f32

ALL_LANES = 0xFFFFFFFF
MINUS_INF, ZERO = np.float32(-np.inf), np.float32(0)
# How far p may grow beyond 1, in powers of 2. With 0 the largest p of a row would be 1, which needs
# no rounding: errors are 1.5 to 5% above those (bfloat16, T 16384 to 1024). But raising m makes
# the tensor cores wait. H200, T 1024 and 4096, against 8: 1 is 2% slower, 0.5 3%, 0 5%.
GROWTH = np.float32(8)
LARGE = np.float32(4096)  # whose rounding is 2^-13, a quarter of float16's


@inlined
def row_max(x):
    """The largest x of the lanes that share a row."""
    x = max_f32(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))
    return max_f32(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))


@inlined
def row_sum(x):
    """The sum over the lanes that share a row."""
    x += cuda.shfl_xor_sync(ALL_LANES, x, 1)
    return x + cuda.shfl_xor_sync(ALL_LANES, x, 2)


@cache
def online_softmax(columns, tiles=1):
    """The softmax of a fragment s of `columns` columns and 16 rows, `tiles` of them."""
    COLUMNS_8, TILE, ROWS = columns // 8, columns // 2, 2 * tiles

    @inlined
    def raise_m(s_max, m, l, a, shift, scale):
        """m' = max(m, max s), a = e^(m - m'), l' = a l; `shift` is what exponents are reduced by.

        A row that has seen nothing keeps m = -inf; subtracting 0 gives p = 0. True if in some row
        of the warp m * scale is so large that its rounding would show: there m is subtracted first
        and `shift` is 0.
        """
        large = False
        for r in range(ROWS):
            m_new = max_f32(m[r], s_max[r])
            m_safe = m_new if m_new != MINUS_INF else ZERO
            a[r] = ex2((m[r] - m_safe) * scale)
            l[r] *= a[r]
            m[r], shift[r] = m_new, m_safe * scale
            if abs(shift[r]) > LARGE:
                shift[r], large = ZERO, True
        return cuda.any_sync(ALL_LANES, large)

    @inlined
    def softmax(s, m, l, a, shift, large, scale):
        """s becomes p = e^(s - m), l' = l + sum p, after m is raised; (raised, large).

        Exponentials are to base 2 and `scale` = scale * log2(e), so that one FMA comes before each.
        l is this lane's part of the sum. m follows the maximum only when p would be beyond 2^8 in
        some row of the warp: o and lse are the same with any m near the maximum, and seldom does
        anything wait for it. If `raised`, acc has to be multiplied by a.
        """
        part = cuda.local.array(4, np.float32)  # by row and parity of the column: 4 short chains
        s_max = cuda.local.array(ROWS, np.float32)
        growth = MINUS_INF
        for t in range(tiles):
            for i in range(4):
                part[i] = s[TILE * t + i]
            for j in range(1, COLUMNS_8):
                for i in range(4):
                    part[i] = max_f32(part[i], s[TILE * t + 4 * j + i])
            for r in range(2):
                s_max[2 * t + r] = row_max(max_f32(part[2 * r], part[2 * r + 1]))
                growth = max_f32(growth, s_max[2 * t + r] - m[2 * t + r])
        raised = cuda.any_sync(ALL_LANES, growth * scale > GROWTH)
        if raised:
            large = raise_m(s_max, m, l, a, shift, scale)
        if large:
            for r in range(ROWS):
                if shift[r] == ZERO and m[r] != MINUS_INF:
                    for j in range(COLUMNS_8):
                        for x in range(2):
                            s[TILE * (r // 2) + 4 * j + r % 2 * 2 + x] -= m[r]
        for t in range(tiles):
            for i in range(4):
                part[i] = ZERO
            for j in range(COLUMNS_8):
                for i in range(4):
                    p = ex2(s[TILE * t + 4 * j + i] * scale - shift[2 * t + i // 2])
                    s[TILE * t + 4 * j + i] = p
                    part[i] += p
            for r in range(2):
                l[2 * t + r] += part[2 * r] + part[2 * r + 1]
        return raised, large

    return softmax
