"""Tensor cores of a warp: D (16 tiles, n) of float32 in registers, D = A B or D += A B.

One mma.sync multiplies A (16, 16) by B (16, 8), in float16 or bfloat16; on Turing A (16, 8) by
B (8, 8), so it takes two. Factors come from shared memory by ldmatrix, four matrices of 8 x 8
halves at a time: lane 8 i + r gives the address of row r of matrix i. A tile is kept in sub-tiles
of 64 columns in 128-byte swizzle (layout.py), so those 8 rows lie in 8 different groups of banks.

`mma_ss` and `mma_rs` make a whole product of many, all steps in one piece of assembly, so ptxas
sees straight lines to schedule whatever LLVM makes of loops. Which lane gives which address is in
`first_rows` and `first_columns`; from there a step is a constant, added to rows or, 32 bytes at a
time, xored to columns.
"""

from functools import cache

import numpy as np

from flashnumba.ptx._asm import f32, reads, u32, updates, writes
from flashnumba.ptx._instruction import warp_instruction
from flashnumba.ptx.layout import ROW
from flashnumba.ptx.shared import memory
from flashnumba.ptx.wgmma import TYPES, widen

TILE = 16 * ROW  # bytes from 16 rows of a sub-tile to the next 16


def step_of(column, row, rows):
    """What leads from a lane's address to 16 columns `column` and 16 rows `row` of a tile.

    (which 32 bytes of a row, bytes to add); the tile has `rows` rows.
    """
    return column % 4, column // 4 * rows * ROW + row * TILE


class Factor:
    """A factor in shared memory: where its (16, 16) parts are, and how they are read.

    `mn_major` where the summed index runs down the rows of the tile, as in V; else along them.
    """

    def __init__(self, name, rows, mn_major):
        self.name, self.rows, self.mn_major = name, rows, mn_major

    def step(self, i, k):
        """`step_of` part i along the output and k along the sum."""
        return step_of(i, k, self.rows) if self.mn_major else step_of(k, i, self.rows)

    def start(self, parts, steps):
        """Assembly that prepares the addresses of all steps."""
        used = {self.step(i, k)[0] for i in range(parts) for k in range(steps)}
        text = f".reg .u32 {self.name}_at<4>;\n"
        return text + "".join(
            f"xor.b32 {self.name}_at{c}, {{{self.name}}}, {32 * c};\n" for c in sorted(used)
        )

    def load(self, registers, i, k):
        """Assembly that reads part (i, k) to four registers."""
        column, more = self.step(i, k)
        trans = ".trans" if self.mn_major else ""
        return (
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{{{{', '.join(registers)}}}}}, "
            f"[{self.name}_at{column} + {more}];\n"
        )

    def matrix(self, addresses, parts, steps, dtype):
        """What all the loads read: (16 parts, 16 steps) as float32.

        Of A's four matrices the second has the next 8 rows and the third the next 8 of the sum;
        of B's it is the other way round.
        """
        where = np.empty((parts, steps, 32), np.int64)
        for i in range(parts):
            for k in range(steps):
                column, more = self.step(i, k)
                where[i, k] = (addresses.astype(np.int64) ^ 32 * column) + more
        x = memory().rows(where).reshape(parts, steps, 2, 2, 8, 8)
        if self.mn_major:
            x = x.swapaxes(4, 5)
        x = x.transpose(0, 3, 4, 1, 2, 5) if self.name == "a" else x.transpose(0, 2, 4, 1, 3, 5)
        return widen(np.ascontiguousarray(x.reshape(16 * parts, 16 * steps)), dtype)


def multiply(kind, d, a, b, c, turing):
    """Assembly of a (16, 16) times (16, 8): D = A B + C."""
    names = lambda registers: "{{" + ", ".join(registers) + "}}"
    if not turing:
        text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        return text + f"{d}, {names(a)}, {names(b)}, {c};\n"
    text = f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32 "
    return (
        f"{text}{d}, {names(a[:2])}, {names(b[:1])}, {c};\n"
        f"{text}{d}, {names(a[2:])}, {names(b[1:])}, {d};\n"
    )


