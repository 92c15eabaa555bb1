"""Barriers in shared memory (mbarrier), numbered barriers (bar), and the register budget.

An mbarrier is a counter of arrivals and of bytes. Its phase ends when as many threads have arrived
as it was made for, and all bytes that they announced have been copied; then the next one begins. A
thread waits for the end of the phase with the given parity: 0 first, then 1, 0, 1, ... So waiting
for parity 1 at a new barrier returns at once: "the phase before the first" counts as ended.
"""

from functools import cache

from flashnumba.ptx._asm import u32
from flashnumba.ptx._instruction import instruction, warpgroup_instruction
from flashnumba.simulate import SimulatorError, current_block, current_thread, wait_until


class Barriers:
    """All mbarriers of a simulated block, by address."""

    def __init__(self, block):
        self.by_address = {}

    def at(self, address):
        if int(address) not in self.by_address:
            raise SimulatorError(f"there is no mbarrier at {int(address)}: no mbarrier_init")
        return self.by_address[int(address)]


class Mbarrier:
    """Arrivals and bytes still to come in this phase, and how many phases have ended."""

    def __init__(self, address, count):
        self.address, self.count, self.pending, self.bytes, self.phase = address, count, count, 0, 0

    def arrive(self, announced=0):
        if self.pending == 0:
            raise SimulatorError(f"one arrival too many at the mbarrier {self.address}")
        self.pending -= 1
        self.bytes += int(announced)
        self.settle()

    def copied(self, size):
        self.bytes -= size
        self.settle()

    def settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def ended(self, parity):
        return self.phase & 1 != int(parity)


def mbarrier(address):
    return current_block().part(Barriers).at(address)


@instruction("mbarrier.init.shared::cta.b64 [{a}], {count};")
def mbarrier_init(a: u32, count: u32):
    """Make a barrier of `count` arrivals a phase, at a multiple of 8."""
    barriers = current_block().part(Barriers).by_address
    if int(a) % 8 or int(a) in barriers:
        raise SimulatorError(f"an mbarrier cannot be made at {int(a)}, or is there already")
    barriers[int(a)] = Mbarrier(int(a), int(count))


@instruction("fence.mbarrier_init.release.cluster;")
def fence_mbarrier_init():
    """Let TMA see barriers just made; cuda.syncthreads lets the other threads see them."""


@instruction("mbarrier.arrive.shared::cta.b64 _, [{a}];")
def mbarrier_arrive(a: u32):
    """One arrival; releases everything this thread did before."""
    mbarrier(a).arrive()


@instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [{a}], {size};")
def mbarrier_arrive_expect_tx(a: u32, size: u32):
    """One arrival, and `size` bytes announced that TMA will copy in this phase."""
    mbarrier(a).arrive(size)


@instruction(
    "{{ .reg .pred ended; RETRY: mbarrier.try_wait.parity.shared::cta.b64 ended, [{a}], {parity}; "
    "@ended bra ENDED; bra RETRY; ENDED: }}"
)
def mbarrier_wait(a: u32, parity: u32):
    """Wait until the phase with this parity has ended."""
    barrier = mbarrier(a)
    wait_until(lambda: barrier.ended(parity), f"mbarrier_wait({int(a)}, {int(parity)})")


class NumberedBarriers:
    """The 16 barriers of a block: arrivals in this round, and how many rounds have ended."""

    def __init__(self, block):
        self.arrivals, self.rounds = [0] * 16, [0] * 16

    def arrive(self, number, threads):
        self.arrivals[number] += 1
        if self.arrivals[number] == threads:
            self.arrivals[number], self.rounds[number] = 0, self.rounds[number] + 1
            current_block().progress = True  # for those who wait, also from a thread's first turn


@instruction("bar.arrive {number}, {threads};")
def bar_arrive(number: u32, threads: u32):
    """Arrive at a numbered barrier, without waiting for the `threads` it takes."""
    current_block().part(NumberedBarriers).arrive(int(number), int(threads))


@instruction("bar.sync {number}, {threads};")
def bar_sync(number: u32, threads: u32):
    """Arrive at a numbered barrier and wait until `threads` have, waiting or not."""
    barriers = current_block().part(NumberedBarriers)
    now = barriers.rounds[int(number)]
    barriers.arrive(int(number), int(threads))
    wait_until(lambda: barriers.rounds[int(number)] > now, f"bar_sync({int(number)})")


class RegisterBudget:
    """Registers a thread, by warpgroup. All of them together are what the block started with.

    It starts with the largest multiple of 8 a thread of which 65536 are enough, as a kernel does
    that is compiled for one block a multiprocessor and needs more; the rest is out of reach.
    """

    def __init__(self, block):
        warpgroups = range(block.size // 128)
        self.start = min(65536 // block.size // 8 * 8, 256)
        self.now = dict.fromkeys(warpgroups, self.start)

    def fits(self, warpgroup, count):
        others = sum(n for w, n in self.now.items() if w != warpgroup)
        return others + count <= self.start * len(self.now)


@cache
def setmaxnreg_dec(count):
    """Give registers back until this warpgroup has `count` a thread, a multiple of 8."""

    @warpgroup_instruction(f"setmaxnreg.dec.sync.aligned.u32 {count};")
    def setmaxnreg_dec():
        budget = current_block().part(RegisterBudget)
        warpgroup = current_thread() // 128
        if count > budget.now[warpgroup] or count % 8:
            raise SimulatorError(f"setmaxnreg_dec({count}) from {budget.now[warpgroup]}")
        budget.now[warpgroup] = count

    return setmaxnreg_dec


@cache
def setmaxnreg_inc(count):
    """Wait until this warpgroup can have `count` registers a thread, a multiple of 8."""

    @instruction(f"setmaxnreg.inc.sync.aligned.u32 {count};")
    def setmaxnreg_inc():
        budget = current_block().part(RegisterBudget)
        warpgroup = current_thread() // 128
        if count < budget.now[warpgroup] or count % 8:
            raise SimulatorError(f"setmaxnreg_inc({count}) from {budget.now[warpgroup]}")
        wait_until(lambda: budget.fits(warpgroup, count), f"setmaxnreg_inc({count})")
        budget.now[warpgroup] = count

    return setmaxnreg_inc
