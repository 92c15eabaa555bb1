"""Which kernel computes a problem, in which tiles, on how many blocks and with which arguments."""

import numpy as np

from flashnumba import runtime
from flashnumba.config import choose_simt, choose_wgmma, heads_together
from flashnumba.tensormap import TensorMap

FAR = 1 << 30  # further than any key is from any query here, and small enough for 32 bits


def config_of(p, name):
    """The tile configuration of a kernel. Hopper's backward will be a case of its own."""
    if p.wgmma and name == "forward":
        return choose_wgmma(p.dtype, p.q.shape[3], p.tma, p.scale < 0)
    return choose_simt(p.dtype, p.q.shape[3], p.v.shape[3], p.simulated)


def kernel_of(p, name):
    if p.wgmma and name == "forward":
        from flashnumba.kernels import forward_wgmma as module
    else:
        from flashnumba.kernels import simt as module
    return getattr(module, f"make_{name}")(config_of(p, name))


def forward_call(p, o, lse):
    """(number of blocks, arguments) of the forward kernel."""
    config = config_of(p, "forward")
    batch, seqlen_q, heads_q, head_dim = p.o_shape
    tiles = batch * heads_q * ceil_div(seqlen_q, config.block_m)
    if not p.wgmma:
        blocks = tiles * ceil_div(head_dim, config.d_slice)
        return blocks, (p.q, p.k, p.v, o, lse, *mask_arguments(p))

    seqlen_kv, heads_kv = p.k.shape[1:3]
    group = heads_together(batch, heads_q, heads_kv, seqlen_kv, head_dim, p.masked)
    if config.tma:
        rows = config.block_m, config.block_n, config.block_n, 16  # a warp stores 16 rows of o
        maps = (TensorMap(x, n) for x, n in zip((p.q, p.k, p.v, o), rows, strict=True))
        tensors = (None, None, p.v, None, lse, *maps)
    else:
        tensors = (p.q, p.k, p.v, o, lse, None, None, None, None)
    counter = np.zeros(2, np.int32) if p.simulated else runtime.COUNTER
    args = (
        *tensors, p.q_lengths, p.kv_lengths, counter, p.scale_log2,
        min(p.left, FAR), min(p.right, FAR), p.upper_left, tiles, group,
    )  # fmt: skip
    # A block stays on its multiprocessor; two in the simulator, so that they share the tiles.
    return min(tiles, 2 if p.simulated else runtime.multiprocessors()), args


def mask_arguments(p):
    """The last parameters of every kernel of simt.py: lengths, scale and window."""
    return p.q_lengths, p.kv_lengths, p.scale, p.left, p.right, p.upper_left


def ceil_div(a, b):
    return -(-a // b)
