"""From a kernel function to a running kernel: the only file that knows how.

    Python function --numba--> LTO-IR --nvJitLink--> cubin --disk cache--> CuPy module --> launch

Compiling needs no GPU. Going through LTO matters: nvJitLink given PTX spilled up to 600 bytes of
registers where LTO spilled none. A launch goes to CuPy's current stream, allocates nothing and
waits for nothing, so it can be captured in a CUDA graph. What TMA has to be told about arrays is
kept in GPU memory, by stream (workspace.py).

The disk cache is a folder named by a hash of this package's sources and of the compilers' versions,
below FLASHNUMBA_CACHE_DIR (default: the user's cache folder). An entry carries its own checksum:
one that is damaged is compiled again. Entries are written beside their place and moved there, so
processes may race.
"""

import contextlib
import ctypes
import gc
import hashlib
import json
import os
import re
import struct
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from flashnumba.config import Machine
from flashnumba.tensormap import TensorMap, encoder
from flashnumba.workspace import of_stream

COMPILERS = ("numba-cuda", "numba", "llvmlite", "cuda-core", "nvidia-nvvm", "nvidia-nvjitlink")
INFO = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<spills>\d+) bytes spill stores.*"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: machine code, the name of its entry, and what it costs a thread."""

    entry: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    log: str
    code: bytes


def compile_kernel(kernel, cc):
    """Compile for compute capability `cc`, without a GPU and without the cache.

    Parameters
    ----------
    kernel : flashnumba.config.Kernel
    cc : tuple
        (9, 0), or (9, 0, "a") for the instructions of one architecture only.

    Returns
    -------
    Cubin
    """
    try:
        from cuda.core import Linker, LinkerOptions, ObjectCode
        from numba import cuda
    except ImportError as error:
        raise ImportError(
            f"compiling a kernel needs numba-cuda with its compilers ({error}); "
            'install "flashnumba[cu13]" or "flashnumba[cu12]"'
        ) from error
    with _compute_capability(cc), _no_collection():
        ltoir, _ = cuda.compile(
            kernel.function,
            kernel.signature,
            device=False,
            abi="numba",
            cc=cc,
            launch_bounds=(kernel.threads, kernel.blocks),
            output="ltoir",
        )
    options = LinkerOptions(
        arch="sm_" + "".join(map(str, cc)),
        link_time_optimization=True,
        verbose=True,
        ptxas_options=["-v"],
        no_cache=True,  # what nvJitLink finds in its own cache comes without a report
    )
    linker = Linker(ObjectCode.from_ltoir(ltoir), options=options)
    code = bytes(linker.link("cubin").code)
    log = linker.get_info_log() + linker.get_error_log()
    info = INFO.search(log)
    if info is None:
        raise RuntimeError(f"nvJitLink did not report the resources of {kernel.key}: {log}")
    # The mangled name holds a counter of this process, so it is read from the code.
    entry = re.search(rb"\.text\.(\w+)\x00", code).group(1).decode()
    return Cubin(entry, int(info["registers"]), int(info["stack"]), int(info["spills"]), log, code)


@contextlib.contextmanager
def _compute_capability(cc):
    """Numba asks the device for its capability when a kernel calls a function: answer `cc`."""
    from numba.cuda import dispatcher
    from numba.cuda.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        real = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
        try:
            yield
        finally:
            dispatcher.get_current_device = real


@contextlib.contextmanager
def _no_collection():
    """Numba makes millions of objects that live on; looking for garbage among them takes 0.5 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# --- the disk cache ----------------------------------------------------------------------


def cache_directory():
    """Where compiled kernels are kept: `FLASHNUMBA_CACHE_DIR`, or the user's cache folder."""
    if os.environ.get("FLASHNUMBA_CACHE_DIR"):
        return Path(os.environ["FLASHNUMBA_CACHE_DIR"])
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")
    else:
        base = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    return Path(base) / "flashnumba"


