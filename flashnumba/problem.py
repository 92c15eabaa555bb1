"""What the caller asked for, checked once and brought into one form before any allocation."""

import math
import numbers
from dataclasses import dataclass, replace

import numpy as np

from flashnumba import arrays, config, runtime
from flashnumba.config import version
from flashnumba.tensormap import addressable
from flashnumba.window import UNBOUNDED

ON_GPU = ("simt", "mma", "wgmma")
SIMULATED = ("simulator", "simulator-mma", "simulator-wgmma")
BACKENDS = ("numpy", *ON_GPU, *SIMULATED)
LAYOUTS = ("bshd", "bhsd")
PRECISIONS = {"float32": 3, "tf32": 2, "bf16": 1}  # bfloat16 that stand for one float32
FORMS = {
    "bshd": {4: "(batch, {s}, {h}, {d})", 3: "({s}, {h}, {d})", 2: "({s}, {d})"},
    "bhsd": {4: "(batch, {h}, {s}, {d})", 3: "({h}, {s}, {d})", 2: "({s}, {d})"},
}
# Keywords whose feature is still to come, and the value that means "not asked for".
NOT_BUILT = {
    "softcap": None,
    "alibi_slopes": None,
    "bias": None,
    "sinks": None,
    "dropout": 0.0,
    "seed": None,
    "score_mod": None,
    "mask_mod": None,
    "aux": (),
    "block_mask": None,
}


@dataclass(frozen=True)
class Problem:
    """One attention call: arrays as (batch, seqlen, heads, dim) views, the mask as numbers."""

    q: object
    k: object
    v: object
    scale: float
    left: int
    right: int
    upper_left: bool
    q_lengths: object
    kv_lengths: object
    layout: str
    ndim: int
    backend: str
    precision: str  # of products of float32
    like: object  # the caller's q: results are returned as this kind
    deterministic: bool  # of gradients

    @property
    def simulated(self):
        return self.backend.startswith("simulator")

    @property
    def on_gpu(self):
        """Whether it is computed on a GPU."""
        return self.backend in ON_GPU

    @property
    def kernels(self):
        """Whose kernels compute it: "simt", "mma", "wgmma", or "split", of wgmma for float32."""
        name = self.backend.removeprefix("simulator-")
        if name == "wgmma" and self.dtype == "float32":
            return "split"
        return "simt" if name == "simulator" else name

    @property
    def kernels_backward(self):
        """Whose kernels compute gradients: simt's where mma has no tile that fits the GPU."""
        fits = self.kernels != "mma" or config.choose_mma_backward(
            self.dtype, self.q.shape[3], self.machine, simulated=self.simulated
        )
        return self.kernels if fits else "simt"

    @property
    def parts(self):
        """How many bfloat16 are one float32 in the kernels of split."""
        return PRECISIONS[self.precision]

    @property
    def products(self):
        """How many products of TF32 numbers are one of float32 in the kernels of mma."""
        return 3 if self.precision == "float32" else 1

    @property
    def machine(self):
        """What of the GPU decides about tiles."""
        return config.SIMULATED if self.simulated else runtime.machine()

    @property
    def masked(self):
        """Whether the mask bounds the keys of a query on any side, as causal and windows do."""
        return self.left != UNBOUNDED or self.right != UNBOUNDED

    @property
    def tma(self):
        """Whether TMA can address q, k, v, and o, which is allocated without gaps."""
        copied = self.on_gpu and self.xp is np  # without gaps, too
        x = self.q, self.k, self.v
        return self.q.shape[3] % 8 == 0 and (
            copied or all(addressable(y, arrays.address(y)) for y in x)
        )

    @property
    def xp(self):
        return arrays.module(self.q)

    @property
    def dtype(self):
        return self.q.dtype.name

    @property
    def o_shape(self):
        return (*self.q.shape[:3], self.v.shape[3])

    @property
    def lse_shape(self):
        batch, seqlen, heads, _ = self.q.shape
        return (batch, heads, seqlen)

    @property
    def lse_dtype(self):
        """float32; float64 where the inputs are, since the backward takes the scores from lse."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def scale_log2(self):
        """|scale| log2(e), but the smallest normal float32 for 0: kernels multiply -inf by it."""
        limits = np.finfo(np.float32)
        return float(np.clip(abs(self.scale) * math.log2(math.e), limits.tiny, limits.max))

    def mask(self):
        """The mask as the kernels take it."""
        return {
            "left": self.left,
            "right": self.right,
            "upper_left": self.upper_left,
            "q_lengths": self.q_lengths,
            "kv_lengths": self.kv_lengths,
        }

    def resident(self):
        """The same problem with its arrays copied to the current GPU, if they are not there yet."""
        import cupy

        move = lambda x: x if isinstance(x, cupy.ndarray) else cupy.asarray(x, order="C")
        lengths = lambda x: None if x is None else cupy.asarray(x, np.int64)
        return replace(
            self,
            q=move(self.q),
            k=move(self.k),
            v=move(self.v),
            q_lengths=lengths(self.q_lengths),
            kv_lengths=lengths(self.kv_lengths),
        )

    def place(self, x):
        """An array that passed `to_rows` or `to_lse`, beside q; None stays None."""
        return None if x is None else self.xp.asarray(x)

    def to_rows(self, name, x):
        """o or its gradient, passed back by the caller, as a (batch, seqlen, heads, dim) view."""
        x = self._companion(name, x)
        full = _four_axes(x, self.layout) if x.ndim == self.ndim else None
        if full is None or full.shape != self.o_shape:
            expected = self.user_shape(self.o_shape)
            raise ValueError(f"{name}.shape={x.shape} must be that of the output, {expected}")
        if full.dtype != self.q.dtype:
            raise TypeError(f"{name}.dtype={x.dtype} must be that of q, {self.q.dtype}")
        return full

    def to_lse(self, name, x):
        """lse or its gradient, as a (batch, heads_q, seqlen_q) view."""
        x = self._companion(name, x)
        expected = self.lse_shape[4 - self.ndim :]
        if x.shape != expected:
            raise ValueError(
                f"{name}.shape={x.shape} must be (batch, heads_q, seqlen_q), {expected}"
            )
        if x.dtype != self.lse_dtype:
            raise TypeError(f"{name}.dtype={x.dtype} must be {self.lse_dtype}, as lse is")
        return x.reshape(self.lse_shape)

    def from_rows(self, x):
        """A (batch, seqlen, heads, dim) array in the caller's layout, axes and kind."""
        x = x if self.layout == "bshd" else x.transpose(0, 2, 1, 3)
        index = {4: (), 3: (0,), 2: (0, slice(None), 0) if self.layout == "bshd" else (0, 0)}
        return self._to_caller(x[index[self.ndim]])

    def from_lse(self, x):
        """A (batch, heads_q, seqlen_q) array in the caller's axes and kind."""
        return self._to_caller(x[(0,) * (4 - self.ndim)])

    def _companion(self, name, x):
        given, want = arrays.accept(name, x), arrays.library(self.q)
        if arrays.library(given) != want:
            raise TypeError(f"{name} is a {arrays.library(given)} array, but q is a {want} array")
        _same_gpu(name, given, self.q)
        return given

    def user_shape(self, shape):
        """The caller's form of a shape (batch, seqlen, heads, dim)."""
        batch, seqlen, heads, dim = shape
        full = (batch, seqlen, heads, dim) if self.layout == "bshd" else (batch, heads, seqlen, dim)
        return full[4 - self.ndim :] if self.ndim > 2 else (seqlen, dim)

    def _to_caller(self, x):
        if arrays.library(x) == "cupy" and arrays.library(self.like) == "numpy":
            return x.get()
        return arrays.importer(self.like)(x)


