"""From a kernel function to a running kernel: the only file that knows how.

    Python function --numba--> LTO-IR --nvJitLink--> cubin --disk cache--> CuPy module --> launch

Compiling needs no GPU. Going through LTO matters: nvJitLink given PTX spilled up to 600 bytes of
registers where LTO spilled none. A launch goes to CuPy's current stream, allocates nothing and
waits for nothing, so it can be captured in a CUDA graph.

The disk cache is a folder named by a hash of this package's sources and of the compilers' versions,
below FLASHNUMBA_CACHE_DIR (default: the user's cache folder). An entry carries its own checksum:
one that is damaged is compiled again. Entries are written beside their place and moved there, so
processes may race.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np

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
    with _compute_capability(cc):
        ltoir, _ = cuda.compile(
            kernel.function,
            kernel.signature,
            device=False,
            abi="numba",
            cc=cc,
            launch_bounds=(kernel.threads, 1),
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
    identity = f"{kernel.key} {kernel.signature} {kernel.threads} {cc}"
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


_loaded = {}  # (kernel, device) -> CuPy function: the steady state is one look-up here


def launch(kernel, grid, args):
    """Launch on CuPy's current device and stream; returns at once.

    Parameters
    ----------
    kernel : flashnumba.config.Kernel
    grid : int
        Number of blocks, at least 1.
    args : sequence
        CuPy arrays and scalars in the order of the kernel's parameters; None is an empty array.
    """
    import cupy

    if grid >= 1 << 31:
        raise ValueError(f"the problem needs {grid} thread blocks; CUDA allows {(1 << 31) - 1}")
    device = cupy.cuda.runtime.getDevice()
    function = _loaded.get((kernel, device))
    if function is None:
        function = _loaded[kernel, device] = load(kernel)[0]
    flat = []
    for x, kind in zip(args, kernel.signature.args, strict=True):
        _flatten(flat, x, kind)
    function((grid,), (kernel.threads,), flat)


def load(kernel):
    """(CuPy function, Cubin) of a kernel on the current device, through the disk cache."""
    import cupy

    digits = cupy.cuda.Device().compute_capability  # "90" is 9.0
    cc = (int(digits[:-1]), int(digits[-1]), *kernel.arch)
    cubin = cached_cubin(kernel, cc)
    module = cupy.cuda.function.Module()
    module.load(cubin.code)
    return module.get_function(cubin.entry), cubin


def _flatten(flat, x, kind):
    """Append an argument in Numba's calling convention: an array is 5 + 2 ndim words."""
    ndim = getattr(kind, "ndim", None)
    if ndim is None:
        flat.append(getattr(np, kind.name)(x))
    elif x is None:
        flat.extend([0] * (5 + 2 * ndim))
    else:
        flat += (0, 0, x.size, x.itemsize, x.data.ptr, *x.shape, *x.strides)
