"""Copies of 16 bytes from global to shared memory that a thread starts and waits for later.

Ampere and later. A thread closes its copies into groups and waits for all but the newest few; what
it has waited for, other threads see after a barrier. In the simulator a copy arrives when its
thread waits for it, and until then its destination is NaN.
"""

from functools import cache

import numpy as np

from flashnumba.ptx._asm import address, i32, u32
from flashnumba.ptx._instruction import instruction
from flashnumba.ptx.memory import row_of
from flashnumba.ptx.shared import CHUNK, memory
from flashnumba.simulate import SimulatorError, current_block, current_thread


class Copies:
    """A block's copies in flight, by thread: an open group, and closed ones in order."""

    def __init__(self, block):
        self.open, self.groups = {}, {}

    def commit(self, thread):
        self.groups.setdefault(thread, []).append(self.open.pop(thread, []))

    def wait(self, thread, allowed):
        groups = self.groups.get(thread, [])
        while len(groups) > allowed:
            for target, values in groups.pop(0):
                memory().store(target, values)

    def finish(self):
        left = sum(len(g) for groups in self.groups.values() for g in groups)
        left += sum(map(len, self.open.values()))
        if left:
            raise SimulatorError(f"the block ended with {left} copies by cp_async in flight")


@cache
def cp_async_row(parts, step):
    """Start copies of 16 bytes from every 128 of a row, each `step` bytes further in shared memory.

    `source` is a 2-D array of rows `pitch` bytes apart, from this thread's column on; `width` is
    how many bytes of a row it has. Bytes past that, and all if not `inside`, count as zeros.
    """
    text = "{{ .reg .s64 at; .reg .u32 size; .reg .pred here;\n"
    text += "mad.wide.s32 at, {row}, {pitch}, {source};\n"
    for i in range(parts):
        text += f"setp.gt.s32 here, {{width}}, {128 * i};\nselp.u32 size, {{inside}}, 0, here;\n"
        text += (
            f"cp.async.cg.shared.global [{{target}} + {i * step}], [at + {128 * i}], 16, size;\n"
        )

    @instruction(text + "}}")
    def cp_async_row(target: u32, source: address, row: i32, pitch: i32, inside: u32, width: i32):
        copies = current_block().part(Copies).open.setdefault(current_thread(), [])
        for i, values in enumerate(row_of(parts, source, row, pitch, inside, width)):
            place = target + np.uint32(i * step)
            memory().store(place, np.full(CHUNK, 0xFF, np.uint8))
            copies.append((place, values.copy()))

    return cp_async_row


@instruction("cp.async.commit_group;")
def cp_async_commit_group():
    """Close this thread's group of copies; it may be empty."""
    current_block().part(Copies).commit(current_thread())


@cache
def cp_async_wait_group(pending):
    """Wait until at most the `pending` newest groups of this thread are in flight."""

    @instruction(f"cp.async.wait_group {pending};")
    def cp_async_wait_group():
        current_block().part(Copies).wait(current_thread(), pending)

    return cp_async_wait_group