def prepare(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    scale=None,
    q_lengths=None,
    kv_lengths=None,
    layout="bshd",
    backend=None,
    precision="float32",
    deterministic=False,
    **not_built,
):
    """Check everything the caller gave and return the `Problem`; nothing is allocated before."""
    _refuse(not_built)
    if not (isinstance(layout, str) and layout in LAYOUTS):
        raise ValueError(f"{layout=} must be one of {LAYOUTS}")
    check_deterministic(deterministic)
    like = q
    q, k, v = (arrays.accept(n, x) for n, x in (("q", q), ("k", k), ("v", v)))
    arrays.importer(like)
    _check_kinds(q, k, v)
    _check_shapes(q, k, v, layout)
    ndim = q.ndim
    q, k, v = (_four_axes(x, layout) for x in (q, k, v))
    _check_precision(precision, q)
    backend = _backend(backend, q, v)
    left, right, upper_left = _mask(causal, window)
    return Problem(
        q=q,
        k=k,
        v=v,
        scale=_scale(scale, q.shape[3]),
        left=left,
        right=right,
        upper_left=upper_left,
        q_lengths=_lengths("q_lengths", q_lengths, q, "seqlen_q"),
        kv_lengths=_lengths("kv_lengths", kv_lengths, k, "seqlen_kv"),
        layout=layout,
        ndim=ndim,
        backend=backend,
        precision=precision,
        like=like,
        deterministic=deterministic,
    )


def check_deterministic(deterministic):
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool, not {type(deterministic).__name__}")


