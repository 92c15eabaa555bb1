"""Arrays in, the same kind of arrays out: NumPy, CuPy and whatever speaks DLPack."""

import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from calls import problem, run, to_gpu

import flashnumba as fn
from flashnumba import arrays

P = problem(5, 7, batch=2, heads=2, dim=5, dim_v=3)
NAMES = ("q", "k", "v", "do", "dlse")


def everything(given, **options):
    """All results for arrays `given` by name, in the order o, lse, dq, dk, dv."""
    q, k, v, do, dlse = (given[n] for n in NAMES)
    (o, lse), pullback = fn.attention_vjp(q, k, v, return_lse=True, **options)
    o2, lse2 = fn.attention(q, k, v, return_lse=True, **options)
    grads = fn.attention_backward(do, q, k, v, o2, lse2, dlse=dlse, **options)
    assert [type(x) for x in grads] == [type(x) for x in pullback(do, dlse)]
    assert (type(o), type(lse)) == (type(o2), type(lse2))
    return [o, lse, *grads]


def expected(backend, **options):
    """The same as NumPy arrays, from NumPy or CuPy arrays."""
    return list(vars(run(backend, P.q, P.k, P.v, P.do, P.dlse, **options)).values())


def assert_equal(got, want):
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.tobytes() == y.tobytes()


# --- DLPack on the CPU ----------------------------------------------------------------------------


class Tensor:
    """An array of another library: it can be exchanged by DLPack and nothing else."""

    def __init__(self, x, device=(1, 0)):
        self.x, self.device = x, device

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


@pytest.fixture
def library(monkeypatch):
    """A library that `Tensor` belongs to, with nothing in it yet."""
    module = ModuleType("fakelib")
    monkeypatch.setitem(sys.modules, "fakelib", module)
    monkeypatch.setattr(Tensor, "__module__", "fakelib.tensors")
    return module


def to_tensor(x):
    return Tensor(np.from_dlpack(x))


@pytest.mark.parametrize("place", ["fakelib", "fakelib.numpy", "fakelib.dlpack"])
def test_dlpack_arrays_come_back_as_their_own_kind(monkeypatch, library, place):
    """By the library's from_dlpack, wherever it keeps that (torch; cupy, jax.numpy; jax.dlpack)."""
    home = library
    if place != "fakelib":
        home = ModuleType(place)
        monkeypatch.setitem(sys.modules, place, home)
    home.from_dlpack = to_tensor
    given = {n: Tensor(getattr(P, n)) for n in NAMES}
    got = everything(given, backend="numpy", causal=True)
    assert all(type(x) is Tensor for x in got)
    assert_equal([x.x for x in got], expected("numpy", causal=True))


def test_dlpack_shares_memory():
    """Neither the way in nor the way out copies."""
    x = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(arrays.accept("q", Tensor(x)), x)
    assert arrays.importer(x)(x) is x


def test_a_library_that_cannot_take_arrays_back_is_named(library):
    """No from_dlpack anywhere: TypeError with the library's and the class's name."""
    with pytest.raises(TypeError, match="fakelib offers no from_dlpack to return a Tensor"):
        fn.attention(Tensor(P.q), Tensor(P.k), Tensor(P.v), backend="numpy")


def test_lengths_may_be_dlpack_arrays(library):
    """Beside NumPy arrays as beside others."""
    library.from_dlpack = to_tensor
    lengths = np.array([3, 7])
    want = fn.attention(P.q, P.k, P.v, kv_lengths=lengths, backend="numpy")
    got = fn.attention(P.q, P.k, P.v, kv_lengths=Tensor(lengths), backend="numpy")
    assert_equal([got], [want])
    got = fn.attention(*(Tensor(x) for x in (P.q, P.k, P.v)), kv_lengths=lengths, backend="numpy")
    assert_equal([got.x], [want])


def test_torch_cpu_tensors():
    """PyTorch on the CPU, if it is installed: tensors in, tensors out."""
    torch = pytest.importorskip("torch")
    given = {n: torch.from_numpy(getattr(P, n)) for n in NAMES}
    got = everything(given, backend="numpy")
    assert all(type(x) is torch.Tensor for x in got)
    assert_equal([x.numpy() for x in got], expected("numpy"))
    with pytest.raises(TypeError, match="^q: Tensor could not be shared by DLPack"):
        fn.attention(given["q"].requires_grad_(), given["k"], given["v"])


