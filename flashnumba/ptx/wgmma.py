"""Tensor cores of a warpgroup: D (64, N) of float32 in registers, D = A B or D += A B.

A comes from shared memory or from registers, B from shared memory, in float16 or bfloat16. One
instruction multiplies 16 columns of A with 16 rows of B; `wgmma_ss` and `wgmma_rs` make a whole
product of many, all k steps in one piece of assembly. LLVM does not unroll every loop
over instructions, and one that is not unrolled waits at each step (703 -> 451 TFLOP/s at D 256).

They are asynchronous: fence, products, commit, wait. The wait takes the accumulators as operands,
so that no use of them can move above it. If ptxas must doubt that (an accumulator touched in
between, a call), it serialises *all* products and only says so in its log, by messages C75xx.
"""

from functools import cache

import numpy as np

from flashnumba.ptx._asm import f32, pins, reads, u32, u64, updates, writes
from flashnumba.ptx._instruction import (
    WarpgroupQueues,
    instruction,
    uniform,
    warpgroup_instruction,
)
from flashnumba.ptx.layout import ROW, accumulator, descriptor_fields, swizzle128
from flashnumba.ptx.shared import memory
from flashnumba.simulate import SimulatorError, current_block, current_thread

TYPES = {"float16": "f16", "bfloat16": "bf16"}


def queues():
    return current_block().part(WarpgroupQueues), current_thread() // 128


def reader():
    return memory().reader()


@warpgroup_instruction("wgmma.fence.sync.aligned;")
def wgmma_fence():
    """Order earlier accesses to registers before the products that follow."""
    wgmma, warpgroup = queues()
    wgmma.fenced.add(warpgroup)


@cache
def wgmma_fence_of(d_size, a_size):
    """`wgmma_fence` after every write to a fragment D, if d_size > 0, and a fragment A.

    Without them as operands LLVM may move a write past the fence; ptxas then adds one (C7519).
    """

    @warpgroup_instruction("wgmma.fence.sync.aligned;")
    def wgmma_fence(d_frag: pins(f32, d_size), a_frag: reads(u32, a_size)):
        wgmma, warpgroup = queues()
        wgmma.fenced.add(warpgroup)

    @warpgroup_instruction("wgmma.fence.sync.aligned;")
    def wgmma_fence_of_a(a_frag: reads(u32, a_size)):
        wgmma, warpgroup = queues()
        wgmma.fenced.add(warpgroup)

    return wgmma_fence if d_size > 0 else wgmma_fence_of_a


@warpgroup_instruction("wgmma.commit_group.sync.aligned;")
def wgmma_commit_group():
    """Close a group of products."""
    wgmma, warpgroup = queues()
    wgmma.commit(warpgroup)


@cache
def wgmma_wait_group(pending, size):
    """Wait until at most `pending` groups are in flight, before any use of a fragment of `size`."""

    @warpgroup_instruction(f"wgmma.wait_group.sync.aligned {pending};")
    def wgmma_wait_group(d_frag: pins(f32, size)):
        wgmma, warpgroup = queues()
        wgmma.wait(warpgroup, pending)

    return wgmma_wait_group


@cache
def zero(size):
    """Clear an accumulator, here and not later.

    LLVM would place plain zeros after a product in flight, and ptxas then serialises all (C7515).
    """

    @instruction("".join(f"mov.b32 {{d_frag:{i}}}, 0; " for i in range(size)))
    def zero(d_frag: writes(f32, size)):
        d_frag[:] = 0

    return zero


