"""Tiles of the kernels for Hopper."""

from dataclasses import dataclass

from flashnumba.config.families import width_of


@dataclass(frozen=True)
class WgmmaConfig:
    """Tiles of kernels/forward_wgmma.py.

    `consumers` warpgroups own 64 query rows each and walk the keys `block_n` at a time. `head_dim`
    is the width that is computed, to which narrower heads are padded with zeros.
    """

    dtype: str
    head_dim: int
    consumers: int
    block_n: int
    stages: int  # tiles of K, and as many of V, in shared memory
    q_slots: int  # tiles of Q; with 2, one tile of rows begins while the one before it ends
    tma: bool  # q, k, v and o can be addressed by TMA
    negative: bool = False  # scale is below 0: scores are negated first
    parts: int = 1  # halves whose sum is a number of q, k, v and p; see forward_split.py

    @property
    def block_m(self):
        return 64 * self.consumers

    @property
    def factors(self):
        """The dtype that tensor cores multiply."""
        return "bfloat16" if self.dtype == "float32" else self.dtype

    @property
    def loaded_columns(self):
        """Columns of a tile: each part of a number is in columns of its own."""
        return self.parts * self.head_dim

    @property
    def lanes(self):
        """That arrive for a warp; all, where each moves data itself."""
        return 1 if self.tma else 32

    @property
    def threads(self):
        return 128 * (self.consumers + 1)

    @property
    def registers(self):
        """A thread's registers as (producer, consumer).

        In all no more than a block starts with (65536, in eights a thread), or taking them waits
        for ever: for warpgroups of 384 threads 3 x 168, of 512 4 x 128. With fewer something
        spills, with one compiler or another; loading without TMA takes more.
        """
        if self.consumers == 3:
            return 32, 160
        if self.parts > 1:
            return 56, 224
        return (40, 232) if self.tma else (112, 192)

    @property
    def q_bytes(self):
        return 2 * self.block_m * self.loaded_columns

    @property
    def kv_bytes(self):
        return 2 * self.block_n * self.loaded_columns

    @property
    def o_columns(self):
        """Columns of O that a warp has room for on the way out."""
        return self.head_dim if self.dtype == "float32" else min(self.head_dim, 128)

    @property
    def o_step(self):
        """Bytes from one sub-tile of those columns to the next: of a warp's rows, of all rows."""
        return 128 * (self.block_m if self.dtype == "float32" else 16)

    @property
    def o_bytes(self):
        """Of O in shared memory, but for float32 where Q has as many: O takes its place."""
        size = (4 if self.dtype == "float32" else 2) * self.block_m * self.o_columns
        return 0 if self.dtype == "float32" and self.q_bytes >= size else size

    @property
    def shared_bytes(self):
        tiles = self.q_slots * self.q_bytes + 2 * self.stages * self.kv_bytes
        return tiles + self.o_bytes + 1024  # barriers, descriptions of works, scratch


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles of kernels/backward_wgmma.py: 64 keys a consumer, queries `block_m` at a time.

    Where dK and dV of 64 keys do not fit a consumer's registers, the consumers share 64 keys: each
    has a part of the queries in S and dP, and a part of the columns in dK and dV.
    """

    dtype: str
    head_dim: int
    consumers: int = 2
    block_m: int = 64
    stages: int = 2  # tiles of Q, and as many of dO, in shared memory
    deferred: bool = False  # dQ beside the scores of the next tile, by the consumers in turn
    lagging: bool = False  # dQ a tile later, so that consumers need not keep in step
    deterministic: bool = False  # blocks add to dQ in the order of their keys

    parts = 1  # of a number; SplitBackwardConfig has more

    @property
    def factors(self):
        """The dtype that tensor cores multiply."""
        return self.dtype

    @property
    def shared_keys(self):
        return self.head_dim == 256

    @property
    def block_n(self):
        return 64 if self.shared_keys else 64 * self.consumers

    @property
    def queries(self):
        """Of a tile of s and dp, in one consumer."""
        return self.block_m // self.consumers if self.shared_keys else self.block_m

    @property
    def loaded_columns(self):
        """Columns of a tile: each part of a number is in columns of its own."""
        return self.parts * self.head_dim

    @property
    def threads(self):
        return 128 * (self.consumers + 1)

    @property
    def registers(self):
        """A thread's registers as (producer, consumer); see WgmmaConfig."""
        return (56, 224) if self.head_dim == 64 else (40, 232)

    @property
    def q_bytes(self):
        return 2 * self.block_m * self.loaded_columns

    @property
    def kv_bytes(self):
        return 2 * self.block_n * self.loaded_columns

    @property
    def ds_bytes(self):
        return 2 * self.block_n * self.block_m

    @property
    def do_first(self):
        """Whether dO of a tile is loaded before Q, with lse and delta."""
        return False

    @property
    def pieces(self):
        """In how many a tile of Q, and of dO, is given back and loaded."""
        return 1

    @property
    def stats_slots(self):
        """Of lse and delta. What comes with dO may still be read when that has been."""
        return self.stages + self.do_first

    @property
    def p_bytes(self):
        """Of a tile of P in shared memory, beside dS."""
        return self.ds_bytes if self.shared_keys else 0

    @property
    def ds_slots(self):
        """Tiles of dS, and where keys are shared of P, in shared memory.

        A consumer that lags reads dS of tile n - 2 while the other may already write n + 1: it
        waits for this one's dS of n - 1 alone.
        """
        return 4 if self.lagging else 2

    @property
    def staged(self):
        """Whether dQ is added from shared memory, by TMA; else from registers.

        Only at head_dim 64 is there room.
        """
        return self.deferred

    @property
    def dq_bytes(self):
        return 4 * self.block_m * self.head_dim

    @property
    def dq_burst(self):
        """How many of a thread's numbers of dQ go to global memory with one address.

        At head_dim 128 all at once hold up the other consumer: 4 at a time are 2 to 5% faster
        (H200, T 1024 to 16384). At 256, where consumers keep in step, they are 2% slower.
        """
        return 4 if self.lagging else self.block_m * self.dq_columns // 128

    @property
    def stagger(self):
        """Nanoseconds by which the second consumer begins a work after the first.

        One computes p and ds beside the other's products, if they do not begin together. H200,
        bfloat16, head_dim 128, ms of the kernel at T 1024 / 4096 / 16384, causal: 0.414 / 1.200 /
        4.437, after 400 ns 0.402 / 1.163 / 4.168, 800 ns 0.398 / 1.182 / 4.279, 1600 ns 0.409 /
        1.216 / 4.488. Full, without and after 400 ns: at 4096 2.307 and 2.272, but at 16384 8.31
        and 8.55. At 64 and 256 nothing is gained.
        """
        return 400 if self.lagging else 0

    @property
    def dq_columns(self):
        """Columns of a tile of dq that a consumer computes."""
        return self.head_dim if self.deferred else self.head_dim // self.consumers

    @property
    def dq_threads(self):
        """That compute a tile of dq."""
        return 128 if self.deferred else 128 * self.consumers

    @property
    def shared_bytes(self):
        tiles = 2 * self.kv_bytes + 2 * self.stages * self.q_bytes
        dq_bytes = 2 * self.dq_bytes if self.staged else 0
        p_and_ds = self.ds_slots * (self.p_bytes + self.ds_bytes)
        # lse and delta, flags of keys that are not finite, barriers
        small = self.stats_slots * 8 * self.block_m + 4 * self.block_n
        small += (32 + 16 * self.pieces) * self.stages + 144 + 8 * self.ds_slots
        return tiles + p_and_ds + dq_bytes + small


