"""Products of float32 matrices on tensor cores: each number as the sum of two TF32 numbers.

TF32 has float32's exponents and 11 bits of its mantissa. x = high + low, high rounded to nearest,
leaves out less than 2**-22 of x, and

    a b = high(a) high(b) + high(a) low(b) + low(a) high(b)      but for low(a) low(b), 2**-24 a b

is what three mma.sync sum in float32. With `products` = 1 it is the first alone: plain TF32.

Numbers from shared memory are halved first (`halved`), or the largest could not be rounded: such a
product is half of what it should be for each factor from there, which the caller makes good.
Tensor cores cut off what does not fit an accumulator, they do not round; so sums are short, each
begins at 0, and what is added to D is rounded.

A tile in shared memory has sub-tiles of 32 columns in 128-byte swizzle. Factors whose sum is along
rows are read by ldmatrix: four numbers are its 16 bytes. For others, as V, lane 4 g + t reads
column g of rows 2 t and 2 t + 1, from 32 different banks. The factor beside it has its summed index
in the same order, 0 2 4 6 1 3 5 7: an accumulator in registers has it by itself, and to shared
memory it is written in that order (device/fragment.py).
"""

from functools import cache

import numpy as np

from flashnumba.ptx._asm import f32, reads, u32, updates, writes
from flashnumba.ptx._instruction import warp_instruction
from flashnumba.ptx.layout import ROW
from flashnumba.ptx.mma import fragment
from flashnumba.ptx.shared import memory

ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # rows 2 t, then rows 2 t + 1


def high_and_low(x, products=3):
    """The two parts as tensor cores read them: their lowest 13 bits are cut off.

    Of an infinite number low is 0, and 0 times infinity NaN: kernels keep infinities away. A NaN,
    whose bits are all ones on a GPU, has -0 and NaN; but NaN where there is no low part.
    """
    x = np.asarray(x, np.float32)
    bits = np.where(np.isnan(x), np.uint32(0x7FFFFFFF), x.view(np.uint32))
    high = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    if products == 1:
        high = np.where(np.isnan(x), x, high)
    with np.errstate(invalid="ignore"):
        low = np.where(x == high, np.float32(0), x - high)
    return high, (low.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def multiply_parts(a, b, products):
    """A B^T of float32 matrices from their parts."""
    (a_high, a_low), (b_high, b_low) = high_and_low(a, products), high_and_low(b, products)
    if products == 1:
        return a_high @ b_high.T
    return (a_low @ b_high.T + a_high @ b_low.T) + a_high @ b_high.T


class Factor:
    """A factor in shared memory, read in parts of 16 along the output and 8 along the sum."""

    def __init__(self, name, rows, mn_major, products):
        self.name, self.rows, self.mn_major, self.products = name, rows, mn_major, products

    def step(self, i, k):
        """(which 32 bytes of a row, bytes to add) from the lane's address to part (i, k)."""
        if not self.mn_major:
            return k % 4, k // 4 * self.rows * ROW + i * 16 * ROW
        return 2 * i % 4, 2 * i // 4 * self.rows * ROW + k * 8 * ROW

    def start(self):
        """Assembly that prepares addresses; of MN-major factors also those of the odd rows."""
        text = f".reg .u32 {self.name}_at<4>, {self.name}_odd<4>;\n"
        for c in range(4):
            text += f"xor.b32 {self.name}_at{c}, {{{self.name}}}, {32 * c};\n"
            if self.mn_major:
                text += f"xor.b32 {self.name}_odd{c}, {self.name}_at{c}, 16;\n"
        return text

    def load(self, registers, i, k):
        """Assembly that reads part (i, k) to four registers, in the order of the fragments.

        Of A: rows r and r + 8 of the first four of the sum, then of the others; of B, whose two
        fragments have 8 rows each, both fours of the first, then of the second.
        """
        column, more = self.step(i, k)
        if not self.mn_major:
            names = ", ".join(registers)
            return (
                f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{{{names}}}}}, "
                f"[{self.name}_at{column} + {more}];\n"
            )
        next8 = column + 1
        at = [f"{self.name}_at{column} + {more}", f"{self.name}_odd{column} + {more + ROW}"]
        at += [f"{self.name}_at{next8} + {more}", f"{self.name}_odd{next8} + {more + ROW}"]
        order = (0, 2, 1, 3) if self.name == "a" else (0, 1, 2, 3)
        return "".join(
            f"ld.shared.b32 {register}, [{at[j]}];\n"
            for register, j in zip(registers, order, strict=True)
        )

    def matrix(self, addresses, parts, steps):
        """What all the loads read, halved: (16 parts, 8 steps) as float32."""
        smem, start = memory(), addresses.astype(np.int64)
        out = np.empty((parts, steps, 16, 8), np.float32)
        for i in range(parts):
            for k in range(steps):
                column, more = self.step(i, k)
                if not self.mn_major:
                    x = smem.rows((start ^ 32 * column) + more).view(np.float32).reshape(2, 2, 8, 4)
                    x = x.transpose(1, 2, 0, 3) if self.name == "a" else x.transpose(0, 2, 1, 3)
                    out[i, k] = x.reshape(16, 8)
                    continue
                for half in range(2):
                    at = (start ^ 32 * (column + half)) + more
                    even, odd = smem.words(at), smem.words((at ^ 16) + ROW)
                    lanes = np.concatenate([even.reshape(8, 4), odd.reshape(8, 4)], axis=1)
                    out[i, k, 8 * half : 8 * half + 8] = lanes
        return out.transpose(0, 2, 1, 3).reshape(16 * parts, 8 * steps) * np.float32(0.5)


