"""What the tensor memory accelerator (TMA) is told about an array, and which arrays it can read."""

from dataclasses import dataclass

COLUMNS = 64  # of a box: 64 halves are 128 bytes, the width of the swizzle


@dataclass(frozen=True, eq=False)
class TensorMap:
    """Boxes of `rows` x 64 halves of an array (batch, seqlen, heads, dim), in 128-byte swizzle.

    A box is rows of one head: coordinates are (column, row, head, batch). What lies outside the
    array is read as zeros and not written.
    """

    array: object
    rows: int

    @property
    def sizes(self):
        """(dim, seqlen, heads, batch): the fastest axis first."""
        batch, seqlen, heads, dim = self.array.shape
        return dim, seqlen, heads, batch

    @property
    def strides(self):
        """Bytes between neighbours along all axes but the fastest; 16 along one of length 1."""
        steps = zip(self.array.shape, self.array.strides, strict=True)
        batch, seqlen, heads, _ = (stride if size > 1 else 16 for size, stride in steps)
        return seqlen, heads, batch


def addressable(x, pointer):
    """Whether TMA can address an array (batch, seqlen, heads, dim) of halves at `pointer`.

    It needs an address and strides that are multiples of 16 bytes, not negative, below 2^40, and
    columns without gaps. An axis of length 1 is never stepped along, whatever its stride.
    """
    strides = [s for n, s in zip(x.shape[:3], x.strides[:3], strict=True) if n > 1]
    dense = x.shape[3] == 1 or x.strides[3] == x.itemsize
    return (
        dense and pointer % 16 == 0 and all(s >= 0 and s % 16 == 0 and s < 1 << 40 for s in strides)
    )