def test_jax_cpu_arrays():
    """JAX on the CPU, if it is installed: arrays in, arrays out."""
    jax = pytest.importorskip("jax")
    cpu = jax.devices("cpu")[0]
    given = {n: jax.device_put(getattr(P, n), cpu) for n in NAMES}
    got = everything(given, backend="numpy")
    assert all(isinstance(x, jax.Array) for x in got)
    assert_equal([np.asarray(x) for x in got], expected("numpy"))


# --- NumPy ----------------------------------------------------------------------------------------


class Special(np.ndarray):
    """A subclass, such as np.memmap is."""


STRIDED = {
    "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "every second": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "transposed": lambda x: np.asfortranarray(x),
    "unaligned": lambda x: np.frombuffer(b"\0" + x.tobytes(), x.dtype, offset=1).reshape(x.shape),
    "subclass": lambda x: x.view(Special),
}


@pytest.mark.parametrize(
    "backend, name", [*(("numpy", name) for name in STRIDED), ("simulator", "reversed")]
)
def test_numpy_arrays_of_any_strides(backend, name):
    """Views, unaligned buffers and subclasses: the bits of plain arrays, as plain arrays."""
    given = {n: STRIDED[name](getattr(P, n)) for n in NAMES}
    assert all(np.array_equal(given[n], getattr(P, n)) for n in NAMES)
    got = everything(given, backend=backend, causal=True)
    assert_equal(got, expected(backend, causal=True))
    assert all(type(x) is np.ndarray for x in got)


def test_zero_strides():
    """One key and value for all, and one query for all: as if they were written out."""
    q, k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (P.q, P.k, P.v))
    do, dlse = np.broadcast_to(P.do[:, :1], P.do.shape), np.broadcast_to(P.dlse[:1], P.dlse.shape)
    given = dict(zip(NAMES, (q, k, v, do, dlse), strict=True))
    written = {n: x.copy() for n, x in given.items()}
    assert_equal(everything(given, backend="numpy"), everything(written, backend="numpy"))


# --- what is no array -----------------------------------------------------------------------------


class Broken(Tensor):
    def __dlpack__(self, **options):
        raise BufferError("cannot export readonly array")


WRONG = {
    "None": (None, "must be a NumPy or CuPy array or support DLPack, not NoneType"),
    "list": ([[1.0]], "must be a NumPy or CuPy array or support DLPack, not list"),
    "number": (1.0, "must be a NumPy or CuPy array or support DLPack, not float"),
    "NumPy number": (np.float32(1), "must be a NumPy or CuPy array or support DLPack, not float32"),
    "text": ("q", "must be a NumPy or CuPy array or support DLPack, not str"),
    "buffer": (memoryview(b"12345678"), "must be a NumPy or CuPy array .* not memoryview"),
    "another device": (
        Tensor(P.q, device=(10, 0)),
        "lives on DLPack device type 10; only CPU and CUDA are supported",
    ),
    "a failing export": (
        Broken(P.q),
        "Broken could not be shared by DLPack: cannot export readonly array",
    ),
}


@pytest.mark.parametrize(
    "name, what",
    [
        (name, what)
        for name in ("q", "k", "v", "kv_lengths", "do")
        for what in WRONG
        if not (name == "kv_lengths" and what in ("None", "list"))  # which are right there
    ],
)
def test_what_is_no_array_is_refused_by_name(name, what):
    """TypeError that starts with the argument's name and ends with what it was."""
    value, message = WRONG[what]
    given = {"q": P.q, "k": P.k, "v": P.v, "do": P.do, "kv_lengths": None, name: value}
    with pytest.raises(TypeError, match=f"^{name}:? {message}"):
        _, pullback = fn.attention_vjp(
            given["q"], given["k"], given["v"], kv_lengths=given["kv_lengths"], backend="numpy"
        )
        pullback(given["do"])


