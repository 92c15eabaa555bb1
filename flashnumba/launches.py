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


FORWARD = ("split", "forward")  # the first of float32 on Hopper, before gradients too
BACKWARD = ("prepare", "backward", "convert")  # of the kernels on tensor cores
WHOLE_ROWS = ("mma", "split")  # kernels that take rows of whole 16 bytes
PASSES = {
    ("wgmma", "prepare"): "backward_passes",
    ("wgmma", "convert"): "backward_passes",
    ("mma", "prepare"): "backward_mma_passes",
    ("mma", "convert"): "backward_mma_passes",
    ("split", "prepare"): "backward_mma_passes",
}  # where kernels are that have a file beside the main one's


def config_of(p, name):
    """The tile configuration of a kernel."""
    head_dim, forward = p.q.shape[3], name in FORWARD
    kernels = p.kernels if forward else p.kernels_backward
    if kernels == "split" and forward:
        return choose_split(head_dim, p.scale < 0, p.parts)
    if kernels == "split":
        return choose_split_backward(head_dim, p.deterministic, p.parts)
    if kernels == "wgmma" and forward:
        return choose_wgmma(p.dtype, head_dim, p.tma, p.scale < 0)
    if kernels == "wgmma":
        return choose_wgmma_backward(p.dtype, head_dim, p.deterministic)
    if kernels == "mma":
        choose, choice = choose_mma_backward, p.deterministic
        if forward:
            choose, choice = choose_mma, p.scale < 0
        return choose(p.dtype, head_dim, p.machine, choice, p.simulated, p.products)
    return choose_simt(p.dtype, head_dim, p.v.shape[3], p.simulated)


def kernel_of(p, name):
    """A kernel, ready to compile or to simulate."""
    forward = name in FORWARD
    kernels = p.kernels if forward else p.kernels_backward
    module = f"{'forward' if forward else 'backward'}_{kernels}" if kernels != "simt" else "simt"
    module = import_module(f"flashnumba.kernels.{PASSES.get((kernels, name), module)}")
    return getattr(module, f"make_{name}")(config_of(p, name))


def forward_calls(p, o, lse):
    """[(kernel's name, number of blocks, arguments)] of a forward, in order."""
    of = {
        "simt": _forward_simt, "mma": _forward_mma, "wgmma": _forward_wgmma,
        "split": _forward_split,
    }  # fmt: skip
    return of[p.kernels](p, o, lse)


def backward_calls(p, do, o, lse, dlse, dq, dk, dv):
    """[(kernel's name, number of blocks, arguments)] of a backward, in order.

    Scratch on tensor cores is float32: (batch, heads_q, seqlen_q, head_dim) for dq, two numbers a
    row.
    """
    of = {
        "simt": _backward_simt, "mma": _backward_mma, "wgmma": _backward_wgmma,
        "split": _backward_split,
    }  # fmt: skip
    return of[p.kernels_backward](p, do, o, lse, dlse, dq, dk, dv)


# --- what several have ---------------------------------------------------------------------------


def _window(p):
    return min(p.left, FAR), min(p.right, FAR), p.upper_left


def _counter(p):
    """Of works that blocks have taken."""
    return np.zeros(2, np.int32) if p.simulated else runtime.COUNTER


def _works(p, config):
    """(tiles of rows of all heads, how many heads are worked on side by side) of a forward."""
    batch, seqlen_q, heads_q, _ = p.q.shape
    seqlen_kv, heads_kv, head_dim_v = p.v.shape[1:]
    width = config.loaded_columns if p.kernels == "split" else head_dim_v
    group = heads_together(batch, heads_q, heads_kv, seqlen_kv, width, p.masked)
    return batch * heads_q * ceil_div(seqlen_q, config.block_m), group


def _scratch(p, config):
    """(lse and delta, dq, whose turn it is to add to dq) by tiles of queries."""
    batch, seqlen_q, heads_q, _ = p.q.shape
    tiles = batch, heads_q, ceil_div(seqlen_q, config.block_m)
    rows = p.xp.empty((*tiles, 2 * config.block_m), np.float32)
    parts = p.xp.empty((*tiles, config.block_m * config.head_dim), np.float32)
    return rows, parts, p.xp.empty(tiles, np.int32)


def mask_arguments(p):
    """The last parameters of every kernel of simt.py: lengths, scale and window."""
    return p.q_lengths, p.kv_lengths, p.scale, p.left, p.right, p.upper_left


def ceil_div(a, b):
    return -(-a // b)


# --- forward -------------------------------------------------------------------------------------


def _forward_simt(p, o, lse):
    config = config_of(p, "forward")
    batch, seqlen_q, heads_q, head_dim = p.o_shape
    tiles = batch * heads_q * ceil_div(seqlen_q, config.block_m)
    blocks = tiles * ceil_div(head_dim, config.d_slice)
    return [("forward", blocks, (p.q, p.k, p.v, o, lse, *mask_arguments(p)))]


def _forward_mma(p, o, lse):
    tiles, group = _works(p, config_of(p, "forward"))
    given = (arrays.of_whole_rows(x) for x in (p.q, p.k, p.v))
    mask = p.q_lengths, p.kv_lengths, p.scale_log2, *_window(p)
    return [("forward", tiles, (*given, o, lse, *mask, group))]


def _forward_wgmma(p, o, lse):
    config = config_of(p, "forward")
    tiles, group = _works(p, config)
    if config.tma:
        rows = config.block_m, config.block_n, config.block_n, 16  # a warp stores 16 rows of o
        maps = (TensorMap(x, n) for x, n in zip((p.q, p.k, p.v, o), rows, strict=True))
        tensors = (None, None, p.v, None, lse, *maps)
    else:
        tensors = (p.q, p.k, p.v, o, lse, None, None, None, None)
    return [_in_turn(p, tensors, tiles, group)]


def _in_turn(p, tensors, tiles, group):
    """The call of a Hopper forward. A block stays on its multiprocessor and takes tile after tile.

    Two blocks in the simulator, so that they share the tiles.
    """
    blocks = min(tiles, 2 if p.simulated else runtime.multiprocessors())
    mask = p.q_lengths, p.kv_lengths, _counter(p), p.scale_log2, *_window(p)
    return "forward", blocks, (*tensors, *mask, tiles, group)


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
    rows = config.block_m, config.block_n, config.block_n
    calls, maps = _split(p, config, *zip((p.q, p.k, p.v), rows, strict=True))
    return [*calls, _in_turn(p, (p.v, o, lse, *maps), *_works(p, config))]


# --- backward ------------------------------------------------------------------------------------


def _backward_simt(p, do, o, lse, dlse, dq, dk, dv):
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


def _backward_mma(p, do, o, lse, dlse, dq, dk, dv):
    config = config_of(p, "backward")
    batch, seqlen_q, heads_q, head_dim = p.q.shape
    seqlen_kv, heads_kv = p.k.shape[1:3]
    rows, parts, turns = _scratch(p, config)
    do, q, k, v, o = (arrays.of_whole_rows(x) for x in (do, p.q, p.k, p.v, o))
    together = kv_heads_together(batch, heads_q, heads_kv, seqlen_q, head_dim, p.masked)
    scale_log2 = p.scale_log2 if p.scale >= 0 else -p.scale_log2
    mask = p.q_lengths, p.kv_lengths, p.scale, scale_log2, *_window(p)
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
    mask = p.q_lengths, p.kv_lengths, _counter(p), p.scale, scale_log2, *_window(p)
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
