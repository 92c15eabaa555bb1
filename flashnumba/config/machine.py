"""What a kernel needs, and what a GPU has."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)  # one object a factory call: hashed by identity
class Kernel:
    """A kernel ready to compile or to simulate: a plain Python function and what it needs.

    `key` names function and configuration in words; it is what the disk cache hashes. `arch` is ""
    for the instructions of every GPU, or "a" for those of one architecture only.
    """

    key: str
    function: Callable
    signature: object
    threads: int
    shared_bytes: int = 0  # dynamic shared memory
    arch: str = ""
    blocks: int = 1  # that a multiprocessor must have registers for at once


@dataclass(frozen=True)
class Machine:
    """What of a GPU decides about tiles: bytes of shared memory that a block can have."""

    capability: tuple
    shared_bytes: int


SIMULATED = Machine((9, 0), 227 << 10)
