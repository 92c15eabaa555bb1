"""Global memory: parts of a row, and what several blocks write."""

from functools import cache

import numpy as np

from flashnumba.ptx._asm import address, f32, i32, reads, u32, writes
from flashnumba.ptx._instruction import instruction
from flashnumba.simulate import SimulatorError, current_block, wait_until


def neighbours(x, row, pitch, offset, size=16):
    """`size` bytes of a row of a 2-D array whose rows are `pitch` bytes apart, as a view."""
    first, count = offset // x.itemsize, size // x.itemsize
    if int(pitch) != x.strides[0] and len(x) > 1:
        raise SimulatorError(f"rows {pitch} bytes apart, of an array with {x.strides=}")
    if not 0 <= row < x.shape[0] or first + count > x.shape[1]:
        raise SimulatorError(f"row {row}, {size} bytes from {offset}, are not in {x.shape=}")
    found = x[int(row), first : first + count]
    if found.ctypes.data % size or found.strides[0] != x.itemsize:
        raise SimulatorError(f"these are not {size} neighbouring bytes at a multiple of {size}")
    return found.view(np.uint8)


def row_of(parts, x, row, pitch, inside, width):
    """16 bytes from every 128 of a row; zeros past `width` bytes, and all zeros if not `inside`."""
    if inside not in (0, 16):
        raise SimulatorError(f"{inside=} must be 0 or 16: how many bytes of each are read")
    for i in range(parts):
        if inside and width > 128 * i:
            yield neighbours(x, row, pitch, 128 * i)
        else:
            yield np.zeros(16, np.uint8)


@cache
def ld_global_row(parts):
    """x = 16 bytes from every 128 of a row; operands as in `cp_async.cp_async_row`."""
    text = "{{ .reg .s64 at; .reg .pred inside, here;\nsetp.ne.u32 inside, {inside}, 0;\n"
    text += "mad.wide.s32 at, {row}, {pitch}, {source};\n"
    for i in range(parts):
        text += f"setp.gt.and.s32 here, {{width}}, {128 * i}, inside;\n"
        text += "".join(f"mov.b32 {{x:{4 * i + j}}}, 0;\n" for j in range(4))
        text += f"@here ld.global.v4.u32 {{x:{4 * i}:{4 * i + 4}}}, [at + {128 * i}];\n"

    @instruction(text + "}}")
    def ld_global_row(
        x: writes(u32, 4 * parts), source: address, row: i32, pitch: i32, inside: u32, width: i32
    ):
        for i, values in enumerate(row_of(parts, source, row, pitch, inside, width)):
            x[4 * i : 4 * i + 4] = values.view(np.uint32)

    return ld_global_row


@cache
def st_global_row(parts):
    """Store x as 16 bytes to every 128 of a row, without those past `width` bytes."""
    text = "{{ .reg .s64 at; .reg .pred here;\nmad.wide.s32 at, {row}, {pitch}, {target};\n"
    for i in range(parts):
        text += f"setp.gt.s32 here, {{width}}, {128 * i};\n"
        text += f"@here st.global.v4.u32 [at + {128 * i}], {{x:{4 * i}:{4 * i + 4}}};\n"

    @instruction(text + "}}")
    def st_global_row(target: address, row: i32, pitch: i32, width: i32, x: reads(u32, 4 * parts)):
        for i in range(parts):
            if width > 128 * i:
                part = x[4 * i : 4 * i + 4].view(np.uint8)
                neighbours(target, row, pitch, 128 * i)[:] = part

    return st_global_row


