"""Global memory that several blocks write."""

from functools import cache

from flashnumba.ptx._asm import address, f32, reads, u32, writes
from flashnumba.ptx._instruction import instruction
from flashnumba.simulate import current_block, wait_until


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
