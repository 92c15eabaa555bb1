"""Which keys a query may see: interval algebra on integers, for the host and for kernels alike.

Every structured mask is one half-open interval of keys per query. Query i, aligned by `offset`
(seqlen_kv - seqlen_q for the lower right corner, 0 for the upper left), sees keys

    [i + offset - left, i + offset + right]   cut to   [0, length).

Causal is right = 0; full attention is left = right = UNBOUNDED; a padded batch shortens `length`.
Both ends grow with i, so a tile of queries needs only its first and its last row to know which key
tiles to visit and which of those every row sees whole.

The transposed question, which queries see key j, is the same function with the roles exchanged:
`interval(j, -offset, right, left, q_length)`. The backward pass asks it that way.

Source: the sliding windows of Beltagy et al., Longformer (2020), aligned at the lower right as in
FlashAttention.
"""

# "No limit on this side": beyond any length, and safe to add to and subtract from in 64 bits.
UNBOUNDED = 1 << 40


def alignment(q_length, kv_length, upper_left):
    """How far key 0 stands behind query 0: 0 at the upper left, else the last of both meet."""
    return 0 if upper_left else kv_length - q_length


def interval(idx, offset, left, right, length):
    """Half-open interval [lo, hi) of the other axis that row `idx` sees; empty when lo == hi.

    `left` and `right` are at least 0, so lo <= hi needs no further care.
    """
    lo = min(max(idx + offset - left, 0), length)
    hi = min(max(idx + offset + right + 1, 0), length)
    return lo, hi


def tiles(first, last, offset, left, right, length, block):
    """Tiles of `block` columns that rows first..last visit: (begin, full_begin, full_end, end).

    Both rows are included; last < first means no row at all. Tiles [begin, end) hold every visible
    column, and those in [full_begin, full_end) are visible whole to every row and need no mask.
    begin <= full_begin <= full_end <= end always; where nothing is visible, begin == end.
    """
    first_lo, first_hi = interval(first, offset, left, right, length)
    last_lo, last_hi = interval(last, offset, left, right, length)
    begin = first_lo // block
    some = first <= last and first_lo < last_hi
    end = (last_hi + block - 1) // block if some else begin
    full_begin = min(max((last_lo + block - 1) // block, begin), end)
    full_end = min(max(first_hi // block, full_begin), end)
    return begin, full_begin, full_end, end