@cache
def st_global_fragment(columns):
    """Store an accumulator's two rows of a thread, `row` and 8 on, to a 2-D array of float32.

    Without rows from `row_end` on, and without pairs past `width` bytes. `target` begins with the
    thread's first column; each pair of its numbers is 32 bytes on.
    """
    text = "{{ .reg .s64 at; .reg .s32 next; .reg .pred inside, here;\n"
    text += "mad.wide.s32 at, {row}, {pitch}, {target};\nadd.s32 next, {row}, 8;\n"
    for r, row in enumerate(("{row}", "next")):
        if r == 1:
            text += "mad.wide.s32 at, next, {pitch}, {target};\n"
        text += f"setp.lt.s32 inside, {row}, {{row_end}};\n"
        for j in range(columns // 8):
            pair = f"{{x_frag:{4 * j + 2 * r}:{4 * j + 2 * r + 2}}}"
            text += f"setp.gt.and.s32 here, {{width}}, {32 * j}, inside;\n"
            text += f"@here st.global.v2.f32 [at + {32 * j}], {pair};\n"

    @instruction(text + "}}")
    def st_global_fragment(
        target: address,
        row: i32,
        pitch: i32,
        row_end: i32,
        width: i32,
        x_frag: reads(f32, columns // 2),
    ):
        for r, j in np.ndindex(2, columns // 8):
            if row + 8 * r < row_end and width > 32 * j:
                pair = neighbours(target, row + 8 * r, pitch, 32 * j, 8)
                pair.view(np.float32)[:] = x_frag[4 * j + 2 * r : 4 * j + 2 * r + 2]

    return st_global_fragment


@instruction("{{ .reg .u64 at; mad.wide.u32 at, {i}, 16, {source}; ld.global.v4.f32 {x}, [at]; }}")
def ld_global_v4_f32(x: writes(f32, 4), source: address, i: u32):
    """x = four float32 of an array, the first of which is number 4 i."""
    x[:4] = source[4 * int(i) : 4 * int(i) + 4]


@cache
def red_global_add_f32(words, size, threads):
    """Add a thread's `size` float32 to a tile of `words`, four neighbours every 4 `threads`.

    `part` counts fours; each number is added by itself, atomically.
    """
    text = f"{{{{ .reg .u64 at; mad.wide.u32 at, {{tile}}, {4 * words}, {{target}};\n"
    text += "mad.wide.u32 at, {part}, 16, at;\n"
    for i in range(size // 4):
        four = f"{{x_frag:{4 * i}:{4 * i + 4}}}"
        text += f"red.global.add.v4.f32 [at + {16 * threads * i}], {four};\n"

    @instruction(text + "}}")
    def red_global_add_f32(target: address, tile: u32, part: u32, x_frag: reads(f32, size)):
        fours = target.reshape(-1, words // 4, 4)[int(tile)]
        fours[int(part) :: threads][: size // 4] += x_frag[:size].reshape(-1, 4)

    return red_global_add_f32


@cache
def red_global_add_f32_each(words, size, threads):
    """The same one number at a time, which every GPU can: number i every `threads`."""
    text = f"{{{{ .reg .u64 at; mad.wide.u32 at, {{tile}}, {4 * words}, {{target}};\n"
    text += "mad.wide.u32 at, {part}, 4, at;\n"
    for i in range(size):
        text += f"red.global.add.f32 [at + {4 * threads * i}], {{x_frag:{i}}};\n"

    @instruction(text + "}}")
    def red_global_add_f32_each(target: address, tile: u32, part: u32, x_frag: reads(f32, size)):
        numbers = target.reshape(-1, words)[int(tile)]
        numbers[int(part) :: threads][:size] += x_frag[:size]

    return red_global_add_f32_each


@instruction(
    "{{ .reg .u64 at; mad.wide.u32 at, {i}, 4, {flags}; st.release.gpu.global.u32 [at], {value}; }}"
)
def st_release_u32(flags: address, i: u32, value: u32):
    """Set flag i after all that this thread has done or seen done, for `wait_acquire_u32`."""
    flags[int(i)] = value
    current_block().progress = True


@instruction("fence.proxy.async.global;")
def fence_proxy_async_global():
    """Order what this thread has seen in global memory before its bulk copies that follow."""


@instruction(
    "{{ .reg .pred there; .reg .u64 at; .reg .u32 x; mad.wide.u32 at, {i}, 4, {flags}; "
    "AGAIN: ld.acquire.gpu.global.u32 x, [at]; setp.eq.u32 there, x, {value}; "
    "@there bra THERE; bra AGAIN; THERE: }}"
)
def wait_acquire_u32(flags: address, i: u32, value: u32):
    """Wait until flag i has this value; what was done before it was set can be seen then."""
    wait_until(lambda: flags[int(i)] == value, f"wait_acquire_u32({int(i)}, {int(value)})")
