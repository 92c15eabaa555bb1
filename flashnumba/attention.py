"""The public functions: check once, plan, allocate, launch. No arithmetic happens here."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from flashnumba import arrays, plans, runtime
from flashnumba.launches import (
    BACKWARD,
    FORWARD,
    WHOLE_ROWS,
    backward_calls,
    config_of,
    forward_calls,
    kernel_of,
)
from flashnumba.problem import check_deterministic, prepare


def attention(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    scale=None,
    q_lengths=None,
    kv_lengths=None,
    return_lse=False,
    layout="bshd",
    backend=None,
    precision="float32",
    softcap=None,
    alibi_slopes=None,
    bias=None,
    sinks=None,
    dropout=0.0,
    seed=None,
    score_mod=None,
    mask_mod=None,
    aux=(),
    block_mask=None,
):
    """Exact softmax attention, ``softmax(scale * q k^T + mask) v``, without storing the scores.

    Parameters
    ----------
    q : array (batch, seqlen_q, heads_q, head_dim)
        NumPy, CuPy or any array that supports DLPack; float16, bfloat16, float32 or float64; any
        strides. The batch axis may be missing, ``(seqlen, heads, dim)``, and so may both others,
        ``(seqlen, dim)``.
    k : array (batch, seqlen_kv, heads_kv, head_dim)
        heads_q must be a multiple of heads_kv: query head h reads key head
        ``h // (heads_q // heads_kv)``.
    v : array (batch, seqlen_kv, heads_kv, head_dim_v)
        head_dim_v may differ from head_dim.
    causal : bool or "upper_left"
        True: query i sees keys up to ``i + seqlen_kv - seqlen_q``, so that the last query sees the
        last key. "upper_left": query i sees keys up to i.
    window : (left, right), optional
        Query i sees keys ``i + seqlen_kv - seqlen_q - left`` to ``... + right``, both included;
        None on a side is unbounded. With ``causal="upper_left"`` counted from i instead.
    scale : float, optional
        Factor on q k^T; ``1 / sqrt(head_dim)`` by default.
    q_lengths, kv_lengths : integer arrays (batch,), optional
        How many queries and keys of each batch entry are real; alignment counts from these. The
        rest is padding: never read into a result, output 0. Lengths in GPU memory are not read
        back to be checked; the kernels clamp them to the sequence.
    return_lse : bool
        Return the logarithm of each row's denominator too.
    layout : "bshd" or "bhsd"
        Order of the axes of q, k, v and o; "bhsd" is PyTorch's.
    backend : str, optional
        By default the fastest that can, on a GPU: "wgmma" (tensor cores of Hopper: compute
        capability 9.0), "mma" (tensor cores of a warp: 7.5 for float16, 8.0 or more for the
        others), both for float16 and bfloat16 with head_dim up to 256 and float32 with head_dim up
        to 128, where head_dim_v is the same; else "simt" (every GPU and problem). Without a GPU,
        "numpy" (tiles of BLAS). "simulator", "simulator-mma" and "simulator-wgmma" run the kernels
        of "simt", "mma" and "wgmma" in Python. A problem without queries or keys runs "simt" under
        all names.
    precision : "float32", "tf32" or "bf16"
        How exact products of float32 are at least on tensor cores: as float32's, with 11 bits of
        each number, or with 8. Less is faster. Sums are float32's; other backends multiply in
        float32 in any case.
    softcap, alibi_slopes, bias, sinks, dropout, seed, score_mod, mask_mod, aux, block_mask
        Reserved; anything but the default raises NotImplementedError.

    Returns
    -------
    o : array (batch, seqlen_q, heads_q, head_dim_v)
        Same kind, dtype and axes as q.
    lse : array (batch, heads_q, seqlen_q)
        Only with ``return_lse``; natural logarithm, float32 (float64 for float64 inputs).

    Raises
    ------
    ValueError, TypeError
        Naming the argument, before anything is allocated.
    NotImplementedError
        For a reserved keyword.
    MemoryError
        If the GPU cannot hold the output; nothing of the caller's is touched.

    Notes
    -----
    A row that sees no key has output 0 and lse -inf. Keys and values that a row does not see are
    never multiplied in, so NaN there does not leak. The same call gives the same bits, always.

    On tensor cores a float32 is the sum of three bfloat16, all 24 bits ("wgmma"), or of two TF32,
    about 22 ("mma"). Either way the error is that of plain float32 attention or less.

    Source: Dao et al., FlashAttention: fast and memory-efficient exact attention (2022).
    """
    options = (
        causal, window, scale, q_lengths, kv_lengths, layout, backend, precision, softcap,
        alibi_slopes, bias, sinks, dropout, seed, score_mod, mask_mod, aux, block_mask,
    )  # fmt: skip
    key, plan = plans.find(q, k, v, options)
    if plan is not None:
        return plan(q, k, v, return_lse)
    names = (name for name in attention.__kwdefaults__ if name != "return_lse")
    problem = prepare(q, k, v, **dict(zip(names, options, strict=True)))
    with _resources(problem):
        here = _resident(problem)
        o, lse = _forward(here)
        plans.keep(key, here, o, lse)
        o = problem.from_rows(o)
        return (o, problem.from_lse(lse)) if return_lse else o


def attention_backward(do, q, k, v, o, lse, *, dlse=None, deterministic=False, **options):
    """Gradients of attention with respect to q, k and v; the scores are computed again.

    Parameters
    ----------
    do : array, shape of o
        Gradient with respect to o; any strides.
    q, k, v : arrays
        As given to `attention`.
    o, lse : arrays
        As `attention` returned them with ``return_lse=True``.
    dlse : array, shape of lse, optional
        Gradient with respect to lse; None is zero.
    deterministic : bool
        The same bits every time. "wgmma" and "mma" are faster without, where blocks add to dq as
        they come; other backends always add in a fixed order.
    **options
        The keywords of `attention` that the forward was called with; `return_lse` has no meaning.

    Returns
    -------
    dq, dk, dv : arrays
        In the shapes, dtype and kind of q, k and v. Heads that share a key head add up in dk, dv.

    Notes
    -----
    Extra memory is one number a query (delta = sum(do * o) - dlse); with "wgmma" and "mma" two, and
    float32 numbers of the size of q, in which dq is added up; and copies of arrays whose addresses
    or strides are no multiples of 16 bytes. "mma" copies those in the forward too. "wgmma" writes
    float32 part by part first, here and in the forward: 6 bytes for a number of q, k, v and do.

    Source: Dao et al., FlashAttention (2022), algorithm 4; Dao, FlashAttention-2 (2023).
    """
    options.pop("return_lse", None)
    given = do, q, k, v, o, lse, dlse
    key, plan = plans.find_backward(given, deterministic, options)
    if plan is not None:
        return plan(*given)
    problem = prepare(q, k, v, deterministic=deterministic, **options)
    do, o = (problem.to_rows(n, x) for n, x in (("do", do), ("o", o)))
    lse = problem.to_lse("lse", lse)
    dlse = None if dlse is None else problem.to_lse("dlse", dlse)
    with _resources(problem):
        here = _resident(problem)
        do, o, lse, dlse = (here.place(x) for x in (do, o, lse, dlse))
        grads = _backward(here, do, o, lse, dlse)
        plans.keep_backward(key, here, (do, here.q, here.k, here.v, o, lse, dlse), grads)
        return tuple(problem.from_rows(x) for x in grads)


def attention_vjp(q, k, v, *, return_lse=False, deterministic=False, **options):
    """Attention and its pullback, in the manner of ``jax.vjp``.

    Parameters
    ----------
    q, k, v, return_lse, **options
        As in `attention`.
    deterministic : bool
        As in `attention_backward`.

    Returns
    -------
    o : array, or (o, lse) with ``return_lse``
    pullback : callable
        ``pullback(do, dlse=None)`` returns ``(dq, dk, dv)``; it may be called many times. It keeps
        references to q, k, v and o: changing them in between changes the gradients.
    """
    if plans.are_cupy(q, k, v):
        check_deterministic(deterministic)
        o, lse = attention(q, k, v, return_lse=True, **options)

        def pullback(do, dlse=None):
            given = do, q, k, v, o, lse
            return attention_backward(*given, dlse=dlse, deterministic=deterministic, **options)

        return (o, lse) if return_lse else o, pullback

    problem = prepare(q, k, v, deterministic=deterministic, **options)
    with _resources(problem):
        here = _resident(problem)
        o, lse = _forward(here)
        result = problem.from_rows(o)
        if return_lse:
            result = result, problem.from_lse(lse)

    def pullback(do, dlse=None):
        do = problem.to_rows("do", do)
        dlse = None if dlse is None else problem.to_lse("dlse", dlse)
        with _resources(problem):
            grads = _backward(here, here.place(do), o, lse, here.place(dlse))
            return tuple(problem.from_rows(x) for x in grads)

    return result, pullback


def explain(q, k, v, **options):
    """Say which kernel a call of `attention` runs, in which tiles, at what cost.

    Takes the arguments of `attention`; computes nothing. On a GPU it compiles the kernels (or finds
    them in the cache) to report registers and spills.

    Returns
    -------
    Explanation
        Prints as a short report.
    """
    options.pop("return_lse", None)
    problem = prepare(q, k, v, **options)
    batch, seqlen_q, heads_q, head_dim = problem.q.shape
    seqlen_kv, heads_kv, head_dim_v = problem.v.shape[1:]
    dense = batch * heads_q * seqlen_q * seqlen_kv * problem.lse_dtype.itemsize
    rows = [
        ("backend", f"{problem.backend} ({BACKEND_NAMES[problem.backend]})"),
        (
            "problem",
            f"{problem.dtype}, batch {batch}, seqlen {seqlen_q} x {seqlen_kv}, "
            f"heads {heads_q} x {heads_kv}, head_dim {head_dim}, head_dim_v {head_dim_v}",
        ),
    ]
    if problem.backend == "numpy":
        from flashnumba.kernels import blas

        tiling = blas.TILING
        rows.append(("tiles", f"{tiling.rows} query rows x {tiling.keys} keys, kernels/blas.py"))
    else:
        rows += _explain_kernels(problem)
    rows.append(("not stored", f"the dense scores, {dense / 2**20:.1f} MiB"))
    return Explanation(tuple(rows))


BACKEND_NAMES = {
    "numpy": "tiles of BLAS on the CPU",
    "simt": "Numba kernels without special instructions, on the GPU",
    "mma": "Numba kernels on the tensor cores of a warp, on the GPU",
    "wgmma": "Numba kernels for Hopper, on the GPU",
    "simulator": "the kernels of simt, run in Python",
    "simulator-mma": "the kernels of mma, run in Python",
    "simulator-wgmma": "the kernels of wgmma, run in Python",
}


@dataclass(frozen=True)
class Explanation:
    """What `explain` found: (name, text) rows; prints as a report."""

    rows: tuple

    def __str__(self):
        return "\n".join(f"{name:<15}{text}" for name, text in self.rows)


def _explain_kernels(problem):
    with arrays.device_of(problem.q):
        config = config_of(problem, "forward")
        yield "tiles", _explain_tiles(config)
        tensor_cores = problem.kernels_backward != "simt"
        if problem.kernels in ("wgmma", "split"):
            by_hand = "threads, since TMA needs addresses and strides of 16 bytes times n"
            yield "moved by", "TMA" if config.tma else by_hand
            yield (
                "registers",
                "{} in warps that move, {} in those that compute".format(*config.registers),
            )
        if problem.kernels != "simt" and problem.dtype == "float32":
            count, kind = problem.products, "TF32"
            if problem.kernels == "split":
                count, kind = problem.parts * (problem.parts + 1) // 2, "bfloat16"
            yield "products", f"{count} of {kind} for one of float32"
        if problem.kernels != "simt" and not tensor_cores:
            head_dim = problem.q.shape[3]
            yield "gradients", f"simt: no tile of mma with head_dim {head_dim} fits this GPU"
        if tensor_cores:
            yield "backward tiles", _explain_tiles(config_of(problem, "backward"))
        names = BACKWARD if tensor_cores else ("delta", "backward_dkdv", "backward_dq")
        forward = FORWARD if problem.kernels == "split" else FORWARD[1:]
        for name in (*forward, *names):
            kernel, cost = kernel_of(problem, name), ""
            if problem.on_gpu:
                cubin = runtime.load(kernel)[1]
                cost = f": {cubin.registers} registers, {cubin.spill_bytes} bytes spilled"
            file = Path(kernel.function.__code__.co_filename).name
            yield name, f"kernels/{file}, make_{name}{cost}"


def _explain_tiles(config):
    return (
        f"{config.block_m} x {config.block_n} scores, {config.threads} threads, "
        f"{config.shared_bytes} bytes of shared memory"
    )


# --- running -----------------------------------------------------------------------------


@contextlib.contextmanager
def _resources(problem):
    """Run on the GPU that holds q, and say clearly when its memory is not enough."""
    if not problem.on_gpu:
        yield
        return
    import cupy

    try:
        with arrays.device_of(problem.q):
            yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise plans.memory_error(error, problem.q, problem.k, problem.v) from error


def _resident(problem):
    """The problem with its arrays where its backend computes."""
    return problem.resident() if problem.on_gpu else problem


def _forward(p):
    """(o, lse) of a problem whose arrays are in place, as (batch, seqlen, heads, dim) views."""
    if p.backend == "numpy":
        from flashnumba.kernels import blas

        return blas.forward(p.q, p.k, p.v, scale=p.scale, **p.mask())
    o = arrays.allocate(p.xp, p.o_shape, p.q.dtype, p.layout)
    lse = p.xp.empty(p.lse_shape, p.lse_dtype)
    room = arrays.of_whole_rows(o, copy=False) if p.kernels in WHOLE_ROWS else o
    for name, blocks, args in forward_calls(p, room, lse):
        _launch(p, name, blocks, *args)
    if room is not o:
        o[...] = room[..., : o.shape[3]]
    return o, lse


def _backward(p, do, o, lse, dlse):
    """(dq, dk, dv) of a problem whose arrays are in place."""
    if p.backend == "numpy":
        from flashnumba.kernels import blas

        return blas.backward(do, dlse, p.q, p.k, p.v, o, lse, scale=p.scale, **p.mask())
    grads = [arrays.allocate(p.xp, x.shape, x.dtype, p.layout) for x in (p.q, p.k, p.v)]
    new = grads
    if p.kernels_backward != "simt":
        form = arrays.of_whole_rows if p.kernels_backward in WHOLE_ROWS else arrays.for_tma
        new = [form(x, copy=False) for x in grads]
    for name, blocks, args in backward_calls(p, do, o, lse, dlse, *new):
        _launch(p, name, blocks, *args)
    for x, y in zip(grads, new, strict=True):
        if x is not y:
            x[...] = y[..., : x.shape[3]]
    return tuple(grads)


def _launch(p, name, blocks, *args):
    if blocks == 0:
        return
    if p.simulated:
        from flashnumba.simulate import launch
    else:
        launch = runtime.launch
    launch(kernel_of(p, name), blocks, args)
