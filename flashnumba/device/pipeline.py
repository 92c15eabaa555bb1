"""Rings of slots in shared memory, between those that fill them and those that empty them.

The n-th use of a ring of SLOTS takes slot n % SLOTS. Each event of a slot ("full", "empty") is an
mbarrier of its own, 8 bytes, and its phase ends once a use: parity n // SLOTS % 2.
"""

from functools import cache

import numpy as np
from numba import cuda

from flashnumba.ptx.barrier import mbarrier_arrive, mbarrier_wait

i32, u32 = np.int32, np.uint32


@cuda.jit(device=True, forceinline=True)
def lane_index():
    """This thread's lane of its warp, 0..31. (A signed % would be computed in 64 bits.)"""
    return i32(u32(cuda.threadIdx.x) & u32(31))


@cache
def event(at, slots):
    """(barrier, wait, wait_before, arrive) of one event, whose barriers start at byte `at`."""

    @cuda.jit(device=True, forceinline=True)
    def barrier(smem, n):
        return smem + u32(at) + u32(8) * (n % u32(slots))

    @cuda.jit(device=True, forceinline=True)
    def wait(smem, n):
        """Until the event has happened in use n."""
        mbarrier_wait(barrier(smem, n), n // u32(slots) & u32(1))

    @cuda.jit(device=True, forceinline=True)
    def wait_before(smem, n):
        """Until it has happened in the use before, of the slot that use n takes over."""
        mbarrier_wait(barrier(smem, n), n // u32(slots) & u32(1) ^ u32(1))

    @cuda.jit(device=True, forceinline=True)
    def arrive(smem, n):
        mbarrier_arrive(barrier(smem, n))

    return barrier, wait, wait_before, arrive