def test_half_of_dlpack_is_refused_by_name():
    """An object with __dlpack__ but without __dlpack_device__."""
    half = SimpleNamespace(__dlpack__=P.q.__dlpack__)
    with pytest.raises(TypeError, match="^q"):
        fn.attention(half, P.k, P.v, backend="numpy")


def test_kinds_must_not_be_mixed(library):
    """A gradient of another library than q; q, k, v only meet as what they are exchanged as."""
    library.from_dlpack = to_tensor
    _, pullback = fn.attention_vjp(P.q, P.k, P.v, backend="numpy")
    grads = pullback(Tensor(P.do))
    assert all(type(x) is np.ndarray for x in grads)
    given = {n: Tensor(getattr(P, n)) for n in NAMES}
    mixed = {**given, "k": P.k, "do": P.do}
    assert_equal(
        [x.x for x in everything(mixed, backend="numpy")],
        [x.x for x in everything(given, backend="numpy")],
    )


# --- on a GPU -------------------------------------------------------------------------------------


def cupy_arrays(cupy):
    return {n: cupy.asarray(getattr(P, n)) for n in NAMES}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "simt"])
def test_cupy_arrays_stay_cupy_arrays(backend):
    """In and out in GPU memory; NumPy arrays through the same kernels are the same bits."""
    import cupy

    got = everything(cupy_arrays(cupy), backend=backend, causal=True)
    assert all(type(x) is cupy.ndarray for x in got)
    numpy_arrays = {n: getattr(P, n) for n in NAMES}
    copied = everything(numpy_arrays, backend=backend, causal=True)
    assert all(type(x) is np.ndarray for x in copied)
    assert_equal([x.get() for x in got], copied)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["reversed", "every second", "transposed"])
def test_cupy_arrays_of_any_strides(form):
    """Views with negative and wide strides: the same bits as of contiguous arrays."""
    import cupy

    given = {n: to_gpu(cupy, STRIDED[form](getattr(P, n))) for n in NAMES}
    assert not all(x.flags.c_contiguous for x in given.values())
    got = everything(given, causal=True)
    assert_equal([x.get() for x in got], expected("gpu", causal=True))


