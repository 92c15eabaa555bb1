"""Tiles of the kernels on the tensor cores of a warp, by what a GPU has of shared memory."""

from dataclasses import dataclass

from flashnumba.config.families import width_of


class MmaTiles:
    """What follows from the sizes that both configurations below have."""

    @property
    def threads(self):
        return 32 * self.warps

    @property
    def itemsize(self):
        return 4 if self.dtype == "float32" else 2

    @property
    def row_bytes(self):
        """Of a row of a tile in shared memory: whole sub-tiles of 128 bytes."""
        return -(-self.head_dim * self.itemsize // 128) * 128

    @property
    def q_bytes(self):
        return self.block_m * self.row_bytes

    @property
    def kv_bytes(self):
        return self.block_n * self.row_bytes


@dataclass(frozen=True)
class MmaConfig(MmaTiles):
    """Tiles of kernels/forward_mma.py.

    `warps` own 16 * `tiles` query rows each and walk the keys `block_n` at a time. `head_dim` is
    the width that is computed, a multiple of 32, to which narrower heads are padded with zeros.
    """

    dtype: str
    head_dim: int
    warps: int
    tiles: int
    block_n: int
    stages: int  # tiles of K, and as many of V, in shared memory
    turing: bool = False  # no cp.async; mma.sync takes 8 steps of the sum at a time
    hopper: bool = False  # or later: has stmatrix
    negative: bool = False  # scale is below 0: scores are negated first
    products: int = 3  # of TF32 numbers for one of float32; 1 is plain TF32
    blocks: int = 1  # that share a multiprocessor's registers

    @property
    def block_m(self):
        return 16 * self.tiles * self.warps

    @property
    def shared_bytes(self):
        small = 16 * (self.warps + 2)  # which tiles are visited, a flag
        return self.q_bytes + 2 * self.stages * self.kv_bytes + small


@dataclass(frozen=True)
class MmaBackwardConfig(MmaTiles):
    """Tiles of kernels/backward_mma.py: `block_n` keys, and the queries `block_m` at a time.

    Each product is split among the warps in its own way: so many of them side by side along the
    keys in s and dp (`s_keys`), along the keys in dk and dv (`dkv_keys`) and along the queries in
    dq (`dq_queries`), the others along the columns.
    """

    dtype: str
    head_dim: int
    warps: int
    block_m: int
    block_n: int
    s_keys: int
    dkv_keys: int
    dq_queries: int
    stages: int  # tiles of Q, and as many of dO, in shared memory
    turing: bool = False
    hopper: bool = False  # or later: has stmatrix, and adds 4 numbers at once in global memory
    deterministic: bool = False  # blocks add to dq in the order of their keys
    products: int = 3  # of TF32 numbers for one of float32; 1 is plain TF32
    blocks: int = 1

    @property
    def p_bytes(self):
        """Of a tile of p, or of ds: queries are its columns."""
        return self.block_n * max(128, self.itemsize * self.block_m)

    @property
    def dq_tile(self):
        """(tiles of 16 queries, columns, how often) of dq that a warp computes.

        No more than 32 numbers a thread at once: at head_dim 256 there are no registers for 64.
        """
        tiles = self.block_m // self.dq_queries // 16
        columns = self.head_dim * self.dq_queries // self.warps
        passes = max(1, tiles * columns // 64)
        return tiles, columns // passes, passes

    @property
    def shared_bytes(self):
        tiles = 2 * self.kv_bytes + 2 * self.stages * self.q_bytes + 2 * self.p_bytes
        # lse and delta; whether keys are finite; lengths and such
        small = 8 * self.stages * self.block_m + 4 * (self.block_n + self.warps) + 32
        return tiles + -(-small // 16) * 16


# Forward, by bytes of a number and width: warps, tiles of 16 rows a warp, keys, stages, and how
# many blocks are to share a multiprocessor. The first that fits is taken.
FORWARD_TILES = {
    (2, 64): ((4, 2, 32, 2, 3), (4, 2, 32, 2, 2), (4, 2, 32, 2, 1)),
    (2, 128): (
        (4, 2, 48, 2, 2), (4, 2, 32, 2, 2), (4, 2, 32, 2, 1), (4, 1, 32, 2, 1), (4, 1, 16, 2, 1),
    ),
    (2, 256): (
        (8, 1, 64, 2, 1), (8, 1, 32, 2, 1), (4, 1, 32, 2, 1), (3, 1, 16, 2, 1), (1, 1, 16, 2, 1),
    ),
    (4, 64): ((4, 2, 32, 2, 2), (4, 2, 32, 2, 1), (4, 1, 16, 2, 1)),
    (4, 128): ((4, 2, 16, 2, 2), (4, 2, 16, 2, 1), (4, 1, 16, 2, 1)),
}  # fmt: skip
# Backward: warps, queries, keys, then how products are split, stages, blocks.
BACKWARD_TILES = {
    (2, 64): (
        (4, 64, 64, 2, 2, 2, 2, 3), (8, 64, 128, 4, 4, 2, 2, 1), (4, 64, 64, 2, 2, 2, 2, 1),
        (4, 32, 64, 2, 2, 2, 2, 1), (4, 32, 32, 2, 2, 2, 2, 1),
    ),
    (2, 128): (
        (8, 64, 128, 4, 4, 2, 2, 1), (4, 32, 64, 2, 2, 2, 2, 1), (4, 32, 32, 2, 2, 2, 2, 1),
        (2, 16, 32, 2, 2, 1, 2, 1),
    ),
    (2, 256): (
        (8, 64, 64, 4, 2, 4, 2, 1), (8, 32, 64, 4, 2, 2, 2, 1), (4, 32, 32, 2, 2, 2, 1, 1),
    ),
    (4, 64): (
        (8, 32, 128, 4, 4, 2, 2, 1), (4, 32, 64, 2, 2, 2, 2, 1), (4, 32, 32, 2, 2, 2, 2, 1),
        (2, 16, 32, 2, 2, 1, 2, 1),
    ),
    (4, 128): (
        (8, 32, 64, 4, 2, 2, 2, 1), (4, 32, 32, 2, 2, 2, 1, 1),
    ),
}  # fmt: skip
SIMULATED_TILES = (2, 2, 32, 2, 1), (4, 32, 64, 2, 2, 2, 2, 1)


def choose_mma(dtype, head_dim, machine, negative=False, simulated=False, products=3):
    """The tile configuration of forward_mma.py for one problem on one GPU; None if none fits."""
    width, generation = width_of(head_dim), generation_of(machine)
    itemsize = 4 if dtype == "float32" else 2
    table = (SIMULATED_TILES[0],) if simulated else FORWARD_TILES.get((itemsize, width), ())
    for *tiles, blocks in table:
        config = MmaConfig(dtype, width, *tiles, *generation, negative, products, blocks)
        if fits(config, machine):
            return config
    return None


def choose_mma_backward(dtype, head_dim, machine, deterministic=False, simulated=False, products=3):
    """The same of backward_mma.py."""
    width, generation = width_of(head_dim), generation_of(machine)
    itemsize = 4 if dtype == "float32" else 2
    table = (SIMULATED_TILES[1],) if simulated else BACKWARD_TILES.get((itemsize, width), ())
    for *tiles, blocks in table:
        config = MmaBackwardConfig(
            dtype, width, *tiles, *generation, deterministic, products, blocks
        )
        if fits(config, machine):
            return config
    return None


def fits(config, machine):
    """Whether as many blocks as are to share a multiprocessor do; 1 KB of each is the system's."""
    return config.blocks * (config.shared_bytes + 1024) <= machine.shared_bytes + 1024


def generation_of(machine):
    """(whether a GPU has no more than Turing's instructions, whether it has Hopper's)."""
    return machine.capability < (8, 0), machine.capability >= (9, 0)