def _refuse(options):
    for name, value in options.items():
        if name not in NOT_BUILT:
            raise TypeError(f"attention got an unexpected keyword argument {name!r}")
        if name == "dropout" and not (isinstance(value, numbers.Real) and 0 <= value < 1):
            raise ValueError(f"dropout={value!r} must be at least 0 and below 1")
        unset = NOT_BUILT[name]
        if value is not unset and not (isinstance(value, (float, int, tuple)) and value == unset):
            raise NotImplementedError(f"{name} is not built yet; leave it at {unset!r}")


def _check_kinds(q, k, v):
    for name, x in (("k", k), ("v", v)):
        if arrays.library(x) != arrays.library(q):
            raise TypeError(
                f"q is a {arrays.library(q)} array, but {name} is a {arrays.library(x)} array; "
                "all three must be of one kind"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name}.dtype={x.dtype} must be that of q, {q.dtype}")
        _same_gpu(name, x, q)
    if q.dtype.name not in arrays.DTYPES or not q.dtype.isnative:
        raise TypeError(f"q.dtype={q.dtype} must be one of {', '.join(arrays.DTYPES)}")


def _same_gpu(name, x, q):
    if arrays.library(x) == "cupy" and arrays.library(q) == "cupy" and x.device != q.device:
        raise ValueError(f"{name} is on GPU {x.device.id}, but q is on GPU {q.device.id}")


def _check_shapes(q, k, v, layout):
    form = FORMS[layout].get(q.ndim)
    if form is None:
        form = FORMS[layout][4].format(s="seqlen_q", h="heads_q", d="head_dim")
        raise ValueError(f"{q.shape=} must be {form}, or the same without batch or heads")
    k_form = form.format(s="seqlen_kv", h="heads_kv", d="head_dim")
    v_form = form.format(s="seqlen_kv", h="heads_kv", d="head_dim_v")
    if k.ndim != q.ndim:
        raise ValueError(f"{k.shape=} must be {k_form}, with as many axes as {q.shape=}")
    if v.ndim != q.ndim:
        raise ValueError(f"{v.shape=} must be {v_form}, with as many axes as {q.shape=}")
    (batch, _, heads_q, dim), (k_batch, seqlen_kv, heads_kv, k_dim), v4 = (
        _four_axes(x, layout).shape for x in (q, k, v)
    )
    if k_batch != batch:
        raise ValueError(f"{k.shape=} must be {k_form} with batch {batch}, as in {q.shape=}")
    if k_dim != dim:
        raise ValueError(f"{k.shape=} must be {k_form} with head_dim {dim}, as in {q.shape=}")
    if v4[:3] != (batch, seqlen_kv, heads_kv):
        raise ValueError(
            f"{v.shape=} must be {v_form} with batch {batch}, seqlen_kv {seqlen_kv} and "
            f"heads_kv {heads_kv}, as in {k.shape=}"
        )
    if dim < 1 or v4[3] < 1:
        raise ValueError(f"head dimensions must be at least 1, not {q.shape=}, {v.shape=}")
    if heads_kv < 1 or heads_q < 1 or heads_q % heads_kv:
        raise ValueError(
            f"heads_q {heads_q} in {q.shape=} must be a positive multiple of heads_kv {heads_kv} "
            f"in {k.shape=}"
        )


def _four_axes(x, layout):
    """A view (batch, seqlen, heads, dim) of an array with 4, 3 or 2 axes."""
    if x.ndim == 2:
        return x[None, :, None, :]
    x = x[None] if x.ndim == 3 else x
    return x if layout == "bshd" else x.transpose(0, 2, 1, 3)


def _mask(causal, window):
    """(left, right, upper_left) of `causal` and `window` together."""
    named = isinstance(causal, str) and causal == "upper_left"
    if not (isinstance(causal, (bool, np.bool_)) or named):
        raise ValueError(f'{causal=} must be True (lower right), False or "upper_left"')
    pair = (None, None) if window is None else window
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
        raise ValueError(f"{window=} must be None or a pair (left, right)")
    for side in pair:
        if side is None:
            continue
        if not isinstance(side, numbers.Integral) or isinstance(side, bool) or side < 0:
            raise ValueError(f"{window=} must hold integers of at least 0, or None for unbounded")
    left, right = (UNBOUNDED if side is None else min(int(side), UNBOUNDED) for side in pair)
    return left, 0 if causal else right, named


def _scale(scale, head_dim):
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not isinstance(scale, numbers.Real) or isinstance(scale, bool):
        raise TypeError(f"scale must be a real number, not {type(scale).__name__}")
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{scale=} must be finite")
    return value


