"""The interval algebra on all small sizes, against the masks that the specification draws."""

from itertools import product

import numpy as np
import pytest

from flashnumba.reference import visible
from flashnumba.window import UNBOUNDED, alignment, interval, tiles

LENGTHS = range(8)
SIDES = (0, 1, 2, UNBOUNDED)
BLOCKS = (1, 2, 3, 4)

each_alignment = pytest.mark.parametrize("upper_left", [False, True], ids=["lower", "upper"])


def windows(q_length, kv_length, upper_left):
    """Every window on these lengths: (seen, offset, left, right), seen a bool array (Sq, Skv).

    Both alignments are shifts of one diagonal. `visible` aligns a window to the upper left only
    together with causal, which cuts right to 0; a mask between equal lengths, cut to size, has the
    same corner without that.
    """
    offset = alignment(q_length, kv_length, upper_left)
    size = max(q_length, kv_length)
    shape = (size, size) if upper_left else (q_length, kv_length)
    for left, right in product(SIDES, SIDES):
        limits = tuple(None if side == UNBOUNDED else side for side in (left, right))
        seen = visible(*(np.empty((1, length)) for length in shape), window=limits)[0, 0]
        yield seen[:q_length, :kv_length], offset, left, right


def questions(q_length, kv_length, upper_left):
    """Both questions about every window: which keys a query sees, and which queries see a key."""
    for seen, offset, left, right in windows(q_length, kv_length, upper_left):
        yield seen, offset, left, right
        yield seen.T, -offset, right, left


def test_alignment():
    assert alignment(3, 5, upper_left=False) == 2
    assert alignment(5, 3, upper_left=False) == -2
    assert alignment(3, 5, upper_left=True) == alignment(5, 3, upper_left=True) == 0


def test_the_windows_drawn_here_are_those_of_causal():
    for q_length, kv_length in product(LENGTHS, LENGTHS):
        arrays = np.empty((1, q_length)), np.empty((1, kv_length))
        for upper_left, causal in ((False, True), (True, "upper_left")):
            for seen, _, left, right in windows(q_length, kv_length, upper_left):
                if right == 0:
                    limits = (None if left == UNBOUNDED else left, None)
                    expected = visible(*arrays, causal=causal, window=limits)[0, 0]
                    np.testing.assert_array_equal(seen, expected)


@each_alignment
@pytest.mark.parametrize("kv_length", LENGTHS)
@pytest.mark.parametrize("q_length", LENGTHS)
def test_interval_is_what_each_row_sees(q_length, kv_length, upper_left):
    for seen, offset, left, right in questions(q_length, kv_length, upper_left):
        length = seen.shape[1]
        for idx, row in enumerate(seen):
            lo, hi = interval(idx, offset, left, right, length)
            assert 0 <= lo <= hi <= length
            assert np.flatnonzero(row).tolist() == [*range(lo, hi)]


@each_alignment
@pytest.mark.parametrize("kv_length", LENGTHS)
@pytest.mark.parametrize("q_length", LENGTHS)
def test_tiles_of_every_range_of_rows(q_length, kv_length, upper_left):
    """[begin, end) is what some row sees, [full_begin, full_end) what every row sees whole."""
    for seen, offset, left, right in questions(q_length, kv_length, upper_left):
        rows, length = seen.shape
        for block, first in product(BLOCKS, range(rows)):
            starts = range(0, length, block)
            for last in range(-1, rows):  # last < first is no row at all
                cut = [seen[first : last + 1, start : start + block] for start in starts]
                visited = [n for n, tile in enumerate(cut) if tile.any()]
                whole = [n for n in visited if cut[n].all() and cut[n].shape[1] == block]

                begin, full_begin, full_end, end = tiles(
                    first, last, offset, left, right, length, block
                )
                assert begin <= full_begin <= full_end <= end
                assert [*range(begin, end)] == visited
                assert [*range(full_begin, full_end)] == whole


def test_numbers_beyond_32_bits():
    length = 3 * 2**32
    assert interval(length - 1, 0, 5, 0, length) == (length - 6, length)
    assert interval(length - 1, 0, UNBOUNDED, UNBOUNDED, length) == (0, length)
    blocks = length // 128
    assert tiles(0, 127, length - 128, UNBOUNDED, 0, length, 128) == (0, 0, blocks - 1, blocks)
