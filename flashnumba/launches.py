"""Which kernel computes a problem, in which tiles, on how many blocks and with which arguments."""

import math
from importlib import import_module

import numpy as np

from flashnumba import arrays, runtime
from flashnumba.config import (
    choose_mma,
    choose_mma_backward,
    choose_simt,
    choose_split,
    choose_split_backward,
    choose_wgmma,
    choose_wgmma_backward,
    heads_together,
    kv_heads_in_turn,
    kv_heads_together,
)
from flashnumba.tensormap import TensorMap

PASSES_AT_ONCE = 4  # blocks of a pass over memory on a multiprocessor
ROWS_AT_ONCE = 8  # of a block of `split`
FAR = 1 << 30  # further than any key is from any query here, and small enough for 32 bits


FORWARD = ("split", "forward")  # of float32 on Hopper, as before gradients; of others the second
BACKWARD = ("prepare", "backward", "convert")  # of the kernels on tensor cores


def config_of(p, name):
    """The tile configuration of a kernel."""
    head_dim, kernels = p.q.shape[3], p.kernels_backward if name in BACKWARD else p.kernels
    if p.split and name in FORWARD:
        return choose_split(head_dim, p.scale < 0, p.parts)
    if p.split and name in BACKWARD:
        return choose_split_backward(head_dim, p.deterministic, p.parts)
    if kernels == "wgmma" and name == "forward":
        return choose_wgmma(p.dtype, head_dim, p.tma, p.scale < 0)
    if kernels == "wgmma" and name in BACKWARD:
        return choose_wgmma_backward(p.dtype, head_dim, p.deterministic)
    if kernels == "mma" and name == "forward":
        return choose_mma(p.dtype, head_dim, p.machine, p.scale < 0, p.simulated, p.products)
    if kernels == "mma" and name in BACKWARD:
        return choose_mma_backward(
            p.dtype, head_dim, p.machine, p.deterministic, p.simulated, p.products
        )
    return choose_simt(p.dtype, head_dim, p.v.shape[3], p.simulated)


def kernel_of(p, name):
    """A kernel, ready to compile or to simulate."""
    if p.split and name in FORWARD:
        module = "forward_split"
    elif p.split and name in BACKWARD:
        module = "backward_mma_passes" if name == "prepare" else "backward_split"
    elif name in ("prepare", "convert"):
        module = {"wgmma": "backward_passes", "mma": "backward_mma_passes"}[p.kernels_backward]
    elif name == "backward":
        module = f"backward_{p.kernels_backward}"
    elif name == "forward" and p.kernels != "simt":
        module = f"forward_{p.kernels}"
    else:
        module = "simt"
    module = import_module(f"flashnumba.kernels.{module}")
    return getattr(module, f"make_{name}")(config_of(p, name))


def forward_calls(p, o, lse):
    """[(kernel's name, number of blocks, arguments)] of a forward, in order."""
    if p.split:
        return _forward_split(p, o, lse)
    return [("forward", *_forward(p, o, lse))]


def _forward(p, o, lse):
    """(number of blocks, arguments) of the forward kernel."""
    config = config_of(p, "forward")
    batch, seqlen_q, heads_q, head_dim = p.o_shape
    tiles = batch * heads_q * ceil_div(seqlen_q, config.block_m)
    if p.kernels == "simt":
        blocks = tiles * ceil_div(head_dim, config.d_slice)
        return blocks, (p.q, p.k, p.v, o, lse, *mask_arguments(p))

    seqlen_kv, heads_kv = p.k.shape[1:3]
    group = heads_together(batch, heads_q, heads_kv, seqlen_kv, head_dim, p.masked)
    window = min(p.left, FAR), min(p.right, FAR), p.upper_left
    if p.mma:
        given = (arrays.of_whole_rows(x) for x in (p.q, p.k, p.v))
        return tiles, (
            *given, o, lse, p.q_lengths, p.kv_lengths, p.scale_log2, *window, group
        )  # fmt: skip
    if config.tma:
        rows = config.block_m, config.block_n, config.block_n, 16  # a warp stores 16 rows of o
        maps = (TensorMap(x, n) for x, n in zip((p.q, p.k, p.v, o), rows, strict=True))
        tensors = (None, None, p.v, None, lse, *maps)
    else:
        tensors = (p.q, p.k, p.v, o, lse, None, None, None, None)
    counter = np.zeros(2, np.int32) if p.simulated else runtime.COUNTER
    args = (
        *tensors, p.q_lengths, p.kv_lengths, counter, p.scale_log2, *window, tiles, group,
    )  # fmt: skip
    # A block stays on its multiprocessor; two in the simulator, so that they share the tiles.
    return min(tiles, 2 if p.simulated else runtime.multiprocessors()), args


