"""The same call again, of attention or its gradients: what was decided the first time, by its form.

A plan is found by all that decides about a call but the addresses of its arrays, so the second call
of a form checks nothing, allocates the results and launches.
"""

import sys
import threading
from dataclasses import replace

from flashnumba import runtime
from flashnumba.arrays import has_whole_rows
from flashnumba.launches import WHOLE_ROWS, backward_calls, forward_calls, kernel_of
from flashnumba.tensormap import addressable

MAX_PLANS = 1024
DROPOUT = 12  # its place among the options

_plans = {}  # key -> Plan: the steady state is one look-up here and one launch
_plans_change = threading.Lock()


def memory_error(error, *inputs):
    need = sum(x.nbytes for x in inputs)
    return MemoryError(
        f"the GPU's memory is not enough beside inputs of {need / 2**20:.1f} MiB: {error}. "
        "The inputs are untouched; free memory or split the batch"
    )


class Allocating:
    """What results are made with, and where."""

    def __init__(self, xp):
        self.empty, self.alloc = xp.ndarray, xp.cuda.alloc
        self.out_of_memory = xp.cuda.memory.OutOfMemoryError
        self.current_device = xp.cuda.runtime.getDevice


def bind_all(p, calls, known):
    """(launches, bytes of scratch): these take the addresses of `known`, then those of scratch."""
    mine, scratch = set(map(id, known)), {}
    for x in (x for _, _, args in calls for x in args if isinstance(x, p.xp.ndarray)):
        if id(x) not in mine:
            scratch[id(x)] = x
    known = [*known, *scratch.values()]
    launches = [
        runtime.bind(kernel_of(p, name), blocks, args, known) for name, blocks, args in calls
    ]
    return launches, [x.nbytes for x in scratch.values()]


class Plan(Allocating):
    """A forward on a GPU that ran before, without the addresses of its arrays: nothing to check."""

    def __init__(self, p, o, lse):
        p = replace(p, q=p.q.view(), k=p.k.view(), v=p.v.view())  # three objects, even of one
        calls = forward_calls(p, o, lse)
        self.launches, self.scratch_bytes = bind_all(p, calls, [p.q, p.k, p.v, o, lse])
        self.o = p.user_shape(p.o_shape), o.dtype
        self.lse = p.lse_shape[4 - p.ndim :], lse.dtype
        self.lse_bytes = lse.nbytes
        super().__init__(p.xp)

    def __call__(self, q, k, v, return_lse):
        """o or (o, lse) in the caller's form.

        An lse that nobody asked for is memory alone, which costs less than an array; it is free
        again after the launch, for what comes later on the stream.
        """
        if self.current_device() != self.launches[0].device:
            with q.device:
                return self(q, k, v, return_lse)
        try:
            o = self.empty(*self.o)
            lse = self.empty(*self.lse) if return_lse else None
            memory = lse.data if return_lse else self.alloc(self.lse_bytes)
            scratch = [self.alloc(size) for size in self.scratch_bytes]
        except self.out_of_memory as error:
            raise memory_error(error, q, k, v) from error
        addresses = q.data.ptr, k.data.ptr, v.data.ptr, o.data.ptr, memory.ptr
        if scratch:
            addresses += tuple(x.ptr for x in scratch)
        for launch in self.launches:
            launch(*addresses)
        return (o, lse) if return_lse else o


class BackwardPlan(Allocating):
    """Gradients on a GPU that were computed before, without the addresses of the arrays."""

    def __init__(self, p, given, grads):
        given = [None if x is None else x.view() for x in given]  # all different, even of one
        do, q, k, v, o, lse, dlse = given
        p = replace(p, q=q, k=k, v=v)
        calls = backward_calls(p, do, o, lse, dlse, *grads)
        known = [x for x in (*given, *grads) if x is not None]
        self.launches, self.scratch_bytes = bind_all(p, calls, known)
        self.grads = [(p.user_shape(x.shape), x.dtype) for x in (q, k, v)]
        super().__init__(p.xp)

    def __call__(self, *given):
        """(dq, dk, dv) in the caller's form."""
        given = [x for x in given if x is not None]
        if self.current_device() != self.launches[0].device:
            with given[0].device:
                return self(*given)
        try:
            grads = tuple(self.empty(*form) for form in self.grads)
            scratch = [self.alloc(size) for size in self.scratch_bytes]
        except self.out_of_memory as error:
            raise memory_error(error, *given) from error
        addresses = [x.data.ptr for x in given] + [x.data.ptr for x in grads]
        addresses += [x.ptr for x in scratch]
        for launch in self.launches:
            launch(*addresses)
        return grads


def are_cupy(*arrays):
    """Whether all are CuPy arrays, no subclass."""
    kind = getattr(sys.modules.get("cupy"), "ndarray", None)
    return kind is not None and all(type(x) is kind for x in arrays)


def find_backward(given, deterministic, options):
    """`find` for the gradients; `given` is do, q, k, v, o, lse, dlse."""
    present = given if given[6] is not None else given[:6]
    if not are_cupy(*present):
        return None, None
    try:
        types = [
            (type(x), tuple(map(type, x)) if type(x) is tuple else ()) for x in options.values()
        ]
        key = (
            "backward", len(present),
            *[(x.shape, x.strides, x.dtype, x.data.device_id) for x in present],
            *[x.data.ptr % 16 for x in present],
            deterministic, type(deterministic), *options, *options.values(), *types,
        )  # fmt: skip
        return key, _plans.get(key)
    except TypeError:
        return None, None


def keep_backward(key, p, given, grads):
    """Make a plan, where nothing is copied for the sake of its form."""
    arrays = *given[:5], *grads
    if key is None or not p.on_gpu or any(x.size == 0 for x in arrays):
        return
    if p.q_lengths is not None or p.kv_lengths is not None:
        return
    kernels = p.kernels_backward
    if kernels == "wgmma" and not all(addressable(x, x.data.ptr) for x in arrays):
        return
    if kernels in WHOLE_ROWS and not all(map(has_whole_rows, arrays)):
        return
    _keep(key, BackwardPlan(p, given, grads))


def find(q, k, v, options):
    """(key, plan or None) of a call; no key for what is not in CuPy arrays or not known by value.

    The key holds all that decides about a call but the addresses. True == 1 == 1.0 == 1 + 0j, of
    which not all are allowed: hence the types of those options that are numbers.
    """
    if not are_cupy(q, k, v):
        return None, None
    causal, window, scale = options[:3]
    try:
        key = (
            q.shape, q.strides, q.dtype, q.data.device_id,
            k.shape, k.strides, k.dtype, k.data.device_id,
            v.shape, v.strides, v.dtype, v.data.device_id,
            (q.data.ptr | k.data.ptr | v.data.ptr) % 16,  # TMA needs 0
            options, type(causal), type(scale), type(options[DROPOUT]),
            None if window is None else tuple(map(type, window)),
        )  # fmt: skip
        return key, _plans.get(key)
    except TypeError:  # an option that has no hash, such as an array or a list
        return None, None


def keep(key, p, o, lse):
    """Make a plan for calls like `p`, unless it has arrays of lengths or nothing to compute."""
    if key is None or o.size == 0 or p.q_lengths is not None or p.kv_lengths is not None:
        return
    arrays = (o,) if p.kernels == "split" else (p.q, p.k, p.v, o)
    if p.kernels in WHOLE_ROWS and not all(map(has_whole_rows, arrays)):
        return
    _keep(key, Plan(p, o, lse))


def _keep(key, plan):
    with _plans_change:
        while len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]  # the oldest
        _plans[key] = plan
