"""Tiles of the SIMT kernels."""

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class SimtConfig:
    """Tiles of kernels/simt.py.

    lanes_m x lanes_n threads stand over a tile of rows x cols entries each, so a tile is
    block_m = lanes_m * rows by block_n = lanes_n * cols. Head dimensions are walked `d_tile`
    columns at a time, and one block computes at most `d_slice` columns of an output.
    """

    dtype: str
    lanes_m: int
    lanes_n: int
    rows: int
    cols: int
    d_tile: int
    d_slice: int

    @property
    def threads(self):
        return self.lanes_m * self.lanes_n

    @property
    def block_m(self):
        return self.lanes_m * self.rows

    @property
    def block_n(self):
        return self.lanes_n * self.cols

    @property
    def itemsize(self):
        """Bytes of a number in shared memory and registers: halves are computed in float32."""
        return 8 if self.dtype == "float64" else 4

    def pitch(self, width):
        """A row's length in shared memory: 16 bytes more, so that rows start in different banks."""
        return width + self.vector

    @property
    def vector(self):
        """Numbers in one 16-byte load."""
        return 16 // self.itemsize

    @property
    def own(self):
        """Neighbouring output columns of a thread."""
        return min(self.d_slice // self.lanes_n, self.vector)

    @property
    def groups(self):
        """How many times a thread owns such columns."""
        return self.d_slice // self.lanes_n // self.own

    @property
    def c_tile(self):
        """Rows of the right factor of p b in shared memory at a time: 2048 numbers."""
        return min(self.block_n, 2048 // self.d_slice)

    @property
    def shared_bytes(self):
        """Two operands of a b^T, the weights, and the right factor of p b."""
        operands = (self.block_m + self.block_n) * self.pitch(self.d_tile)
        weights = self.block_m * self.pitch(self.block_n)
        return self.itemsize * (operands + weights + self.c_tile * self.d_slice)


@cache
def choose_simt(dtype, head_dim, head_dim_v, simulated=False):
    """The tile configuration of the SIMT kernels for one problem, the same on every GPU.

    Every choice stays under 48 KB of static shared memory, which any CUDA GPU has.
    """
    width = max(head_dim, head_dim_v)
    if simulated:
        # Python runs about 2 million multiply-adds a second: tiles of 16 x 16 keep the padding of
        # short sequences cheap. 64 threads are two warps, so that a missing barrier still shows.
        return SimtConfig(dtype, 8, 8, 2, 2, d_tile=16, d_slice=16 if width <= 16 else 32)
    d_tile = 16 if width <= 16 else 32
    d_slice = next(size for size in (16, 32, 64, 128) if width <= size or size == 128)
    if dtype == "float64":
        return SimtConfig(dtype, 16, 16, 2, 2, d_tile, d_slice)
    # H200, float32, T 4096, TFLOP/s forward and backward, by lanes and entries a thread:
    #              16 x 16, 4 x 4    8 x 16, 8 x 4    8 x 16, 4 x 4    16 x 8, 4 x 4
    #     D  64      16.6   11.8       20.0   13.0      19.3   11.1      17.9   12.1
    #     D 128      16.9   11.8      spills, 16.3      spills, 18.9     13.2    9.7
    # 8 x 4 entries need all 255 registers, and spill with some compilers and on other GPUs.
    return SimtConfig(dtype, 16, 16, 4, 4, d_tile, d_slice)