def _split(p, config, *tensors):
    """(calls, maps): what writes tensors part by part, and the scratch it writes."""
    calls, maps = [], []
    for x, rows in tensors:
        parts = p.xp.empty((*x.shape[:3], config.loaded_columns), np.uint16)
        calls.append(("split", ceil_div(math.prod(x.shape[:3]), ROWS_AT_ONCE), (x, parts)))
        maps.append(TensorMap(parts, rows))
    return calls, maps


def _forward_split(p, o, lse):
    """Scratch is `parts` bfloat16 for a number of q, k and v."""
    config = config_of(p, "forward")
    batch, seqlen_kv, heads_kv, head_dim = p.k.shape
    heads_q, width = p.q.shape[2], config.loaded_columns
    calls, maps = _split(
        p, config, (p.q, config.block_m), *((x, config.block_n) for x in (p.k, p.v))
    )
    works = batch * heads_q * ceil_div(p.q.shape[1], config.block_m)
    group = heads_together(batch, heads_q, heads_kv, seqlen_kv, width, p.masked)
    window = min(p.left, FAR), min(p.right, FAR), p.upper_left
    counter = np.zeros(2, np.int32) if p.simulated else runtime.COUNTER
    lengths = p.q_lengths, p.kv_lengths
    args = p.v, o, lse, *maps, *lengths, counter, p.scale_log2, *window, works, group
    blocks = min(works, 2 if p.simulated else runtime.multiprocessors())
    return [*calls, ("forward", blocks, args)]


def backward_calls(p, do, o, lse, dlse, dq, dk, dv):
    """[(kernel's name, number of blocks, arguments)] of a backward, in order.

    Scratch on tensor cores is float32: (batch, heads_q, seqlen_q, head_dim) for dq, two numbers a
    row.
    """
    if p.split:
        return _backward_split(p, do, o, lse, dlse, dq, dk, dv)
    on_tensor_cores = {"wgmma": _backward_wgmma, "mma": _backward_mma}.get(p.kernels_backward)
    if on_tensor_cores is not None:
        return on_tensor_cores(p, do, o, lse, dlse, dq, dk, dv)
    delta = p.xp.empty(p.lse_shape, p.lse_dtype)
    config = config_of(p, "backward_dq")
    batch, seqlen_q, heads_q, head_dim = p.q.shape
    seqlen_kv, heads_kv, head_dim_v = p.v.shape[1:]
    of_keys = ceil_div(max(head_dim, head_dim_v), config.d_slice)
    of_keys *= batch * heads_kv * ceil_div(seqlen_kv, config.block_m)
    of_queries = ceil_div(head_dim, config.d_slice)
    of_queries *= batch * heads_q * ceil_div(seqlen_q, config.block_m)
    given = do, p.q, p.k, p.v, lse, delta
    return [
        ("delta", ceil_div(batch * heads_q * seqlen_q, config.threads), (do, o, dlse, delta)),
        ("backward_dkdv", of_keys, (*given, dk, dv, *mask_arguments(p))),
        ("backward_dq", of_queries, (*given, dq, *mask_arguments(p))),
    ]


def _scratch(p, config):
    """(lse and delta, dq, whose turn it is to add to dq) by tiles of queries."""
    batch, seqlen_q, heads_q, _ = p.q.shape
    tiles = batch, heads_q, ceil_div(seqlen_q, config.block_m)
    rows = p.xp.empty((*tiles, 2 * config.block_m), np.float32)
    parts = p.xp.empty((*tiles, config.block_m * config.head_dim), np.float32)
    return rows, parts, p.xp.empty(tiles, np.int32)


