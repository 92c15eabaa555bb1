"""Rings of slots in shared memory, between those that fill them and those that empty them.

The n-th use of a ring of SLOTS takes slot n % SLOTS. Each event of a slot ("full", "empty") is an
mbarrier of its own, 8 bytes, and its phase ends once a use: parity n // SLOTS % 2.
"""

from functools import cache

import numpy as np
from numba import cuda

from flashnumba.device import inlined
from flashnumba.ptx.barrier import mbarrier_arrive, mbarrier_wait

i32, u32 = np.int32, np.uint32


@inlined
def lane_index():
    """This thread's lane of its warp, 0..31. (A signed % would be computed in 64 bits.)"""
    return i32(u32(cuda.threadIdx.x) & u32(31))


@cache
def ring(slots):
    """(barrier, wait, wait_before, arrive) of the events of rings with `slots` slots.

    An event is a typed constant, the byte where its barriers start: all events share the functions,
    and Numba compiles them once.
    """
    SLOTS, BYTES, ONE = u32(slots), u32(8), u32(1)

    @inlined
    def barrier(smem, event, n):
        return u32(smem + event + n % SLOTS * BYTES)

    @inlined
    def wait(smem, event, n):
        """Until the event has happened in use n."""
        mbarrier_wait(barrier(smem, event, n), n // SLOTS & ONE)

    @inlined
    def wait_before(smem, event, n):
        """Until it has happened in the use before, of the slot that use n takes over."""
        mbarrier_wait(barrier(smem, event, n), n // SLOTS & ONE ^ ONE)

    @inlined
    def arrive(smem, event, n):
        mbarrier_arrive(barrier(smem, event, n))

    return barrier, wait, wait_before, arrive