def products(tiles, n, steps, dtype, a, b, add, turing):
    """Assembly of the whole product; `a(k)` is (assembly, four registers of each tile).

    Its order matters little: ptxas moves loads ahead as far as there are registers.
    """
    text = f".reg .b32 a<{4 * tiles}>, b<4>;\n.reg .f32 zero;\nmov.f32 zero, 0f00000000;\n"
    text += b.start(n // 16, steps)
    for k in range(steps):
        load, of_a = a(k)
        text += load
        for i in range(n // 16):
            text += b.load(("b0", "b1", "b2", "b3"), i, k)
            for half in range(2):
                for tile in range(tiles):
                    at = tile * n // 2 + 8 * i + 4 * half
                    d = f"{{d_frag:{at}:{at + 4}}}"
                    c = d if add or k else "{{zero, zero, zero, zero}}"
                    pair = (f"b{2 * half}", f"b{2 * half + 1}")
                    text += multiply(TYPES[dtype], d, of_a[tile], pair, c, turing)
    return "{{\n" + text + "}}"


def fragment(tiles, columns):
    """Rows and columns of a fragment (16 tiles, columns), two arrays (32, 8 tiles columns / 16)."""
    lane, i = np.arange(32)[:, None], np.arange(tiles * columns // 2)
    tile, j = i // (columns // 2), i % (columns // 2)
    rows = 16 * tile + lane // 4 + j // 2 % 2 * 8
    return np.broadcast_arrays(rows, j // 4 * 8 + lane % 4 * 2 + j % 2)


@cache
def mma_ss(
    tiles, n, k, dtype, a_rows, b_rows, a_mn_major=False, b_mn_major=False, add=False, turing=False
):
    """D (16 tiles, n) = A B over k, both from shared memory; += if `add`.

    `a_rows`, `b_rows`: rows of the tiles in shared memory that A and B are parts of. Each lane
    gives an address of its own in both: `first_columns` of A where it is MN-major and of B where it
    is not, else `first_rows`.
    """
    steps = k // 16
    a_factor, b_factor = Factor("a", a_rows, a_mn_major), Factor("b", b_rows, b_mn_major)

    def a_of(step):
        registers = [[f"a{4 * t + j}" for j in range(4)] for t in range(tiles)]
        return "".join(a_factor.load(r, t, step) for t, r in enumerate(registers)), registers

    text = products(tiles, n, steps, dtype, a_of, b_factor, add, turing)

    @warp_instruction(text.replace("{{\n", "{{\n" + a_factor.start(tiles, steps), 1))
    def mma_ss(
        d_frag: updates(f32, tiles * n // 2) if add else writes(f32, tiles * n // 2),
        a: u32,
        b: u32,
    ):
        left = a_factor.matrix(a, tiles, steps, dtype)
        d = left @ b_factor.matrix(b, n // 16, steps, dtype).T
        rows, columns = fragment(tiles, n)
        d_frag[:] = d_frag + d[rows, columns] if add else d[rows, columns]

    return mma_ss


@cache
def mma_rs(tiles, n, k, dtype, b_rows, b_mn_major=True, turing=False):
    """D (16 tiles, n) += A B over k, A from registers, B from shared memory as in `mma_ss`.

    Four registers of A a step, tile by tile: scores, rounded and packed by pairs, are such an A.
    """
    steps, factor = k // 16, Factor("b", b_rows, b_mn_major)

    def a_of(step):
        at = [4 * (t * steps + step) for t in range(tiles)]
        return "", [[f"{{a_frag:{x + j}}}" for j in range(4)] for x in at]

    @warp_instruction(products(tiles, n, steps, dtype, a_of, factor, True, turing))
    def mma_rs(d_frag: updates(f32, tiles * n // 2), a_frag: reads(u32, tiles * k // 4), b: u32):
        rows, columns = fragment(tiles, k)
        a = np.empty((16 * tiles, k), np.float32)
        a[rows, columns] = widen(np.ascontiguousarray(a_frag).view(np.uint16), dtype)
        rows, columns = fragment(tiles, n)
        d_frag += (a @ factor.matrix(b, n // 16, steps, dtype).T)[rows, columns]

    return mma_rs
