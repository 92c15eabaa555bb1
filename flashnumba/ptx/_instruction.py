"""One Python function an instruction: the decorator holds its encoding, the body is its meaning.

Compiled, a decorated function is inline PTX. In the simulator it is its body:

    instruction               once per thread, with scalars
    warp_instruction          once per warp, when its 32 lanes have arrived; every operand is an
                              array with one row a lane, and the result must be one too
    warpgroup_instruction     the same for the 128 lanes of four warps
    asynchronous=...          of a warpgroup: the body runs when a wait asks for the result, at the
                              latest moment the machine allows. Until then the accumulator is NaN.
                              The argument is called at issue, for a context to run the body in

An operand that must be the same in every lane (a descriptor) is annotated `uniform(u64)`: the body
receives one number, and lanes that disagree are an error.

Bodies see shared memory and barriers through `part`, the piece of the simulated block that a family
of instructions keeps for itself.
"""

from dataclasses import dataclass

import numpy as np

from flashnumba.ptx import _asm
from flashnumba.simulate import SimulatorError, collective, current_block, current_thread


@dataclass(frozen=True)
class uniform:  # noqa: N801  (reads like the kinds of _asm)
    """An operand that all lanes share."""

    kind: _asm.Kind


def instruction(encoding, pure=False):
    """A thread's own instruction; see `_asm.assemble` for the encoding."""

    def decorate(body):
        return _make(encoding, body, pure, body)

    return decorate


def warp_instruction(encoding, pure=False):
    """An instruction of 32 lanes together."""
    return _of_lanes(encoding, 32, pure)


def warpgroup_instruction(encoding, asynchronous=None):
    """An instruction of 128 lanes together."""
    return _of_lanes(encoding, 128, False, asynchronous)


def _of_lanes(encoding, size, pure, asynchronous=None):
    def decorate(body):
        name, kinds = body.__name__, _operands(body)

        def meet(*operands):
            together = lambda lanes: issue(list(zip(*lanes, strict=True)))
            return collective(name, size, operands, together)

        def issue(columns):
            if asynchronous is None:
                return execute(columns)
            context = asynchronous()

            def late():
                with context:
                    execute(columns)

            wgmma = current_block().part(WarpgroupQueues)
            wgmma.issue(current_thread() // size, name, kinds, columns, late)
            return [None] * size

        def execute(columns):
            stacked = [_stack(name, k, c) for k, c in zip(kinds.values(), columns, strict=True)]
            results = body(*stacked)
            for kind, column, values in zip(kinds.values(), columns, stacked, strict=True):
                if getattr(kind, "mode", "reads") in ("writes", "updates"):
                    for lane, row in zip(column, values, strict=True):
                        lane[: kind.size] = row
            return [None] * size if results is None else list(results)

        return _make(encoding, body, pure, meet)

    return decorate


def _operands(body):
    return {n: k for n, k in body.__annotations__.items() if n != "return"}


def _make(encoding, body, pure, simulated):
    """The intrinsic, with the body that specifies it and the function that simulates it."""
    kinds = {n: getattr(k, "kind", k) if isinstance(k, uniform) else k
             for n, k in _operands(body).items()}  # fmt: skip
    result = body.__annotations__.get("return")
    made = _asm.assemble(encoding, body.__name__, kinds, result, pure)
    made.__doc__, made.encoding, made.body, made.simulated = body.__doc__, encoding, body, simulated
    made.operands, made.result = _operands(body), result
    return made


def _stack(name, kind, column):
    """One operand of all lanes as an array, or as one number if it is uniform."""
    if isinstance(kind, uniform):
        if any(int(x) != int(column[0]) for x in column):
            raise SimulatorError(f"{name}: lanes disagree in an operand that they share: {column}")
        return int(column[0])
    if isinstance(kind, _asm.Fragment):
        return np.stack([x[: kind.size] for x in column]) if kind.mode != "pins" else None
    return np.array(column)


class WarpgroupQueues:
    """Asynchronous instructions in flight, by warpgroup; they complete group by group, in order."""

    def __init__(self, block):
        self.open, self.groups, self.fenced = {}, {}, set()

    def issue(self, warpgroup, name, kinds, columns, execute):
        """Queue an instruction; its accumulators are NaN until a wait completes it."""
        if warpgroup not in self.fenced:
            raise SimulatorError(f"{name} without wgmma_fence since the last wait")
        fragments = [(k, lane) for k, c in zip(kinds.values(), columns, strict=True)
                     if isinstance(k, _asm.Fragment) for lane in c]  # fmt: skip
        lanes = [lane for k, lane in fragments if k.is_output]
        sources = [lane[: k.size] for k, lane in fragments if not k.is_output]
        operation = Operation(name, lanes, sources, execute)
        if not any(lanes[0] is o.lanes[0] for o in self.pending(warpgroup)):
            operation.take_start()
        self.open.setdefault(warpgroup, []).append(operation)

    def pending(self, warpgroup):
        groups = self.groups.get(warpgroup, [])
        return [o for group in groups for o in group] + self.open.get(warpgroup, [])

    def commit(self, warpgroup):
        self.groups.setdefault(warpgroup, []).append(self.open.pop(warpgroup, []))

    def wait(self, warpgroup, allowed):
        """Complete the oldest groups until `allowed` are left."""
        self.fenced.discard(warpgroup)
        groups = self.groups.setdefault(warpgroup, [])
        while len(groups) > allowed:
            while groups[0]:
                operation = groups[0].pop(0)
                operation.complete()
                later = [o for o in self.pending(warpgroup) if o.lanes[0] is operation.lanes[0]]
                if later:
                    later[0].take_start()
            groups.pop(0)

    def finish(self):
        for warpgroup in {**self.groups, **self.open}:
            if left := self.pending(warpgroup):
                names = ", ".join(o.name for o in left)
                raise SimulatorError(f"warpgroup {warpgroup} ended with {names} in flight")


class Operation:
    """An asynchronous instruction, and what its accumulators held when it could have started."""

    def __init__(self, name, lanes, sources, execute):
        self.name, self.lanes, self.execute, self.start = name, lanes, execute, None
        self.sources = [(lane, lane.copy()) for lane in sources]

    def take_start(self):
        self.start = [lane.copy() for lane in self.lanes]
        for lane in self.lanes:
            lane.fill(np.nan)

    def complete(self):
        for lane, start in zip(self.lanes, self.start, strict=True):
            if not np.isnan(lane).all():
                raise SimulatorError(f"an accumulator was written while {self.name} was in flight")
            lane[:] = start
        if any((lane != before).any() for lane, before in self.sources):
            raise SimulatorError(f"an operand was written while {self.name} was in flight")
        self.execute()