@cache
def source_hash():
    """Hash of everything that decides what a kernel compiles to."""
    digest = hashlib.sha256(sys.version.encode())
    root = Path(__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    for name in COMPILERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            digest.update(f"{name} {metadata.version(name)}".encode())
    with contextlib.suppress(Exception):  # a toolkit beside pip has no package; it may be absent
        from cuda.bindings import nvjitlink, nvvm

        digest.update(f"{nvjitlink.version()} {nvvm.ir_version()}".encode())
    return digest.hexdigest()[:16]


def cached_cubin(kernel, cc):
    """The compiled kernel from the disk cache, compiling it when it is not there or damaged."""
    identity = f"{kernel.key} {kernel.signature} {kernel.threads} {kernel.blocks} {cc}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:32]
    path = cache_directory() / source_hash() / f"{name}.cubin"
    cubin = _read(path)
    if cubin is None:
        cubin = compile_kernel(kernel, cc)
        _write(path, cubin)
    return cubin


def _read(path):
    """The entry at `path`, or None when it is missing, truncated or altered."""
    try:
        checksum, header, code = path.read_bytes().split(b"\n", 2)
        if hashlib.sha256(header + code).hexdigest().encode() != checksum:
            return None
        return Cubin(code=code, **json.loads(header))
    except (OSError, ValueError, TypeError):
        return None


def _write(path, cubin):
    """Put an entry in place in one step. An unwritable folder only costs the next start."""
    fields = asdict(cubin)
    code = fields.pop("code")
    header = json.dumps(fields).encode()
    checksum = hashlib.sha256(header + code).hexdigest().encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(checksum + b"\n" + header + b"\n" + code)
            os.chmod(temporary, 0o644)  # others may share the folder
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise


# --- the device --------------------------------------------------------------------------


def gpu_problem():
    """Why no GPU can be used, as a sentence; None when one can."""
    try:
        import cupy
    except ImportError as error:
        return f'CuPy is not installed ({error}); install "flashnumba[cu13]" or "flashnumba[cu12]"'
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CUDA found no GPU ({error})"
    return None if count else "CUDA found no GPU"


@cache
def gpu_available():
    """Whether CuPy is installed and sees a GPU."""
    return gpu_problem() is None


def current_device():
    """Number of the GPU that CuPy works on."""
    import cupy

    return cupy.cuda.runtime.getDevice()


def capability(device=None):
    """Compute capability of a GPU, by default the current one: (9, 0) is Hopper."""
    return _properties(current_device() if device is None else device)[0]


def multiprocessors():
    """How many multiprocessors the current GPU has."""
    return _properties(current_device())[1]


def machine(device=None):
    """What of a GPU decides about tiles, by default of the current one."""
    capability, _, shared_bytes = _properties(current_device() if device is None else device)
    return Machine(capability, shared_bytes)


@cache
def _properties(device):
    import cupy

    gpu = cupy.cuda.Device(device)
    digits = gpu.compute_capability  # "90" is 9.0
    shared_bytes = gpu.attributes["MaxSharedMemoryPerBlockOptin"]
    return (int(digits[:-1]), int(digits[-1])), gpu.attributes["MultiProcessorCount"], shared_bytes


# --- launching ---------------------------------------------------------------------------

COUNTER = object()
MAX_WORDS = 512  # CUDA takes at most 4 KB of parameters, here all of 8 bytes
STATIC_SHARED_BYTES = 48 << 10  # more shared memory than this has to be asked for
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # the attribute of a function to ask with

_loaded = {}  # (kernel, device) -> (CuPy function, how to pack its arguments)


def launch(kernel, grid, args):
    """Launch on CuPy's current device and stream; returns at once.

    Parameters
    ----------
    kernel : flashnumba.config.Kernel
    grid : int
        Number of blocks, at least 1.
    args : sequence
        In the order of the kernel's parameters: CuPy arrays and scalars; None is an empty array,
        or 8 unread bytes for a parameter of type none; a `TensorMap` is the address of its
        description in GPU memory; COUNTER is an int32 array (2,) of zeros, which the kernel leaves
        as zeros.
    """
    arrays = [x.array for x in args if isinstance(x, TensorMap)]
    bind(kernel, grid, args, arrays)(*(x.data.ptr for x in arrays))


def bind(kernel, grid, args, arrays):
    """A launch that is ready but for the addresses of some arrays.

    Parameters
    ----------
    kernel, grid, args
        As `launch` takes them.
    arrays : sequence
        Arrays in `args`, and all those in its TensorMaps.

    Returns
    -------
    Launch
        ``call(*addresses)`` launches with others of the same dtypes, shapes and strides in their
        place, on the device that is current now and on CuPy's then current stream.
    """
    if grid >= 1 << 31:
        raise ValueError(f"the problem needs {grid} thread blocks; CUDA allows {(1 << 31) - 1}")
    device = current_device()
    if (kernel, device) not in _loaded:
        formats = "".join(map(_format, kernel.signature.args))
        _loaded[kernel, device] = load(kernel)[0], struct.Struct("<" + formats).pack_into
    function, pack = _loaded[kernel, device]
    shape = grid, 1, 1, kernel.threads, 1, 1, kernel.shared_bytes
    call = Launch(function, pack, device, shape)
    places = {id(x): i for i, x in enumerate(arrays)}
    for x, kind in zip(args, kernel.signature.args, strict=True):
        call.append(x, kind, places)
    return call


def load(kernel):
    """(CuPy function, Cubin) of a kernel on the current device, through the disk cache."""
    import cupy

    cubin = cached_cubin(kernel, (*capability(), *kernel.arch))
    module = cupy.cuda.function.Module()
    module.load(cubin.code)
    function = module.get_function(cubin.entry)
    if kernel.shared_bytes > STATIC_SHARED_BYTES:
        cupy.cuda.driver.funcSetAttribute(
            function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared_bytes
        )
    return function, cubin


def _format(kind):
    """A parameter for `struct`, each part of it in 8 bytes. An array is 5 + 2 ndim integers."""
    if hasattr(kind, "ndim"):
        return f"{5 + 2 * kind.ndim}q"
    if hasattr(kind, "count"):  # a tuple of equal types
        return kind.count * _format(kind.dtype)
    return {
        "none": "q", "int32": "i4x", "uint32": "I4x", "float32": "f4x",
        "int64": "q", "uint64": "Q", "float64": "d",
    }[kind.name]  # fmt: skip


class Launch:
    """What `bind` returns: a kernel's arguments as words of 8 bytes, and which of them change."""

    def __init__(self, function, pack, device, shape):
        import cupy

        self.cuda = cupy.cuda
        self.function, self.pack, self.device, self.shape = function, pack, device, shape
        self.words = []  # all arguments in Numba's calling convention
        self.gaps = []  # (position, which address) of arrays that may change
        self.maps = []  # (position, which address, encoder) of TensorMaps
        self.counters = []  # positions

    def append(self, x, kind, places):
        """Add an argument. `places` says which address belongs to an array, by its id."""
        at = len(self.words)
        if x is COUNTER:
            self.counters.append(at + 4)
            self.words += (0, 0, 2, 4, 0, 2, 4)
        elif isinstance(x, TensorMap):
            encode = encoder(x.array.dtype.name, x.sizes, x.strides, x.rows)
            self.maps.append((at, places[id(x.array)], encode))
            self.words.append(0)
        elif hasattr(kind, "ndim") and x is not None:
            if id(x) in places:
                self.gaps.append((at + 4, places[id(x)]))
            self.words += (0, 0, x.size, x.itemsize, x.data.ptr, *x.shape, *x.strides)
        elif hasattr(kind, "ndim"):
            self.words += [0] * (5 + 2 * kind.ndim)
        elif hasattr(kind, "count"):
            self.words += x
        else:
            self.words.append(0 if kind.name == "none" else x)

    def __call__(self, *addresses):
        words, stream = self.words.copy(), self.cuda.get_current_stream().ptr
        for at, i in self.gaps:
            words[at] = addresses[i]
        if not self.maps and not self.counters:
            self._launch(words, stream)
            return
        room = of_stream(self.cuda, self.device, stream, len(self.maps), launch)
        with room.lock:  # no other thread's launch comes between descriptions and launch
            for at in self.counters:
                words[at] = room.counter
            keys = [(addresses[i], encode) for _, i, encode in self.maps]
            for (at, _, _), x in zip(self.maps, room.find(keys), strict=True):
                words[at] = x
            self._launch(words, stream)

    def _launch(self, words, stream):
        if self.device not in _room.devices:
            self.cuda.runtime.memGetInfo()  # makes the device's context this thread's
            _room.devices.add(self.device)
        self.pack(_room.words, 0, *words)
        self.cuda.driver.launchKernel(self.function.ptr, *self.shape, stream, _room.pointers, 0)


class Room(threading.local):
    """Where a thread puts arguments, and the pointers to them; the driver copies both."""

    def __init__(self):
        self.words = (ctypes.c_uint64 * MAX_WORDS)()
        first = ctypes.addressof(self.words)
        self._pointers = (ctypes.c_uint64 * MAX_WORDS)(*range(first, first + 8 * MAX_WORDS, 8))
        self.pointers = ctypes.addressof(self._pointers)
        self.devices = set()  # those that this thread has used


_room = Room()