@dataclass(frozen=True)
class SplitBackwardConfig(BackwardConfig):
    """Tiles of kernels/backward_split.py: 64 keys, queries 64 at a time, float32 as so many parts.

    One consumer computes dv, the other dk and dq.
    """

    parts: int = 3

    @property
    def factors(self):
        return "bfloat16"

    @property
    def itemsize(self):
        return 4

    @property
    def block_n(self):
        return 64

    @property
    def registers(self):
        return 56, 224

    @property
    def do_first(self):
        """With one slot each, dO is done with before Q."""
        return self.stages == 1

    @property
    def pieces(self):
        """With one slot each, half is loaded while the other is still multiplied."""
        return 2 if self.stages == 1 else 1

    @property
    def ds_bytes(self):
        """Of dS in parts, or of p as float32 before: they share their place."""
        return max(2 * self.parts, 4) * self.block_n * self.block_m

    @property
    def ds_slots(self):
        return 1

    @property
    def dq_columns(self):
        return self.head_dim

    @property
    def dq_threads(self):
        return 128


def choose_wgmma_backward(dtype, head_dim, deterministic=False):
    """The tile configuration of the Hopper backward for one problem.

    Shared memory is what limits it: a product of 64 x 64 reads both factors from there at the rate
    at which it computes. H200, float16, T 4096, TFLOP/s of this kernel, full / causal. At 64, with
    half of dQ's columns by each consumer 432 / 398, in turn 486 / 447. At 128 (bfloat16), dQ of the
    same tile 507 / 445, a tile later 558 / 477; with a third slot for Q and dO 551 / 480.
    """
    width = width_of(head_dim)
    if width == 64:
        return BackwardConfig(dtype, width, stages=3, deferred=True, deterministic=deterministic)
    return BackwardConfig(dtype, width, lagging=width == 128, deterministic=deterministic)


