"""NumPy, CuPy or DLPack arrays in, the same kind out."""

import contextlib
import sys

import numpy as np

from flashnumba.tensormap import addressable

DTYPES = ("float16", "bfloat16", "float32", "float64")
DLPACK_CPU, DLPACK_CUDA, DLPACK_CUDA_MANAGED = 1, 2, 13


def library(x):
    """The package that an array's class belongs to: "numpy", "cupy", "torch", "jaxlib", ..."""
    if isinstance(x, np.ndarray):
        return "numpy"
    return type(x).__module__.partition(".")[0]


def accept(name, x):
    """`x` as a NumPy or CuPy array that shares its memory.

    Parameters
    ----------
    name : str
        The argument's name, for errors.
    x : array
        NumPy, CuPy, or anything with `__dlpack__` in CPU or CUDA memory (PyTorch, JAX, ...).

    Raises
    ------
    TypeError
        If `x` is no array, or lives where neither NumPy nor CuPy can reach it.
    """
    if isinstance(x, np.ndarray) or library(x) == "cupy":
        return x
    if not hasattr(x, "__dlpack__"):
        raise TypeError(
            f"{name} must be a NumPy or CuPy array or support DLPack, not {type(x).__name__}"
        )
    try:
        device = int(x.__dlpack_device__()[0])
        if device == DLPACK_CPU:
            return np.from_dlpack(x)
        if device in (DLPACK_CUDA, DLPACK_CUDA_MANAGED):
            import cupy

            return cupy.from_dlpack(x)
    except Exception as error:
        raise TypeError(
            f"{name}: {type(x).__name__} could not be shared by DLPack: {error}"
        ) from error
    raise TypeError(f"{name} lives on DLPack device type {device}; only CPU and CUDA are supported")


def importer(like):
    """The function that makes an array of the kind of `like` from a NumPy or CuPy array."""
    package = library(like)
    if package in ("numpy", "cupy"):
        return lambda x: x
    package = {"jaxlib": "jax"}.get(package, package)
    for name in (package, f"{package}.numpy", f"{package}.dlpack"):
        from_dlpack = getattr(sys.modules.get(name), "from_dlpack", None)
        if from_dlpack is not None:
            return from_dlpack
    raise TypeError(f"{package} offers no from_dlpack to return a {type(like).__name__} with")


def module(x):
    """The array module of a NumPy or CuPy array."""
    return sys.modules[library(x)]


def device_of(x):
    """A context in which the GPU that holds `x` is current; for NumPy arrays, no change."""
    return contextlib.nullcontext() if isinstance(x, np.ndarray) else x.device


def address(x):
    """Where the first number of a NumPy or CuPy array is."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def allocate(xp, shape, dtype, layout):
    """An uninitialised (batch, seqlen, heads, dim) array, contiguous in the caller's layout."""
    if layout == "bshd":
        return xp.empty(shape, dtype)
    batch, seqlen, heads, dim = shape
    return xp.empty((batch, heads, seqlen, dim), dtype).transpose(0, 2, 1, 3)


def for_tma(x, copy=True):
    """x itself if TMA can address it, else a copy (or room for one) with rows of 16 bytes."""
    if addressable(x, address(x)):
        return x
    *shape, dim = x.shape
    room = module(x).empty((*shape, dim + -dim % 8), x.dtype)[..., :dim]
    if copy:
        room[...] = x
    return room


def has_whole_rows(x):
    """Whether the rows of x are whole multiples of 16 bytes, in reach of 32 bits."""
    dense = x.shape[3] * x.itemsize % 16 == 0 and addressable(x, address(x))
    return dense and (x.shape[1] < 2 or x.strides[1] < 1 << 31)


def of_whole_rows(x, copy=True):
    """x itself if it has whole rows, else a copy (or room for one) with zeros behind its columns.

    Attention is the same with columns of zeros.
    """
    if has_whole_rows(x):
        return x
    *shape, dim = x.shape
    room = module(x).zeros((*shape, dim + -dim % (16 // x.itemsize)), x.dtype)
    if copy:
        room[..., :dim] = x
    return room
