"""A GPU that is not there: the part of CuPy that flashnumba uses, over host memory.

What is launched is decoded as a driver would decode it, from pointers to 8-byte words, and run by
the simulator at once. While a stream captures, launches are kept and run by `replay`. So all of the
host's path to a kernel is tested without a GPU: calling convention, descriptions of arrays, plans.
"""

import contextlib
import ctypes
import functools
import types
from types import SimpleNamespace

import numpy as np

from flashnumba import runtime, simulate
from flashnumba import workspace as kept
from flashnumba.tensormap import TensorMap


class OutOfMemoryError(MemoryError):
    pass


class ndarray:
    """What flashnumba asks of a CuPy array."""

    def __init__(self, shape, dtype=float, host=None):
        if host is None:
            ndarray.gpu.allocate()
            host = aligned(shape, np.dtype(dtype))
        self.host = host
        self.device = ndarray.gpu.Device(ndarray.gpu.device)
        pointer = host.__array_interface__["data"][0]
        self.data = SimpleNamespace(ptr=pointer, device_id=self.device.id, memory=host)

    def _of(self, host):
        made = ndarray(None, host=host)
        made.device, made.data.device_id = self.device, self.device.id
        return made

    def __getattr__(self, name):  # shape, strides, dtype, ...
        return getattr(self.host, name)

    def __getitem__(self, index):
        return self._of(self.host[index])

    def __setitem__(self, index, value):
        self.host[index] = value

    def transpose(self, *axes):
        return self._of(self.host.transpose(*axes))

    def view(self):
        return self._of(self.host.view())

    def filled(self, values):
        self.host[...] = values
        return self

    def get(self):
        return self.host.copy()


ndarray.__module__ = "cupy"