@cache
def wgmma_ss(n, dtype, a_steps, b_steps, a_mn_major=False, b_mn_major=False, add=False):
    """D (64, n) = A (64, 16 steps) B (16 steps, n), both from shared memory; += if `add`.

    Else D is output only: its old value, kept alive to be multiplied by 0, would cost n / 2
    registers. `a_steps`, `b_steps`: bytes from the descriptors' start to each step (layout.py).
    """
    kind = TYPES[dtype]
    text = f"{{{{\n.reg .pred add;\n.reg .b64 at, bt;\nsetp.ne.b32 add, {int(add)}, 0;\n"
    for step, (a, b) in enumerate(zip(a_steps, b_steps, strict=True)):
        text += f"add.s64 at, {{a}}, {a >> 4};\nadd.s64 bt, {{b}}, {b >> 4};\n"
        text += (
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
            f"{{d_frag}}, at, bt, {'add' if step == 0 else 1}, 1, 1, "
            f"{int(a_mn_major)}, {int(b_mn_major)};\n"
        )

    @warpgroup_instruction(text + "}}", asynchronous=reader)
    def wgmma_ss(
        d_frag: updates(f32, n // 2) if add else writes(f32, n // 2),
        a: uniform(u64),
        b: uniform(u64),
    ):
        d = np.zeros((64, n), np.float32)
        for a_step, b_step in zip(a_steps, b_steps, strict=True):
            a_tile = operand(a + (a_step >> 4), 64, a_mn_major, dtype)
            d += a_tile @ operand(b + (b_step >> 4), n, b_mn_major, dtype).T
        rows, columns = accumulator(n)
        d_frag[:] = d_frag + d[rows, columns] if add else d[rows, columns]

    return wgmma_ss


@cache
def wgmma_rs(n, dtype, b_steps, b_mn_major=True, a_steps=None, add=True):
    """D (64, n) += A (64, 16 steps) B (16 steps, n), A from registers, B from shared memory.

    Four registers of A a step, each two halves, in the order of an accumulator: the fragment of
    scores, rounded and packed by pairs, is the fragment of A. `a_steps` says which four each step
    takes, if not one after the other. Without `add` D is output only.
    """
    kind, a_steps = TYPES[dtype], tuple(range(len(b_steps))) if a_steps is None else a_steps
    text = f"{{{{\n.reg .pred add;\n.reg .b64 bt;\nsetp.ne.b32 add, {int(add)}, 0;\n"
    for i, (a, b) in enumerate(zip(a_steps, b_steps, strict=True)):
        text += (
            f"add.s64 bt, {{b}}, {b >> 4};\n"
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
            f"{{d_frag}}, {{a_frag:{4 * a}:{4 * a + 4}}}, bt, {'add' if i == 0 else 1}, 1, 1, "
            f"{int(b_mn_major)};\n"
        )

    @warpgroup_instruction(text + "}}", asynchronous=reader)
    def wgmma_rs(
        d_frag: updates(f32, n // 2) if add else writes(f32, n // 2),
        a_frag: reads(u32, 4 * (max(a_steps) + 1)),
        b: uniform(u64),
    ):
        rows, columns = accumulator(16)
        d = np.zeros((64, n), np.float32)
        for a_step, b_step in zip(a_steps, b_steps, strict=True):
            a_tile = np.empty((64, 16), np.float32)
            halves = np.ascontiguousarray(a_frag[:, 4 * a_step : 4 * a_step + 4]).view(np.uint16)
            a_tile[rows, columns] = widen(halves, dtype)
            d += a_tile @ operand(b + (b_step >> 4), n, b_mn_major, dtype).T
        rows, columns = accumulator(n)
        d_frag[:] = d_frag + d[rows, columns] if add else d[rows, columns]

    return wgmma_rs


def operand(descriptor, rows, mn_major, dtype):
    """The (rows, 16) halves that one step reads through a descriptor, as float32."""
    start, leading, stride = descriptor_fields(descriptor)
    if descriptor >> 62 != 1 or start // ROW % 8:
        raise SimulatorError(f"{descriptor:#x} does not describe 8 rows of the 128-byte swizzle")
    row, k = np.arange(rows)[:, None], np.arange(16)
    if mn_major:
        where = row // 64 * leading + k // 8 * stride + k % 8 * ROW + row % 64 * 2
    else:
        where = row // 8 * stride + row % 8 * ROW + k * 2
    return widen(memory().gather(swizzle128(start + where)), dtype)


def widen(bits, dtype):
    """Halves, given as 16 bits, as float32."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
