"""Global memory that several blocks write."""

import numpy as np

from flashnumba.ptx._asm import address, f32, u32, writes
from flashnumba.ptx._instruction import instruction
from flashnumba.simulate import current_block, wait_until


@instruction("{{ .reg .u64 at; mad.wide.u32 at, {i}, 16, {source}; ld.global.v4.f32 {x}, [at]; }}")
def ld_global_v4_f32(x: writes(f32, 4), source: address, i: u32):
    """x = four float32 of an array, the first of which is number 4 i."""
    x[:4] = source[4 * int(i) : 4 * int(i) + 4]


@instruction(
    "{{ .reg .u64 at; mad.wide.u32 at, {i}, 16, {target}; "
    "red.global.add.v4.f32 [at], {{{x0}, {x1}, {x2}, {x3}}}; }}"
)
def red_global_add_v4_f32(target: address, i: u32, x0: f32, x1: f32, x2: f32, x3: f32):
    """Add to four float32 of an array, the first of which is number 4 i; each is one atomic."""
    target[4 * int(i) : 4 * int(i) + 4] += np.array([x0, x1, x2, x3], np.float32)


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
