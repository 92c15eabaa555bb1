"""float32 as the sum of bfloat16: what tensor cores multiply, part by part.

bfloat16 has float32's exponents and 8 bits of its mantissa, so three have all 24. Each part is what
the parts before leave, with its lowest 16 bits cut off; the last is rounded. x = x0 + x1 + x2, and

    x y = x0 y0 + x0 y1 + x1 y0 + x0 y2 + x1 y1 + x2 y0

but for 2**-23 x y at most. Sums begin with the smallest. Fewer parts are less accurate and faster.
"""

from functools import cache

import numpy as np

from flashnumba.device import inlined
from flashnumba.device.fragment import first_rows
from flashnumba.ptx.shared import stmatrix_x4
from flashnumba.ptx.thread import cvt_bf16x2

u32, f32 = np.uint32, np.float32


def factors(parts):
    """Which parts of x and of y are multiplied, the smallest products first."""
    return [(i, total - i) for total in reversed(range(parts)) for i in range(total + 1)]


def by_pairs(parts):
    """The same where y0 and y1 can be multiplied at once.

    Which parts of x are multiplied with both, and which parts of x and of y beside, the smallest
    products first.
    """
    both = list(reversed(range(parts - 1)))
    return both, [(i, j) for i, j in factors(parts) if j > 1 or i not in both]


@inlined
def cut_off(x):
    """The first 8 bits of x."""
    return u32(x.view(np.uint32) & u32(0xFFFF0000)).view(np.float32)


@inlined
def pack_cut_off(x, y):
    """The first 8 bits of both, as two bfloat16."""
    return u32(x.view(np.uint32) >> u32(16)) | u32(y.view(np.uint32) & u32(0xFFFF0000))


@cache
def to_parts(parts, size):
    """Of a fragment of `size` float32 all first parts, then all second ones, two in a register."""
    HALF = size // 2

    @inlined
    def to_parts(p, s):
        for i in range(HALF):
            x, y = s[2 * i], s[2 * i + 1]
            for part in range(parts - 1):
                p[part * HALF + i] = pack_cut_off(x, y)
                x, y = f32(x - cut_off(x)), f32(y - cut_off(y))
            p[(parts - 1) * HALF + i] = cvt_bf16x2(x, y)

    return to_parts


@cache
def parts_to_shared(parts, columns, part_bytes):
    """Parts as `to_parts` packs them to a warp's 16 rows of tiles, `part_bytes` apart."""
    assert columns <= 64

    @inlined
    def parts_to_shared(p, tile):
        start = first_rows(tile)
        for part in range(parts):
            for i in range(columns // 16):
                x, at = part * columns // 4 + 4 * i, u32(start ^ u32(32 * i))
                at = u32(at + u32(part * part_bytes))
                stmatrix_x4(at, p[x], p[x + 1], p[x + 2], p[x + 3])

    return parts_to_shared