def _backward_mma(p, do, o, lse, dlse, dq, dk, dv):
    config = config_of(p, "backward")
    batch, seqlen_q, heads_q, head_dim = p.q.shape
    seqlen_kv, heads_kv = p.k.shape[1:3]
    rows, parts, turns = _scratch(p, config)
    do, q, k, v, o = (arrays.of_whole_rows(x) for x in (do, p.q, p.k, p.v, o))
    together = kv_heads_together(batch, heads_q, heads_kv, seqlen_q, head_dim, p.masked)
    window = min(p.left, FAR), min(p.right, FAR), p.upper_left
    scale_log2 = p.scale_log2 if p.scale >= 0 else -p.scale_log2
    mask = p.q_lengths, p.kv_lengths, p.scale, scale_log2, *window
    works = batch * heads_kv * ceil_div(seqlen_kv, config.block_n)
    return [
        ("prepare", turns.size, (do, o, lse, dlse, p.q_lengths, rows, parts, turns)),
        ("backward", works, (do, q, k, v, rows, parts, turns, dk, dv, *mask, together)),
        ("convert", turns.size, (parts, dq, p.scale)),
    ]


def _backward_split(p, do, o, lse, dlse, dq, dk, dv):
    """Scratch beside that is three bfloat16 for a number of q, k, v and do."""
    config = config_of(p, "backward")
    of_queries, of_keys = config.block_m // config.pieces, config.block_n
    rows, parts, turns = _scratch(p, config)
    calls, maps = _split(
        p, config, (p.q, of_queries), (p.k, of_keys), (p.v, of_keys), (do, of_queries)
    )
    blocks, mask = _works_and_mask(p, config)
    do, o = (arrays.of_whole_rows(x) for x in (do, o))
    return [
        *calls,
        ("prepare", turns.size, (do, o, lse, dlse, p.q_lengths, rows, parts, turns)),
        ("backward", blocks, (rows, parts, turns, *maps, dk, dv, *mask)),
        ("convert", turns.size, (parts, dq, p.scale)),
    ]


def _works_and_mask(p, config):
    """(number of blocks, last arguments) of the Hopper backwards: the mask, and their works."""
    batch, seqlen_q, heads_q, _ = p.q.shape
    seqlen_kv, heads_kv = p.k.shape[1:3]
    n_blocks = ceil_div(seqlen_kv, config.block_n)
    scale_log2 = p.scale_log2 if p.scale >= 0 else -p.scale_log2
    window = min(p.left, FAR), min(p.right, FAR), p.upper_left
    counter = np.zeros(2, np.int32) if p.simulated else runtime.COUNTER
    mask = p.q_lengths, p.kv_lengths, counter, p.scale, scale_log2, *window
    # A block stays on its multiprocessor. In the simulator one ends before the next begins, and
    # might wait for its turn after that for ever.
    at_once = 1 if p.simulated else runtime.multiprocessors()
    if p.deterministic and not p.masked:
        together = kv_heads_in_turn(batch, heads_kv, n_blocks, at_once)
    else:
        columns = config.head_dim * (config.parts + 1) // 2  # 4 bytes a part, and 4 of dq
        together = kv_heads_together(batch, heads_q, heads_kv, seqlen_q, columns, p.masked)
    works = batch * heads_kv * n_blocks
    sizes = works, n_blocks, together, seqlen_q, seqlen_kv, heads_kv
    return min(works, at_once), (*mask, *sizes)


def _backward_wgmma(p, do, o, lse, dlse, dq, dk, dv):
    config = config_of(p, "backward")
    batch, seqlen_q, heads_q, _ = p.q.shape
    rows, parts, turns = _scratch(p, config)
    q_map, do_map, o_map = (TensorMap(arrays.for_tma(x), config.block_m) for x in (p.q, do, o))
    k_map, v_map = (TensorMap(arrays.for_tma(x), config.block_n) for x in (p.k, p.v))
    dq_map, dk_map, dv_map = TensorMap(dq, config.block_m), TensorMap(dk, 16), TensorMap(dv, 16)
    maps = q_map, k_map, v_map, do_map, dk_map, dv_map
    blocks, mask = _works_and_mask(p, config)
    m_works = batch * heads_q * ceil_div(seqlen_q, config.block_m)
    m_at_once = min(m_works, PASSES_AT_ONCE * (1 if p.simulated else runtime.multiprocessors()))
    before = do_map, o_map, lse, dlse, p.q_lengths, rows, parts, turns, m_works
    return [
        ("prepare", m_at_once, before),
        ("backward", blocks, (rows, parts, turns, *maps, *mask)),
        ("convert", m_at_once, (parts, dq_map, seqlen_q, p.scale, m_works)),
    ]


def mask_arguments(p):
    """The last parameters of every kernel of simt.py: lengths, scale and window."""
    return p.q_lengths, p.kv_lengths, p.scale, p.left, p.right, p.upper_left


def ceil_div(a, b):
    return -(-a // b)
