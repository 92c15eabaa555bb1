"""Instructions of one thread on its own registers."""

import numpy as np

from flashnumba.ptx._asm import f32, u32
from flashnumba.ptx._instruction import instruction


@instruction("ex2.approx.ftz.f32 {d}, {a};", pure=True)
def ex2(a: f32) -> f32:
    """2**a; relative error 2**-22; subnormal numbers count as 0."""
    return _flushed(np.exp2(_flushed(np.float32(a))))


@instruction("lg2.approx.ftz.f32 {d}, {a};", pure=True)
def lg2(a: f32) -> f32:
    """log2(a); absolute error 2**-22 where a is in (0.5, 2), relative error 2**-22 elsewhere."""
    return np.log2(_flushed(np.float32(a)))


@instruction("rcp.approx.ftz.f32 {d}, {a};", pure=True)
def rcp(a: f32) -> f32:
    """1 / a; at most 1 unit in the last place off."""
    return _flushed(np.float32(1) / _flushed(np.float32(a)))


@instruction("max.f32 {d}, {a}, {b};", pure=True)
def max_f32(a: f32, b: f32) -> f32:
    """The larger number, +0 above -0; NaN only if both are."""
    a, b = np.float32(a), np.float32(b)
    if np.isnan(a) or np.isnan(b):
        return b if np.isnan(a) else a  # np.fmax is NaN for signalling NaN
    return max(a, b) if a or b else a + b


@instruction("cvt.rn.f16x2.f32 {d}, {high}, {low};", pure=True)
def cvt_f16x2(low: f32, high: f32) -> u32:
    """Two numbers as float16 in one register, rounded to nearest even; NaN becomes 0x7fff."""
    x = np.array([low, high], np.float32).astype(np.float16)
    if low != low or high != high:
        x.view(np.uint16)[np.isnan(x)] = 0x7FFF
    return x.view(np.uint32)[0]


@instruction(
    "{{ .reg .b16 x, y; cvt.rn.f16.f32 x, {low}; cvt.rn.f16.f32 y, {high}; "
    "mov.b32 {d}, {{x, y}}; }}",
    pure=True,
)
def cvt_f16x2_each(low: f32, high: f32) -> u32:
    """The same one by one, as Turing can."""
    return cvt_f16x2.body(low, high)


@instruction("cvt.rn.bf16x2.f32 {d}, {high}, {low};", pure=True)
def cvt_bf16x2(low: f32, high: f32) -> u32:
    """Two numbers as bfloat16 in one register, rounded to nearest even; NaN becomes 0x7fff."""
    x = np.array([low, high], np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    low, high = (int(r) for r in np.where(np.isnan(x), 0x7FFF, rounded))
    return np.uint32(high << 16 | low)


@instruction(
    "{{ .reg .b16 low, high; mov.b32 {{low, high}}, {a}; cvt.f32.f16 {d}, low; }}", pure=True
)
def cvt_f32_f16(a: u32) -> f32:
    """The lower half of a register, a float16, as float32."""
    return np.uint16(a & 0xFFFF).view(np.float16).astype(np.float32)


@instruction("mov.b32 {d}, {a};")
def opaque(a: u32) -> u32:
    """a. Compilers cannot know that, so what depends on it is computed here and not earlier.

    Else what a loop computes anew from kernel parameters is kept in registers all along.
    """
    return np.uint32(a)


@instruction("nanosleep.u32 {ns};")
def nanosleep(ns: u32):
    """Do nothing for about `ns` nanoseconds, 0 to twice as many."""


def _flushed(x):
    """Subnormal numbers become 0 of the same sign."""
    return np.copysign(np.float32(0), x) if abs(x) < np.finfo(np.float32).tiny else x