class FakeGPU:
    """Install with `install(monkeypatch)`; the attributes are what a test may look at or set."""

    def __init__(self):
        self.device, self.stream = 0, 0  # current
        self.capability = {0: "90", 1: "90"}
        self.memory_left = 10**6  # allocations
        self.capturing = {}  # stream -> launches
        self.launches = []  # (kernel key, grid, stream) of everything that has run
        self.run = True  # or only record
        self.kernels, self.attributes, self.forms, self.encoded = [], {}, [], 0
        ndarray.gpu = self

    def allocate(self):
        if self.memory_left == 0:
            raise OutOfMemoryError("out of memory")
        self.memory_left -= 1

    def Device(self, index=None):
        gpu = self

        class Device:
            id = gpu.device if index is None else index
            compute_capability = property(lambda self: gpu.capability[self.id])
            attributes = {"MultiProcessorCount": 3, "MaxSharedMemoryPerBlockOptin": 227 << 10}

            def __eq__(self, other):
                return self.id == other.id

            def __enter__(self):
                self.before, gpu.device = gpu.device, self.id

            def __exit__(self, *error):
                gpu.device = self.before

        return Device()

    # --- what the driver does ---

    def encoder(self, dtype, sizes, strides, rows):
        """Sixteen words that stand for a description."""
        self.forms.append((dtype, sizes, strides, rows))
        number = len(self.forms) - 1

        def encode(address):
            self.encoded += 1
            return (address, number, *range(14))

        return encode

    def tensor_map(self, address):
        """The TensorMap that the 128 bytes at `address` describe."""
        assert address % 64 == 0
        words = at(address, (16,), (8,), "<u8")
        pointer, number = (int(x) for x in words[:2])
        assert words[2:].tolist() == list(range(14)), "nobody has written this description"
        dtype, (dim, seqlen, heads, batch), (s, h, b), rows = self.forms[number]
        return TensorMap(at(pointer, (batch, seqlen, heads, dim), (b, s, h, 2), "<f2"), rows)

    def cached_cubin(self, kernel, cc):
        self.kernels.append(kernel)
        return runtime.Cubin(str(len(self.kernels) - 1), 40, 0, 0, "", b"")

    def launch(self, function, gx, gy, gz, threads, ty, tz, shared, stream, pointers, extra):
        kernel = self.kernels[function]
        assert (gy, gz, ty, tz, extra) == (1, 1, 1, 1, 0)
        assert (threads, shared) == (kernel.threads, kernel.shared_bytes)
        assert shared <= max(48 << 10, self.attributes.get(function, 0))
        count = sum(words_of(kind) for kind in kernel.signature.args)
        table = (ctypes.c_uint64 * count).from_address(pointers)
        words = b"".join((ctypes.c_char * 8).from_address(p).raw for p in table)
        capture = self.capturing.get(stream)
        launched = kernel, gx, stream, words
        self.execute(*launched) if capture is None else capture.append(launched)

    def execute(self, kernel, grid, stream, words):
        self.launches.append((kernel.key, grid, stream))
        if self.run or kernel is kept.writer():
            args, place = [], 0
            for kind in kernel.signature.args:
                part = words[8 * place : 8 * (place + words_of(kind))]
                args.append(self.decode(kind, part))
                place += words_of(kind)
            simulate.launch(kernel, grid, args)

    def decode(self, kind, words):
        if hasattr(kind, "ndim"):
            n = kind.ndim
            _, _, size, itemsize, pointer, *rest = (int(x) for x in np.frombuffer(words, "<i8"))
            if pointer == 0:
                return None
            assert itemsize == np.dtype(kind.dtype.name).itemsize
            assert size == np.prod(rest[:n])
            return at(pointer, rest[:n], rest[n:], np.dtype(kind.dtype.name).str)
        if hasattr(kind, "count"):
            return tuple(np.frombuffer(words, kind.dtype.name))
        if kind.name == "none":
            return None
        value = np.frombuffer(words, kind.name)[0]
        return self.tensor_map(int(value)) if kind.name == "uint64" else value

    @contextlib.contextmanager
    def capture(self, stream):
        """Launches on `stream` are only kept; the list of them is what `replay` takes."""
        self.stream, before = stream, self.stream
        self.capturing[stream] = []
        yield self.capturing[stream]
        del self.capturing[stream]
        self.stream = before

    def replay(self, graph):
        for launched in graph:
            self.execute(*launched)

    # --- the module ---

    def install(self, monkeypatch):
        import sys

        cupy = types.ModuleType("cupy")
        cupy.ndarray = ndarray
        cupy.empty = ndarray
        cupy.zeros = self.zeros
        cupy.asarray = self.asarray
        cupy.atleast_1d = lambda x: x
        cupy.cuda = SimpleNamespace(
            Device=self.Device,
            alloc=lambda size: ndarray(size, np.uint8).data,
            get_current_stream=lambda: SimpleNamespace(ptr=self.stream),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            function=SimpleNamespace(Module=Module),
            runtime=SimpleNamespace(
                getDevice=lambda: self.device,
                getDeviceCount=lambda: len(self.capability),
                memGetInfo=lambda: (0, 0),
                streamIsCapturing=lambda stream: stream in self.capturing,
            ),
            driver=SimpleNamespace(launchKernel=self.launch, funcSetAttribute=self.set_attribute),
        )
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(runtime, "cached_cubin", self.cached_cubin)
        monkeypatch.setattr(runtime, "encoder", functools.cache(self.encoder))
        monkeypatch.setattr(
            runtime, "_properties", functools.cache(runtime._properties.__wrapped__)
        )
        monkeypatch.setattr(runtime, "_loaded", {})
        monkeypatch.setattr(kept, "_workspaces", {})
        monkeypatch.setattr(kept, "_captured", [])
        monkeypatch.setattr(runtime, "_room", runtime.Room())
        monkeypatch.setattr(kept, "_of_thread", kept.OfThread())
        monkeypatch.setattr(runtime, "gpu_available", lambda: True)
        monkeypatch.setattr(sys.modules["flashnumba.plans"], "_plans", {})
        return self

    def zeros(self, shape, dtype):
        x = ndarray(shape, dtype)
        x.host[...] = 0
        return x

    def asarray(self, x, dtype=None, order="K"):
        if isinstance(x, ndarray):
            return x if dtype in (None, x.dtype) else x._of(x.host.astype(dtype))
        x = np.array(x, dtype, order=order)
        made = ndarray(x.shape, x.dtype)
        strides = x.strides if order == "K" else made.strides
        return made._of(np.lib.stride_tricks.as_strided(made.host, x.shape, strides)).filled(x)

    def set_attribute(self, function, attribute, value):
        assert attribute == 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.attributes[function] = value


class Module:
    def load(self, code):
        pass

    def get_function(self, entry):
        return SimpleNamespace(ptr=int(entry))


def aligned(shape, dtype):
    """An array at a multiple of 512 bytes, as CuPy allocates, full of 0xFF: NaN."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(size + 512, 0xFF, np.uint8)
    start = -memory.ctypes.data % 512
    return memory[start : start + size].view(dtype).reshape(shape)


def words_of(kind):
    if hasattr(kind, "ndim"):
        return 5 + 2 * kind.ndim
    return getattr(kind, "count", 1)


def at(address, shape, strides, dtype):
    """The memory at an address as an array."""
    interface = {"data": (address, False), "shape": tuple(shape), "strides": tuple(strides)}
    interface |= {"typestr": dtype, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface))