def split(x, high, low, halved, products):
    """Assembly of `high_and_low` of registers; x may be the same as `high`."""
    text = ""
    for value, h, l in zip(x, high, low, strict=True):
        text += f"mul.f32 whole, {value}, 0f3F000000;\n" if halved else f"mov.b32 whole, {value};\n"
        if products == 1:
            text += f"cvt.rna.tf32.f32 {h}, whole;\n"
        else:
            text += f"add.u32 {h}, whole, 4096;\nand.b32 {h}, {h}, 0xffffe000;\n"
            text += f"setp.eq.f32 same, whole, {h};\nsub.f32 {l}, whole, {h};\n"
            text += f"selp.f32 {l}, 0f00000000, {l}, same;\n"
    return text


def multiply(d, a, b, products):
    """Assembly of D += A B of a (16, 8) and an (8, 8), each (high, low)."""
    names = lambda registers: "{{" + ", ".join(registers) + "}}"
    mma = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
    pairs = [(a[1], b[0]), (a[0], b[1])] * (products == 3) + [(a[0], b[0])]
    return "".join(f"{mma} {names(d)}, {names(x)}, {names(y)}, {names(d)};\n" for x, y in pairs)


NARROW = 32  # columns of D; wider, A is kept in registers for them, else D's sums are


def steps_at_once(n):
    """How many steps are summed from 0: two where there are registers for it, each cuts off."""
    return 4 if 16 < n <= NARROW else 2


