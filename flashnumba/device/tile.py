"""What the SIMT kernels share: numbers, and the products of tiles that do all their arithmetic.

A block of lanes_m x lanes_n threads stands over a tile. Thread (ty, tx) owns rows ty + lanes_m * i
and columns tx + lanes_n * j of scores, and of an output the same rows and OWN neighbouring columns,
GROUPS times, lanes_n * OWN apart.

`index` tells the compiler that a number is not negative: that spares Numba's wrap-around code at
each access, and lets four loads fuse into one of 16 bytes (seen in SASS: 48 LDS.128 for 192 LDS).
Having all loads of a tile in flight before the first store took the forward from 9.5 to 16.9
TFLOP/s (H200, float32, D 64, T 4096). Sums are taken by chunk or tile and then added: their error
grows with chunk + n / chunk rather than with n, for a few per cent of the time.
"""

from functools import cache
from types import SimpleNamespace

import numpy as np
from numba import cuda

from flashnumba.device import inlined


@inlined
def index(x):
    """x, known to be at least 0."""
    return x & 0x7FFFFFFF


@cache
def number(dtype):
    """Device functions from and to the stored dtype: (widen, narrow, the type computed in)."""
    real = np.float64 if dtype == "float64" else np.float32
    stored = np.float16 if dtype == "float16" else real

    @inlined
    def widen(x):
        return real(x)

    @inlined
    def narrow(x):
        return stored(x)

    @inlined
    def widen_bfloat16(x):
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)

    @inlined
    def narrow_bfloat16(x):
        """Round to nearest, ties to even; a NaN stays one."""
        bits = np.float32(x).view(np.uint32)
        if x != x:
            return np.uint16(0x7FC0)
        return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    if dtype == "bfloat16":
        return widen_bfloat16, narrow_bfloat16, real
    return widen, narrow, real


@cache
def tile(config):
    """A block's place in the problem, its threads' places in a tile, and what rows do together."""
    LANES_M, LANES_N, ROWS = config.lanes_m, config.lanes_n, config.rows
    OWN, GROUPS = config.own, config.groups
    narrow, REAL = number(config.dtype)[1:]
    ZERO = REAL(0)

    @inlined
    def thread():
        """(ty, tx) of this thread in its block."""
        t = index(cuda.threadIdx.x)
        return t // LANES_N, t % LANES_N

    @inlined
    def store(x, row0, rows, slice0, acc, factor):
        """x[row0:, slice0:] = factor[i] * acc of this thread's rows; zero past row `rows`."""
        ty, tx = thread()
        for i in range(ROWS):
            row = row0 + ty + LANES_M * i
            if row < x.shape[0]:
                for g in range(GROUPS):
                    for y in range(OWN):
                        col = slice0 + OWN * (tx + LANES_N * g) + y
                        if col < x.shape[1]:
                            value = factor[i] * acc[i, OWN * g + y] if row < rows else ZERO
                            x[row, col] = narrow(value)

    @inlined
    def row_max(x):
        """The largest x of the LANES_N threads that share a row."""
        lane = LANES_N // 2
        while lane > 0:
            x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, lane))
            lane //= 2
        return x

    @inlined
    def row_sum(x):
        """The sum of x over the LANES_N threads that share a row."""
        lane = LANES_N // 2
        while lane > 0:
            x += cuda.shfl_xor_sync(0xFFFFFFFF, x, lane)
            lane //= 2
        return x

    @inlined
    def coordinates(blocks, slices, heads):
        """(block, slice, h, b) of this thread block; neighbours share a head and its L2 lines."""
        rest = index(cuda.blockIdx.x)
        block = rest % blocks
        rest //= blocks
        part = rest % slices
        rest //= slices
        return block, part, rest % heads, rest // heads

    return SimpleNamespace(
        thread=thread,
        store=store,
        row_max=row_max,
        row_sum=row_sum,
        coordinates=coordinates,
    )