@pytest.mark.gpu
def test_bfloat16_on_a_gpu():
    """CuPy's bfloat16 is ml_dtypes'; results keep it, lse is float32."""
    import cupy

    p = problem(5, 7, dtype="bfloat16", dim=5, dim_v=3)
    given = {n: cupy.asarray(getattr(p, n)) for n in NAMES}
    o, lse, *grads = everything(given)
    assert all(x.dtype == ml_dtypes.bfloat16 for x in (o, *grads))
    assert lse.dtype == np.float32
    want = run("numpy", p.q, p.k, p.v).o.astype(np.float32)
    np.testing.assert_allclose(o.get().astype(np.float32), want, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_cuda_tensors(dtype):
    """PyTorch on the GPU, if it is installed: tensors out, with the bits of CuPy arrays."""
    torch = pytest.importorskip("torch")
    import cupy

    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    p = problem(5, 7, dtype=dtype, dim=5, dim_v=3)
    given = {n: cupy.asarray(getattr(p, n)) for n in NAMES}
    cupy.cuda.get_current_stream().synchronize()
    tensors = {n: torch.from_dlpack(x) for n, x in given.items()}
    got = everything(tensors)
    assert all(type(x) is torch.Tensor and x.is_cuda for x in got)
    assert got[0].dtype == getattr(torch, dtype)
    cupy.cuda.get_current_stream().synchronize()
    assert_equal([cupy.from_dlpack(x).get() for x in got], [x.get() for x in everything(given)])


@pytest.mark.gpu
def test_mixed_memory_is_refused_by_name():
    """CuPy and NumPy arrays in one call: TypeError that names both, before anything runs."""
    import cupy

    q, k, v, do, dlse = (cupy.asarray(getattr(P, n)) for n in NAMES)
    with pytest.raises(TypeError, match="q is a cupy array, but k is a numpy array"):
        fn.attention(q, P.k, v)
    with pytest.raises(TypeError, match="q is a numpy array, but v is a cupy array"):
        fn.attention(P.q, P.k, v)
    with pytest.raises(TypeError, match="kv_lengths is a cupy array, but q is a numpy array"):
        fn.attention(P.q, P.k, P.v, kv_lengths=cupy.array([7, 7]))
    for name in ("numpy", "simulator"):
        with pytest.raises(ValueError, match=f"backend='{name}' takes NumPy arrays, but q is in"):
            fn.attention(q, k, v, backend=name)
    (o, lse), pullback = fn.attention_vjp(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match="do is a numpy array, but q is a cupy array"):
        pullback(P.do)
    with pytest.raises(TypeError, match="dlse is a numpy array, but q is a cupy array"):
        pullback(do, P.dlse)
    with pytest.raises(TypeError, match="lse is a numpy array, but q is a cupy array"):
        fn.attention_backward(do, q, k, v, o, lse.get())


@pytest.mark.gpu
def test_lengths_in_gpu_memory_are_clamped():
    """They are not read back to be checked; NumPy lengths beside CuPy arrays are."""
    import cupy

    q, k, v = (cupy.asarray(getattr(P, n)) for n in "qkv")
    got = fn.attention(q, k, v, kv_lengths=cupy.array([-3, 1000], np.int32), causal=True)
    want = fn.attention(q, k, v, kv_lengths=[0, 7], causal=True)
    assert_equal([got.get()], [want.get()])
    with pytest.raises(ValueError, match=r"kv_lengths\[1\]=1000 must be from 0"):
        fn.attention(q, k, v, kv_lengths=np.array([3, 1000]))


@pytest.mark.gpu
def test_work_is_on_the_current_stream():
    """A call waits for what its stream was doing before, and not for other streams."""
    import cupy

    given, fresh = cupy_arrays(cupy), cupy_arrays(cupy)
    want = [x.get() for x in everything(given)]
    for x in given.values():
        x[...] = np.nan
    cupy.cuda.Device().synchronize()
    busy = cupy.ones((4096, 4096), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            busy = busy @ busy * np.float32(2**-12)  # the inputs arrive late
        for n, x in given.items():
            x[...] = fresh[n]
        got = everything(given)
        stream.synchronize()
        assert_equal([x.get() for x in got], want)


@pytest.mark.gpu
def test_calls_can_be_captured_in_a_cuda_graph():
    """Forward and backward, captured once and replayed on other numbers in the same memory.

    The warm-up call loads the kernels and leaves its memory to the pool, from which the captured
    call allocates its results; they stay referenced while the graph is in use.
    """
    import cupy

    other = problem(5, 7, batch=2, heads=2, dim=5, dim_v=3, seed=9)
    given = cupy_arrays(cupy)
    stream = cupy.cuda.Stream(non_blocking=True)

    def work():
        q, k, v, do, dlse = (given[n] for n in NAMES)
        (o, lse), pullback = fn.attention_vjp(q, k, v, return_lse=True, causal=True)
        return o, lse, *pullback(do, dlse)

    cupy.cuda.Device().synchronize()
    with stream:
        warm = [x.get() for x in work()]
        stream.synchronize()
        stream.begin_capture()
        results = work()
        graph = stream.end_capture()
        for numbers in (other, P):
            for n, x in given.items():
                x.set(getattr(numbers, n))
            for x in results:
                x[...] = np.nan
            graph.launch(stream)
            stream.synchronize()
            got = [x.get() for x in results]
            q, k, v, do, dlse = (getattr(numbers, n) for n in NAMES)
            want = run("gpu", q, k, v, do, dlse, causal=True)
            assert_equal(got, vars(want).values())
    assert_equal(got, warm)


@pytest.mark.gpu
def test_arrays_on_a_second_gpu():
    """Work and results are where q is, whichever GPU is current; both in one call are refused."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("only one GPU")
    want = expected("gpu", causal=True)
    with cupy.cuda.Device(1):
        given = cupy_arrays(cupy)
    with cupy.cuda.Device(0):
        got = everything(given, causal=True, kv_lengths=[7, 7])
        assert cupy.cuda.Device().id == 0
        k = cupy.asarray(P.k)
        with pytest.raises(ValueError, match="k is on GPU 0, but q is on GPU 1"):
            fn.attention(given["q"], k, given["v"])
    assert all(x.device.id == 1 for x in got)
    with cupy.cuda.Device(1):
        assert_equal([x.get() for x in got], want)