def _lengths(name, lengths, x, seqlen_name):
    """Lengths, int64 if in NumPy. Those on a GPU are not read back: kernels clamp them."""
    if lengths is None:
        return None
    batch, seqlen = x.shape[:2]
    if isinstance(lengths, (numbers.Integral, list, tuple)):
        try:
            lengths = np.array(lengths, ndmin=1)
        except ValueError as error:
            raise TypeError(f"{name} must be one integer a batch entry: {error}") from error
        lengths = lengths.astype(np.int64) if lengths.size == 0 else lengths
    lengths = arrays.accept(name, lengths)
    xp = arrays.module(lengths)
    lengths = xp.atleast_1d(lengths)
    _same_gpu(name, lengths, x)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, not {lengths.dtype}")
    if lengths.shape != (batch,):
        raise ValueError(f"{name}.shape={lengths.shape} must be (batch,), ({batch},)")
    if xp is np:
        bad = (lengths < 0) | (lengths > seqlen)
        if bad.any():
            at = int(bad.argmax())
            raise ValueError(
                f"{name}[{at}]={lengths[at]} must be from 0 to {seqlen_name}, which is {seqlen}"
            )
    elif arrays.library(x) == "numpy":
        raise TypeError(f"{name} is a cupy array, but q is a numpy array")
    return lengths.astype(np.int64) if xp is np else lengths


def _check_precision(precision, q):
    if not (isinstance(precision, str) and precision in PRECISIONS):
        raise ValueError(f"{precision=} must be one of {tuple(PRECISIONS)}")
    if precision != "float32" and q.dtype.name != "float32":
        raise ValueError(f"{precision=} is for float32, not q.dtype={q.dtype}")


def _backend(asked, q, v):
    """The backend to run: the one asked for, if it can; by default the fastest that can."""
    if asked is not None and not (isinstance(asked, str) and asked in BACKENDS):
        raise ValueError(f"backend={asked!r} must be one of {BACKENDS}, or None to choose")
    in_gpu_memory = arrays.library(q) == "cupy"
    if in_gpu_memory and asked not in (None, *ON_GPU):
        raise ValueError(f"backend={asked!r} takes NumPy arrays, but q is in GPU memory")
    if not in_gpu_memory and asked in (None, *ON_GPU) and not runtime.gpu_available():
        if asked is None:
            return "numpy"
        raise RuntimeError(f"backend={asked!r} needs a GPU: {runtime.gpu_problem()}")
    if asked in ("numpy", "simt", "simulator"):
        return asked

    simulated = asked in SIMULATED
    device = q.device.id if in_gpu_memory else None
    machine = config.SIMULATED if simulated else runtime.machine(device)
    prefix = "simulator-" if simulated else ""
    empty = "simulator" if simulated else "simt"
    for name in config.names_of_families():
        if asked in (None, prefix + name):
            obstacle = _obstacle(name, q, v, machine, simulated)
            if obstacle is None:
                return prefix + name if q.size > 0 and v.size > 0 else empty
            if asked is not None:
                raise obstacle
    return "simt"


def _obstacle(name, q, v, machine, simulated):
    """What keeps kernels on tensor cores from a problem, as an error; None when nothing does."""
    (batch, seqlen_q, heads_q, head_dim), (_, seqlen_kv, _, head_dim_v) = q.shape, v.shape
    families = config.families(name)
    dtypes = tuple(dict.fromkeys(d for family in families for d in family.dtypes))
    widest = max((f.head_dim for f in families if q.dtype.name in f.dtypes), default=0)
    who = f"the {name} backends need"
    if q.dtype.name not in dtypes:
        return ValueError(f"{who} {' or '.join(dtypes)}, not q.dtype={q.dtype}")
    if head_dim != head_dim_v or head_dim > widest:
        return ValueError(
            f"{who} head_dim_v equal to head_dim and at most {widest}, not "
            f"{head_dim=}, {head_dim_v=}"
        )
    # They count rows, and tiles of 64 or more queries, in 32 bits.
    if max(seqlen_q, seqlen_kv, batch * heads_q * -(-seqlen_q // 64)) >= 1 << 30:
        return ValueError(
            f"{who} fewer than 2**30 queries, keys, and tiles of 64 queries over "
            f"all heads, not {batch=}, {heads_q=}, {seqlen_q=}, {seqlen_kv=}"
        )
    if simulated:
        return None
    if not any(family.runs_on(machine, q.dtype.name) for family in families):
        return RuntimeError(
            f"the {name} backend needs a GPU of compute capability "
            f"{', '.join(map(str, families))}, not {version(machine.capability)} with "
            f"q.dtype={q.dtype}"
        )
    if name == "mma" and config.choose_mma(q.dtype.name, head_dim, machine) is None:
        return RuntimeError(
            f"no tile of the mma backend with {head_dim=} fits the {machine.shared_bytes} bytes of "
            "shared memory that a block has on this GPU"
        )
    return None
