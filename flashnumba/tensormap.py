"""What the tensor memory accelerator (TMA) is told about an array, and which arrays it can read."""

from dataclasses import dataclass
from functools import lru_cache

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


@lru_cache(maxsize=4096)
def encoder(dtype, sizes, strides, rows):
    """A function from an array's address to the 16 words that describe it to TMA.

    Parameters
    ----------
    dtype : str
        "float16" or "bfloat16".
    sizes, strides, rows
        Those of a `TensorMap`.
    """
    from cuda.bindings import driver

    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}")
    fixed = (
        [driver.cuuint64_t(n) for n in sizes],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in (COLUMNS, rows, 1, 1)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,  # zeros
    )

    def encode(address):
        status, tensor_map = driver.cuTensorMapEncodeTiled(kind, len(sizes), address, *fixed)
        if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread's first use of the GPU
            make_context_current()
            status, tensor_map = driver.cuTensorMapEncodeTiled(kind, len(sizes), address, *fixed)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"{status.name}: TMA cannot address {dtype} at {address:#x}, {sizes=}, {strides=}"
            )
        return tuple(int(word) for word in tensor_map.opaque)

    return encode


def make_context_current():
    """In this thread, that of CuPy's current device; allocating from CuPy's pool may not do it."""
    from cupy.cuda import runtime

    runtime.setDevice(runtime.getDevice())