def whole_product(tiles, n, steps, a, b, add, products):
    """Assembly of the whole product; `a(k)` is (assembly, the four registers of each tile, halved).

    Each sum of `steps_at_once` begins at 0.
    """
    wide, chunk = n > NARROW, steps_at_once(n)
    parts = 1 if wide else n // 16
    kept = chunk if wide else 1  # steps of A in registers
    of_a = lambda x, k, tile: [f"a{x}{4 * (tiles * (k % kept) + tile) + j}" for j in range(4)]
    of_b = lambda x, half: [f"b{x}{2 * half}", f"b{x}{2 * half + 1}"]
    of_part = lambda i, tile, half: [
        f"part{8 * (tiles * (i % parts) + tile) + 4 * half + j}" for j in range(4)
    ]
    size = 8 * tiles * parts
    text = f".reg .b32 whole, ah<{4 * tiles * kept}>, al<{4 * tiles * kept}>, bh<4>, bl<4>;\n"
    text += f".reg .f32 part<{size}>;\n.reg .pred same;\n" + b.start()
    clear = "".join(f"mov.f32 part{j}, 0f00000000;\n" for j in range(size))

    def load_a(k):
        load, registers, halved = a(k, of_a)
        return load + "".join(
            split(registers[t], of_a("h", k, t), of_a("l", k, t), halved, products)
            for t in range(tiles)
        )

    def multiply_all(i, k):
        bh = ("bh0", "bh1", "bh2", "bh3")
        out = b.load(bh, i, k) + split(bh, bh, ("bl0", "bl1", "bl2", "bl3"), True, products)
        for half in range(2):
            for t in range(tiles):
                of_tile = of_a("h", k, t), of_a("l", k, t)
                out += multiply(
                    of_part(i, t, half), of_tile, (of_b("h", half), of_b("l", half)), products
                )
        return out

    def add_parts(i, fresh):
        out = ""
        for t in range(tiles):
            for half in range(2):
                for j, x in enumerate(of_part(i, t, half)):
                    d = f"{{d_frag:{t * n // 2 + 8 * i + 4 * half + j}}}"
                    out += f"mov.f32 {d}, {x};\n" if fresh else f"add.f32 {d}, {d}, {x};\n"
        return out

    for first in range(0, steps, chunk):
        fresh, now = first == 0 and not add, range(first, min(first + chunk, steps))
        if wide:
            text += "".join(map(load_a, now))
            for i in range(n // 16):
                text += clear + "".join(multiply_all(i, k) for k in now) + add_parts(i, fresh)
        else:
            text += clear
            for k in now:
                text += load_a(k) + "".join(multiply_all(i, k) for i in range(n // 16))
            text += "".join(add_parts(i, fresh) for i in range(n // 16))
    return "{{\n" + text + "}}"


@cache
def tf32_ss(tiles, n, k, products, a_rows, b_rows, a_mn_major=False, b_mn_major=False, add=False):
    """D (16 tiles, n) = A B / 4 over k, both from shared memory; += if `add`. As `mma.mma_ss`.

    Lanes give addresses as there, and `pairs` or `pairs_in_order` (device/fragment.py) of MN-major
    factors.
    """
    steps = k // 8
    a_factor, b_factor = (
        Factor("a", a_rows, a_mn_major, products), Factor("b", b_rows, b_mn_major, products)
    )  # fmt: skip

    def a_of(step, of_a):
        registers = [of_a("h", step, t) for t in range(tiles)]
        return "".join(a_factor.load(r, t, step) for t, r in enumerate(registers)), registers, True

    text = whole_product(tiles, n, steps, a_of, b_factor, add, products)

    @warp_instruction(text.replace("{{\n", "{{\n" + a_factor.start(), 1))
    def tf32_ss(
        d_frag: updates(f32, tiles * n // 2) if add else writes(f32, tiles * n // 2),
        a: u32,
        b: u32,
    ):
        left, right = a_factor.matrix(a, tiles, steps), b_factor.matrix(b, n // 16, steps)
        rows, columns = fragment(tiles, n)
        d = multiply_parts(left, right, products)[rows, columns]
        d_frag[:] = d_frag + d if add else d

    return tf32_ss


@cache
def tf32_rs(tiles, n, k, products, b_rows):
    """D (16 tiles, n) += A B / 2 over k, A from registers, B from shared memory and MN-major.

    A is an accumulator as it is: lanes have neighbours 2 t and 2 t + 1, as `pairs` has rows of B.
    """
    steps, factor = k // 8, Factor("b", b_rows, True, products)

    def a_of(step, of_a):
        at = [t * k // 2 + 4 * step for t in range(tiles)]
        return "", [[f"{{a_frag:{x + j}}}" for j in (0, 2, 1, 3)] for x in at], False

    @warp_instruction(whole_product(tiles, n, steps, a_of, factor, True, products))
    def tf32_rs(d_frag: updates(f32, tiles * n // 2), a_frag: reads(f32, tiles * k // 2), b: u32):
        rows, columns = fragment(tiles, k)
        a = np.empty((16 * tiles, k), np.float32)
        a[rows, columns] = a_frag
        a = a.reshape(-1, steps, 8)[:, :, ORDER].reshape(a.shape)
        rows, columns = fragment(tiles, n)
        d_frag += multiply_parts(a, factor.matrix(b, n // 16, steps), products)[rows, columns]

    return tf32_rs