def choose_wgmma(dtype, head_dim, tma, negative=False):
    """The tile configuration of the Hopper forward for one problem."""
    width = width_of(head_dim)
    # H200, bfloat16, ratio to cuDNN in the same run at T 1024 / 4096 / 16384:
    #                             full                 causal
    #     D  64   2 consumers     0.94  0.90  0.93     0.86  0.96  0.99
    #             3 consumers     1.06  1.13  1.16     0.94  1.12  1.19
    #     D 128   keys 128        1.00  1.05  1.03     1.02  1.10  1.11
    #             keys 176        0.80  0.97  1.04     0.74  1.02  1.14
    #     D 256   keys 80         0.92  1.09  1.18     0.90  1.03  1.16
    #             keys 64         1.01  1.20  1.18     1.01  1.08  1.18
    # At D 128 keys of 176 leave no room for a second Q.
    # Consumers that take turns at the tensor cores, one's softmax beside the other's products, are
    # no faster: they fall out of step by themselves (D 128, T 4096: 1.02 and 0.97 with turns).
    # Without TMA the producer needs registers that fewer keys and consumers leave it.
    block_n = {64: 128, 128: 128 if tma else 96, 256: 64 if tma else 32}[width]
    consumers, stages = (3, 4) if width == 64 and tma else (2, 2)
    q_slots = 1 if width == 256 else 2
    return WgmmaConfig(dtype, width, consumers, block_n, stages, q_slots, tma, negative)


# By parts and width: keys, stages.
SPLIT_TILES = {
    (1, 64): (128, 2), (1, 128): (128, 2),
    (2, 64): (128, 2), (2, 128): (64, 2),
    (3, 64): (128, 1), (3, 128): (64, 1),
}  # fmt: skip


def choose_split(head_dim, negative=False, parts=3):
    """The tile configuration of forward_split.py: float32 as so many parts."""
    width = width_of(head_dim)
    block_n, stages = SPLIT_TILES[parts, width]
    return WgmmaConfig("float32", width, 2, block_n, stages, 1, True, negative, parts)


def choose_split_backward(head_dim, deterministic=False, parts=3):
    """The tile configuration of backward_split.py: as many slots for Q and dO as there is room for.

    At head_dim 128 that is one of three parts.
    """
    width = width_of(head_dim)
    stages = max(1, 4 - width * parts // 128)
    return SplitBackwardConfig(
        "float32", width, stages=stages, deterministic=deterministic, parts=parts
    )