@cache
def products(config):
    """(product_nt, product_nn): a b^T of two arrays, and p b with p in shared memory."""
    THREADS, LANES_M, LANES_N = config.threads, config.lanes_m, config.lanes_n
    ROWS, COLS, BLOCK_M, BLOCK_N = config.rows, config.cols, config.block_m, config.block_n
    D_TILE, C_TILE, D_SLICE = config.d_tile, config.c_tile, config.d_slice
    VECTOR, OWN, GROUPS = config.vector, config.own, config.groups
    widen, _, REAL = number(config.dtype)
    ZERO = REAL(0)
    thread = tile(config).thread

    def loader(height, width):
        """Make load: x_smem (height, width) = factor * x[row0:, col0:], zero outside of x.

        A thread first has all its numbers in flight, then stores them. What lies outside is read
        from the last row or column inside, which costs no branch, and replaced, not multiplied.
        """
        COUNT = height * width // THREADS
        HEIGHT_STEP = THREADS // width

        @inlined
        def load(x_smem, x, row0, rows, col0, factor):
            t = index(cuda.threadIdx.x)
            col = t % width
            value = cuda.local.array(COUNT, REAL)
            for n in range(COUNT):
                row = row0 + t // width + n * HEIGHT_STEP
                x_row, x_col = min(row, rows - 1), min(col0 + col, x.shape[1] - 1)
                inside = x_row == row and x_col == col0 + col
                value[n] = widen(x[index(x_row), index(x_col)]) * factor if inside else ZERO
            for n in range(COUNT):
                x_smem[t // width + n * HEIGHT_STEP, col] = value[n]

        return load

    load_a, load_b = loader(BLOCK_M, D_TILE), loader(BLOCK_N, D_TILE)
    load_c = loader(C_TILE, D_SLICE)

    @inlined
    def product_nt(s, a, a_smem, a_row0, a_rows, a_factor, b, b_smem, b_row0, b_rows, b_factor):
        """s (ROWS, COLS) = this thread's part of (a_factor a) (b_factor b)^T, in order of d."""
        ty, tx = thread()
        a_frag = cuda.local.array((ROWS, VECTOR), REAL)
        b_frag = cuda.local.array((COLS, VECTOR), REAL)
        part = cuda.local.array((ROWS, COLS), REAL)
        for i in range(ROWS):
            for j in range(COLS):
                s[i, j] = ZERO
        for d_chunk in range(0, a.shape[1], D_TILE):
            d0 = index(d_chunk)
            load_a(a_smem, a, a_row0, a_rows, d0, a_factor)
            load_b(b_smem, b, b_row0, b_rows, d0, b_factor)
            cuda.syncthreads()
            for i in range(ROWS):
                for j in range(COLS):
                    part[i, j] = ZERO
            for d_step in range(0, D_TILE, VECTOR):
                d = index(d_step)
                for x in range(VECTOR):
                    for i in range(ROWS):
                        a_frag[i, x] = a_smem[ty + LANES_M * i, d + x]
                    for j in range(COLS):
                        b_frag[j, x] = b_smem[tx + LANES_N * j, d + x]
                for x in range(VECTOR):
                    for i in range(ROWS):
                        for j in range(COLS):
                            part[i, j] += a_frag[i, x] * b_frag[j, x]
            for i in range(ROWS):
                for j in range(COLS):
                    s[i, j] += part[i, j]
            cuda.syncthreads()

    @inlined
    def product_nn(out, p_smem, b, b_smem, row0, rows, slice0, lo, hi, MASKED):
        """out (ROWS, GROUPS * OWN) = p b, over columns [slice0, slice0 + D_SLICE) of b.

        In a masked tile row i multiplies only rows [lo[i], hi[i]) of b: a NaN behind the mask
        stays there.
        """
        ty, tx = thread()
        p_frag = cuda.local.array((ROWS, VECTOR), REAL)
        b_frag = cuda.local.array((GROUPS, OWN), REAL)
        for i in range(ROWS):
            for x in range(GROUPS * OWN):
                out[i, x] = ZERO
        for c_chunk in range(0, BLOCK_N, C_TILE):
            c0 = index(c_chunk)
            load_c(b_smem, b, row0 + c0, rows, slice0, REAL(1))
            cuda.syncthreads()
            for c_step in range(0, C_TILE, VECTOR):
                c = index(c_step)
                for y in range(VECTOR):
                    for i in range(ROWS):
                        p_frag[i, y] = p_smem[ty + LANES_M * i, c0 + c + y]
                for y in range(VECTOR):
                    for g in range(GROUPS):
                        for x in range(OWN):
                            b_frag[g, x] = b_smem[c + y, OWN * (tx + LANES_N * g) + x]
                    for i in range(ROWS):
                        if not MASKED or lo[i] <= row0 + c0 + c + y < hi[i]:
                            for g in range(GROUPS):
                                for x in range(OWN):
                                    out[i, OWN * g + x] += p_frag[i, y] * b_frag[g, x]
            cuda.syncthreads()

    return product_nt, product_nn
