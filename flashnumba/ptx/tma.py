"""The tensor memory accelerator: copies of boxes between global arrays and shared memory.

A box is `rows` x 64 halves of one head (tensormap.py). In shared memory each row takes 128 bytes,
swizzled. The simulator fills a load's destination with NaN at once, and with data when nothing else
can move; a store reads its source when its issuer waits for it.

A box starts at a column that is a multiple of 8, which is 16 bytes. It may reach past the array or
lie beyond it; only a load's may start before it. The H200 calls other columns and rows an illegal
instruction.
"""

import numpy as np

from flashnumba.ptx._asm import address, i32, u32, u64
from flashnumba.ptx._instruction import instruction
from flashnumba.ptx.barrier import mbarrier
from flashnumba.ptx.layout import swizzle128
from flashnumba.ptx.shared import memory
from flashnumba.simulate import SimulatorError, current_block, current_thread
from flashnumba.tensormap import COLUMNS


class Copies:
    """TMA's work in flight: loads in order of issue, stores by the thread that will wait."""

    def __init__(self, block):
        self.loads, self.stores, self.order = [], {}, block.order

    def deliver(self):
        """Complete one load, any of them under a shuffled schedule: TMA keeps no order."""
        if not self.loads:
            return False
        self.loads.pop(self.order.randrange(len(self.loads)) if self.order else 0)()
        return True

    def store(self, copy):
        """A store belongs to a group once its thread commits; group 0 is the open one."""
        self.stores.setdefault(current_thread(), [[]])[-1].append(copy)

    def commit(self):
        self.stores.setdefault(current_thread(), [[]]).append([])

    def wait(self, allowed):
        groups = self.stores.setdefault(current_thread(), [[]])
        while len(groups) - 1 > allowed:
            for copy in groups.pop(0):
                copy()

    def finish(self):
        if self.loads or any(copy for groups in self.stores.values() for copy in groups):
            raise SimulatorError("the block ended with copies in flight")


def addresses(start, rows):
    """Byte addresses of a box's halves in shared memory, (rows, 64)."""
    if int(start) % 1024:
        raise SimulatorError(f"a box in 128-byte swizzle starts at {int(start)}, not at k * 1024")
    row, column = np.arange(rows)[:, None], np.arange(COLUMNS)
    return int(start) + swizzle128(128 * row + 2 * column)


def inside(start, size, limit):
    """The part of [start, start + size) in [0, limit), which may be empty."""
    return slice(min(max(start, 0), limit), min(max(start + size, 0), limit))


def overlap(tensor, column, row, head, batch):
    """The part of a box that lies in the array: its view there, and its place in the box."""
    bits = tensor.array.view(np.uint16)
    size_b, size_s, size_h, size_d = bits.shape
    rows, columns = inside(row, tensor.rows, size_s), inside(column, COLUMNS, size_d)
    if column % 8:
        raise SimulatorError(f"a box at {column=}, not at a multiple of 8 (16 bytes)")
    if not (0 <= head < size_h and 0 <= batch < size_b):
        raise SimulatorError(f"a box at {head=} {batch=} of an array {bits.shape}")
    place = (
        slice(rows.start - row, rows.stop - row),
        slice(columns.start - column, columns.stop - column),
    )
    return bits[batch, rows, head, columns], place


@instruction(
    "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[{target}], [{tensor}, {{{column}, {row}, {head}, {batch}}}], [{barrier}];"
)
def cp_async_bulk_tensor_load(
    target: u32, tensor: u64, barrier: u32, column: i32, row: i32, head: i32, batch: i32
):
    """Load a box; its rows * 128 bytes count at the mbarrier, zeros outside the array included.

    `column` is a multiple of 8; it and `row` may be negative.
    """
    smem, done = memory(), mbarrier(barrier)
    where = addresses(target, tensor.rows)
    smem.scatter(where, np.full(where.shape, 0xFFFF, np.uint16))
    part, place = overlap(tensor, int(column), int(row), int(head), int(batch))

    def arrive():
        box = np.zeros(where.shape, np.uint16)
        box[place] = part
        smem.scatter(where, box)
        done.copied(128 * tensor.rows)

    current_block().part(Copies).loads.append(arrive)


@instruction(
    "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group "
    "[{tensor}, {{{column}, {row}, {head}, {batch}}}], [{source}];"
)
def cp_async_bulk_tensor_store(
    tensor: u64, source: u32, column: i32, row: i32, head: i32, batch: i32
):
    """Store a box, except what lies outside the array.

    `column` is a multiple of 8; neither it nor `row` is negative.
    """
    smem, where = memory(), addresses(source, tensor.rows)
    part, place = overlap(tensor, int(column), int(row), int(head), int(batch))
    for name, start in (("column", int(column)), ("row", int(row))):
        if start < 0:
            raise SimulatorError(f"a store to a box at {name}={start}, before the array")
    reading = smem.reader()

    def read():
        with reading:
            part[...] = smem.gather(where)[place]

    current_block().part(Copies).store(read)


@instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[{target}], [{source}], {size}, [{barrier}];"
)
def cp_async_bulk_load(target: u32, source: address, size: u32, barrier: u32):
    """Load the first `size` bytes of an array; all but `barrier` are multiples of 16 bytes."""
    smem, done = memory(), mbarrier(barrier)
    values = contiguous(source, int(size)).copy()
    where = int(target) + 4 * np.arange(values.size)
    smem.scatter(where, np.full(values.shape, 0xFFFFFFFF, np.uint32))

    def arrive():
        smem.scatter(where, values)
        done.copied(int(size))

    current_block().part(Copies).loads.append(arrive)


@instruction(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{target}], [{source}], {size};"
)
def cp_reduce_async_bulk_add_f32(target: address, source: u32, size: u32):
    """Add `size` bytes of float32 to the first numbers of an array, each by an atomic of its own.

    Several at a time add in any order. Part of the thread's bulk group, like a store.
    """
    smem, place = memory(), contiguous(target, int(size)).view(np.float32)
    where, reading = int(source) + 4 * np.arange(place.size), smem.reader()

    def add():
        with reading:
            place[...] += smem.gather(where, np.float32)

    current_block().part(Copies).store(add)


def contiguous(array, size):
    """The first `size` bytes of an array, as 32-bit numbers."""
    if size % 16 or array.nbytes < size or not array.flags.c_contiguous or array.itemsize != 4:
        raise SimulatorError(f"a bulk copy of {size} bytes of an array of {array.nbytes}")
    return array.reshape(-1)[: size // 4].view(np.uint32)


@instruction("fence.proxy.tensormap::generic.acquire.gpu [{tensor}], 128;")
def fence_proxy_tensormap(tensor: u64):
    """See the description of an array as an earlier kernel wrote it: once a block, before its use.

    TMA keeps descriptions in a cache of its own, which nothing else tells of writes.
    """


@instruction("cp.async.bulk.commit_group;")
def cp_async_bulk_commit_group():
    """Close a group of this thread's stores."""
    current_block().part(Copies).commit()


@instruction("cp.async.bulk.wait_group.read 0;")
def cp_async_bulk_wait_group_read():
    """Wait until all groups of this thread have read shared memory, so that it can be reused."""
    current_block().part(Copies).wait(0)


@instruction("cp.async.bulk.wait_group 0;")
def cp_async_bulk_wait_group():
    """Wait until all groups of this thread are written."""
    current_block().part(Copies).wait(0)
