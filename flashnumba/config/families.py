"""Which kernels compute what on which GPU."""

from dataclasses import dataclass

HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Family:
    """Kernels of one kind: for which GPUs, by compute capability, and which problems."""

    name: str
    first: tuple
    last: tuple
    dtypes: tuple
    head_dim: int  # at most

    def runs_on(self, machine, dtype):
        return self.first <= machine.capability <= self.last and dtype in self.dtypes

    def __str__(self):
        to = "" if self.first == self.last else " or more"
        return f"{version(self.first)}{to} ({', '.join(self.dtypes)})"


def version(capability):
    return "{}.{}".format(*capability)


# Which kernels compute what, the fastest first. What none of them takes is for "simt".
FAMILIES = (
    Family("wgmma", (9, 0), (9, 0), HALVES, 256),
    Family("wgmma", (9, 0), (9, 0), ("float32",), 128),
    Family("mma", (8, 0), (99, 0), HALVES, 256),
    Family("mma", (7, 5), (7, 5), ("float16",), 256),
    Family("mma", (8, 0), (99, 0), ("float32",), 128),
)


def names_of_families():
    return tuple(dict.fromkeys(family.name for family in FAMILIES))


def families(name):
    return [family for family in FAMILIES if family.name == name]


def width_of(head_dim):
    """Columns that the kernels on tensor cores compute, of which what is more is zeros."""
    return next(size for size in (64, 128, 256) if head_dim <= size)
