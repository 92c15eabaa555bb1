"""What the shipped kernels compile to, the disk cache, and launching on a GPU.

Compiling needs no GPU. Every configuration is compiled for sm_90, and some for sm_80; the rest of
sm_80 and other generations are marked `slow`.
"""

import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import flashnumba as fn
from flashnumba import runtime
from flashnumba import workspace as kept
from flashnumba.config import Kernel, choose_simt
from flashnumba.runtime import Cubin, cached_cubin, compile_kernel
from flashnumba.tensormap import TensorMap

try:
    import cuda.core  # noqa: F401
    from cuda.bindings import nvjitlink, nvvm

    nvjitlink.version(), nvvm.version()  # loads the libraries
    MISSING = None
except Exception as error:  # each layer raises its own kind when a library is not there
    MISSING = f"the compilers are not installed ({error})"
needs_compilers = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

KERNELS = ("forward", "delta", "backward_dkdv", "backward_dq")


# --- what is shipped ------------------------------------------------------------------------------


def shipped():
    """Every configuration that `choose_simt` can answer on a GPU, each once."""
    dtypes = ("float16", "bfloat16", "float32", "float64")
    return list(dict.fromkeys(choose_simt(t, w, w) for t in dtypes for w in range(1, 513)))


def compilations():
    """(kernel name, configuration, compute capability), each with its marks.

    sm_90 whole. Of sm_80, float32 and float64 at the full width; the rest is `slow`, and so is
    float32 on other generations.
    """
    for cc in ((9, 0), (8, 0), (7, 5), (8, 9), (10, 0), (12, 0)):
        for config in shipped():
            for name in KERNELS:
                if cc not in ((9, 0), (8, 0)) and config.dtype != "float32":
                    continue
                widest = config.d_slice == 128 and config.dtype in ("float32", "float64")
                marks = [] if cc == (9, 0) or (cc == (8, 0) and widest) else [pytest.mark.slow]
                label = f"{name}-{config.dtype}-{config.d_slice}-sm_{cc[0]}{cc[1]}"
                yield pytest.param(name, config, cc, id=label, marks=marks)


# Volta and later: an instruction is 16 bytes, and its lowest 9 bits are the operation. Conversions
# between float64 and another floating type have one of their own.
FLOAT64_OPERATIONS = {0x028: "DMUL", 0x029: "DADD", 0x02A: "DSETP", 0x02B: "DFMA", 0x110: "F2F.64"}


def float64_operations(code):
    """How many float64 instructions the kernel in a cubin holds, by name."""
    offset, size, count, names = struct.unpack_from("<Q10xHHH", code, 0x28)
    assert offset and size == 64, "not an ELF file of 64 bits"
    sections = [struct.unpack_from("<I4xQQQQ", code, offset + size * i) for i in range(count)]
    (_, _, _, strings, _) = sections[names]
    found = Counter()
    for name, _, _, start, length in sections:
        if code[strings + name :].startswith(b".text."):
            words = np.frombuffer(code[start : start + length], "<u8")[::2]
            found.update(FLOAT64_OPERATIONS.get(int(x)) for x in words & 0x1FF)
    del found[None]
    return found


def test_every_kernel_of_the_simt_file_is_compiled_here():
    """A new make_* function must be added to KERNELS, and 4 dtypes by 4 widths are shipped."""
    from flashnumba.kernels import simt

    assert {f"make_{name}" for name in KERNELS} == {n for n in vars(simt) if n.startswith("make_")}
    assert {(c.dtype, c.d_slice) for c in shipped()} == {
        (dtype, width)
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for width in (16, 32, 64, 128)
    }


@needs_compilers
@pytest.mark.parametrize("name, config, cc", list(compilations()))
def test_shipped_kernels_compile_to_what_was_meant(name, config, cc):
    """No spills, no local memory, no warnings, no float64 arithmetic that was not asked for."""
    from flashnumba.kernels import simt

    kernel = getattr(simt, f"make_{name}")(config)
    cubin = cached_cubin(kernel, cc)
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0), cubin.log
    assert not re.search(r"C75\d\d|warning|error", cubin.log), cubin.log
    assert 16 <= cubin.registers <= 255
    assert cubin.registers * kernel.threads <= 65536

    shared = re.search(r"(\d+) bytes smem", cubin.log)
    expected = 0 if name == "delta" else config.shared_bytes
    assert (int(shared[1]) if shared else 0) == expected

    found = float64_operations(cubin.code)
    if config.dtype == "float64":
        assert found["DFMA"] and found["F2F.64"] == 0
    else:
        # The scale is a float64 parameter, converted where it is used: at most at each number of q
        # that a thread loads, in the masked and in the unmasked step, and twice when dK is stored.
        # Seen on sm_90: 8 with two blocks a multiprocessor, where registers are short, else 1 to 4.
        loads = config.block_m * config.d_tile // config.threads
        assert set(found) <= {"F2F.64"}, found
        assert found["F2F.64"] <= (0 if name == "delta" else 2 * loads + 2)


# --- compiling a kernel of one's own --------------------------------------------------------------


def tiny(key="tiny", factor=2):
    """x *= factor, one thread an element; the factor is part of the key, as it is of the code."""
    from numba import cuda
    from numba.cuda import types

    def scale(x, extra, add, n):
        i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        if i < n:
            x[i] = x[i] * factor + np.float32(add)
            if extra.shape[0] > 0:
                x[i] += extra[i]

    vector = types.Array(types.float32, 1, "A")
    signature = types.void(vector, vector, types.float64, types.int64)
    return Kernel(f"{key} {factor}", scale, signature, 32)


@needs_compilers
def test_local_memory_is_reported():
    """A local array read at a computed place cannot live in registers: stack bytes appear."""
    from numba import cuda
    from numba.cuda import types

    def dynamic(x):
        memory = cuda.local.array(40, np.float32)
        for i in range(40):
            memory[i] = x[i] * i
        x[0] = memory[int(x[1])]

    signature = types.void(types.Array(types.float32, 1, "A"))
    cubin = compile_kernel(Kernel("dynamic", dynamic, signature, 32), (9, 0))
    assert cubin.stack_bytes >= 160


@needs_compilers
def test_float64_arithmetic_is_seen():
    """A float64 literal widens a float32 product: the count that the checks rely on notices."""
    from numba import cuda
    from numba.cuda import types

    def careless(x):
        x[cuda.threadIdx.x] *= 1.1

    signature = types.void(types.Array(types.float32, 1, "A"))
    found = float64_operations(
        compile_kernel(Kernel("careless", careless, signature, 32), (9, 0)).code
    )
    assert found["DMUL"] == 1
    assert found["F2F.64"] == 2


@needs_compilers
def test_the_entry_is_the_name_in_the_code():
    """The entry's name is read from the cubin, holds the function's, and the log speaks of it."""
    cubin = compile_kernel(tiny(), (8, 0))
    assert "scale" in cubin.entry
    assert f"'{cubin.entry}' for 'sm_80'" in cubin.log
    assert b"\0" + cubin.entry.encode() + b"\0" in cubin.code


def parameter_bytes(code):
    """How many bytes of parameters the kernel in a cubin takes (EIATTR_PARAM_CBANK)."""
    (attribute,) = re.findall(rb"\x04\x0a\x08\x00.{4}(.{4})", code, re.DOTALL)
    return struct.unpack("<I", attribute)[0] >> 16


@needs_compilers
def test_parameters_are_packed_as_numba_takes_them():
    """None, arrays, tuples and scalars of 8 bytes: as many bytes as the compiled kernel has."""
    from numba.cuda import types

    def everything(nothing, x, y, a, b, c, some, last):
        x[0] = a + b + some[1] + last
        y[0, 0, 0, 0] = c

    kinds = [
        types.none, types.Array(types.uint64, 1, "A"), types.Array(types.float64, 4, "A"),
        types.int64, types.uint64, types.float64, types.UniTuple(types.int64, 3), types.int64,
    ]  # fmt: skip
    kernel = Kernel("everything", everything, types.void(*kinds), 32)
    size = parameter_bytes(compile_kernel(kernel, (9, 0)).code)
    assert size == struct.calcsize("<" + "".join(map(runtime._format, kinds)))
    assert size == 8 * (1 + 7 + 13 + 1 + 1 + 1 + 3 + 1)


@needs_compilers
def test_an_architectures_own_instructions_can_be_asked_for():
    """(9, 0, "a") is sm_90a."""
    assert "for 'sm_90a'" in compile_kernel(tiny(), (9, 0, "a")).log


@needs_compilers
def test_compiling_leaves_numba_as_it_was():
    """The answer to "which device?" is replaced only while compiling, also when that fails."""
    from numba.cuda import dispatcher

    def wrong(x, extra, add, n):
        x.no_such_attribute()

    before = dispatcher.get_current_device
    compile_kernel(tiny(), (9, 0))
    assert dispatcher.get_current_device is before
    with pytest.raises(Exception, match="no_such_attribute"):
        compile_kernel(Kernel("wrong", wrong, tiny().signature, 32), (9, 0))
    assert dispatcher.get_current_device is before


def test_without_compilers_the_error_says_what_to_install(monkeypatch):
    """No cuda.core: ImportError with the extras' names."""
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(ImportError, match=r"flashnumba\[cu13\].*flashnumba\[cu12\]"):
        compile_kernel(SimpleNamespace(), (9, 0))


# --- the disk cache -------------------------------------------------------------------------------


FAKE = Cubin(
    "entry", 40, 0, 0, "a log\nof two lines", b"code\n\0with every\nbyte" + bytes(range(256))
)
KEY = Kernel("some key", None, "void(x)", 64)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache folder of the test's own, and a compiler that counts and compiles nothing."""
    calls = []

    def fake_compile(kernel, cc):
        calls.append((kernel.key, cc))
        return FAKE

    monkeypatch.setenv("FLASHNUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(runtime, "compile_kernel", fake_compile)
    return SimpleNamespace(folder=tmp_path / "cache", calls=calls)


def entries(folder):
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def test_a_hit_does_not_compile(cache):
    """The second time everything comes from the file, in the folder that the environment names."""
    assert cached_cubin(KEY, (9, 0)) == FAKE
    assert cached_cubin(KEY, (9, 0)) == FAKE
    assert cache.calls == [("some key", (9, 0))]
    (path,) = entries(cache.folder)
    assert path.parent == cache.folder / runtime.source_hash()
    assert path.suffix == ".cubin"


def test_whatever_changes_the_code_is_another_entry(cache):
    """Key, signature, threads and compute capability."""
    variants = [
        (KEY, (9, 0)),
        (KEY, (9, 0, "a")),
        (KEY, (8, 0)),
        (Kernel("another key", None, "void(x)", 64), (9, 0)),
        (Kernel("some key", None, "void(y)", 64), (9, 0)),
        (Kernel("some key", None, "void(x)", 32), (9, 0)),
    ]
    for kernel, cc in 2 * variants:
        cached_cubin(kernel, cc)
    assert len(cache.calls) == len(entries(cache.folder)) == len(variants)


DAMAGE = {
    "empty": lambda data: b"",
    "truncated by one byte": lambda data: data[:-1],
    "truncated in its header": lambda data: data[:80],
    "checksum only": lambda data: data.partition(b"\n")[0],
    "one bit of code": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "one bit of header": lambda data: data.replace(b'"registers": 40', b'"registers": 41'),
    "one bit of checksum": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "longer": lambda data: data + b"x",
    "not ours": lambda data: b"\x7fELF" + bytes(1000),
    "text": lambda data: b"a\nb\nc\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_compiled_again(cache, damage):
    """Never trusted, never an error, and whole again afterwards."""
    cached_cubin(KEY, (9, 0))
    (path,) = entries(cache.folder)
    good = path.read_bytes()
    assert damage(good) != good
    path.write_bytes(damage(good))
    assert cached_cubin(KEY, (9, 0)) == FAKE
    assert len(cache.calls) == 2
    assert path.read_bytes() == good
    assert entries(cache.folder) == [path]


@pytest.mark.parametrize("header", ["[]", "{}", '{"entry": "x"}', '{"other": 1}', "3"])
def test_a_foreign_header_with_the_right_checksum_is_compiled_again(cache, header):
    """Such as the entry of a version with other fields."""
    import hashlib

    cached_cubin(KEY, (9, 0))
    (path,) = entries(cache.folder)
    checksum = hashlib.sha256(header.encode() + b"code").hexdigest()
    path.write_bytes(f"{checksum}\n{header}\ncode".encode())
    assert cached_cubin(KEY, (9, 0)) == FAKE
    assert len(cache.calls) == 2


def test_an_entry_that_is_a_folder_costs_only_a_compile(cache):
    """It can neither be read nor replaced; the caller gets the kernel, and no file is left over."""
    cached_cubin(KEY, (9, 0))
    (path,) = entries(cache.folder)
    path.unlink()
    path.mkdir()
    assert cached_cubin(KEY, (9, 0)) == FAKE
    assert entries(cache.folder) == []


def test_an_unwritable_folder_costs_only_a_compile(cache, monkeypatch, tmp_path):
    """A file stands where the folder should be, so that even root cannot write there."""
    obstacle = tmp_path / "file"
    obstacle.write_text("in the way")
    monkeypatch.setenv("FLASHNUMBA_CACHE_DIR", str(obstacle))
    for expected in (1, 2):
        assert cached_cubin(KEY, (9, 0)) == FAKE
        assert len(cache.calls) == expected
    assert obstacle.read_text() == "in the way"


def test_a_full_disk_leaves_no_temporary_file(cache, monkeypatch):
    """Moving the file into place fails: the kernel is there, the folder is empty."""

    def full(source, target):
        assert Path(source).read_bytes()  # it had been written
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert cached_cubin(KEY, (9, 0)) == FAKE
    assert entries(cache.folder) == []


def test_threads_may_race(cache):
    """Eight threads at once: all get the kernel, one entry stays."""
    start = threading.Barrier(8)
    results = []

    def work():
        start.wait()
        results.append(cached_cubin(KEY, (9, 0)))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [FAKE] * 8
    assert len(entries(cache.folder)) == 1
    assert 1 <= len(cache.calls) <= 8


RACE = """
import hashlib, sys
from pathlib import Path
from flashnumba import runtime
path, number = Path(sys.argv[1]), int(sys.argv[2])
mine = runtime.Cubin("entry", number, 0, 0, "log", bytes([number]) * 300_000)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(150):
    runtime._write(path, mine)
    got = runtime._read(path)
    assert got is not None, "a reader saw half an entry"
    assert got.code == bytes([got.registers]) * 300_000, "parts of two entries"
"""


def race(script, *arguments, env=None):
    """Run `script` in one process an argument list, all let go at once; assert that all succeed."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", script, *map(str, each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(runtime.__file__).parents[1],
            env={**os.environ, **(env or {})},
        )
        for each in arguments
    ]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n", worker.communicate()[1]
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors


def test_processes_may_race_for_one_entry(tmp_path):
    """Three processes write and read one entry 150 times each; none ever sees a torn one."""
    path = tmp_path / "folder" / "entry.cubin"
    race(RACE, *[(path, number) for number in (1, 2, 3)])
    assert entries(tmp_path) == [path]
    assert runtime._read(path).registers in (1, 2, 3)


COMPILE = """
import sys
from flashnumba import runtime
from flashnumba.config import choose_simt
from flashnumba.kernels.simt import make_delta
print("ready", flush=True)
sys.stdin.readline()
cubin = runtime.cached_cubin(make_delta(choose_simt("float32", 16, 16)), (9, 0))
assert cubin.entry.encode() in cubin.code
"""


@needs_compilers
def test_processes_may_race_to_compile(tmp_path, monkeypatch):
    """Two processes compile the same real kernel; a third finds it and needs no compiler."""
    from flashnumba.kernels.simt import make_delta

    race(COMPILE, (), (), env={"FLASHNUMBA_CACHE_DIR": str(tmp_path)})
    assert len(entries(tmp_path)) == 1
    monkeypatch.setenv("FLASHNUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(runtime, "source_hash", runtime.source_hash.__wrapped__)
    monkeypatch.setattr(runtime, "compile_kernel", lambda *_: pytest.fail("compiled again"))
    assert cached_cubin(make_delta(choose_simt("float32", 16, 16)), (9, 0)).registers > 0


def test_the_folder_is_named_by_all_sources(monkeypatch, tmp_path):
    """A changed, added or renamed file of the package, in a subfolder too, is another folder."""
    package = Path(runtime.__file__).parent
    copy = tmp_path / "flashnumba"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    hash_now = runtime.source_hash.__wrapped__
    original = hash_now()
    monkeypatch.setattr(runtime, "__file__", str(copy / "runtime.py"))
    assert hash_now() == original

    seen = [hash_now()]
    for name in ("kernels/simt.py", "window.py", "config/mma.py"):
        with open(copy / name, "a") as file:
            file.write("\n")
        seen.append(hash_now())
    (copy / "kernels" / "new.py").write_text("")
    seen.append(hash_now())
    (copy / "kernels" / "new.py").rename(copy / "kernels" / "newer.py")
    seen.append(hash_now())
    (copy / "kernels" / "notes.txt").write_text("no source")
    assert len(set(seen)) == len(seen)
    assert hash_now() == seen[-1]


@pytest.mark.parametrize("name", runtime.COMPILERS)
def test_the_folder_is_named_by_the_compilers_versions(name, monkeypatch):
    """Another version of any compiler, or a missing one, is another folder."""
    hash_now = runtime.source_hash.__wrapped__
    real = runtime.metadata.version
    try:
        real(name)
    except runtime.metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed by pip here")

    def missing(package):
        if package == name:
            raise runtime.metadata.PackageNotFoundError(package)
        return real(package)

    other = lambda package: "0.0.1" if package == name else real(package)
    hashes = {hash_now()}
    for version in (other, missing):
        monkeypatch.setattr(runtime.metadata, "version", version)
        hashes.add(hash_now())
    assert len(hashes) == (3 if MISSING is None else len(hashes)) and len(hashes) >= 2


@needs_compilers
def test_the_folder_is_named_by_a_toolkit_that_pip_did_not_install(monkeypatch):
    """The libraries that compile say their own version."""
    from cuda.bindings import nvjitlink

    before = runtime.source_hash.__wrapped__()
    monkeypatch.setattr(nvjitlink, "version", lambda: (1, 2))
    assert runtime.source_hash.__wrapped__() != before


def test_the_default_folder_is_the_users_cache(monkeypatch, tmp_path):
    """Without FLASHNUMBA_CACHE_DIR: XDG_CACHE_HOME, ~/.cache, or LOCALAPPDATA on Windows."""
    monkeypatch.setenv("FLASHNUMBA_CACHE_DIR", "")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runtime.cache_directory() == tmp_path / "flashnumba"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert runtime.cache_directory() == Path.home() / ".cache" / "flashnumba"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert runtime.cache_directory() == tmp_path / "local" / "flashnumba"


# --- is there a GPU? ------------------------------------------------------------------------------


class FakeError(RuntimeError):
    pass


@pytest.mark.parametrize(
    "answer, problem",
    [(1, None), (0, "CUDA found no GPU"), (FakeError("driver too old"), "driver too old")],
    ids=["one", "none", "error"],
)
def test_why_there_is_no_gpu(monkeypatch, answer, problem):
    """CuPy counts one GPU, none, or cannot count."""

    def count():
        if isinstance(answer, Exception):
            raise answer
        return answer

    fake = SimpleNamespace(getDeviceCount=count, CUDARuntimeError=FakeError)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=fake))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    got = runtime.gpu_problem()
    assert got is None if problem is None else problem in got
    assert runtime.gpu_available.__wrapped__() is (problem is None)


def test_without_cupy_the_reason_says_what_to_install(monkeypatch):
    """No CuPy: the sentence names the package and the extras."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert re.search(r"CuPy is not installed.*flashnumba\[cu13\]", runtime.gpu_problem())


# --- launching, on a GPU that is not there --------------------------------------------------------


def kernel_of(function, *kinds, **more):
    """A kernel of one thread that is never compiled: the simulator runs it as it stands."""
    from numba.cuda import types

    arrays = {"vector": types.float32, "counter": types.int32}
    one = lambda kind: types.Array(arrays[kind], 1, "A") if kind in arrays else getattr(types, kind)
    kinds = [one(kind) for kind in kinds]
    return Kernel(function.__name__, function, types.void(*kinds), 1, **more)


def scaled(out, x, none, factor, count):
    """out = factor * x, as far as count says."""
    assert none is None
    out[:count] = factor * x[:count] if x.shape[0] else -1


def firsts(out, x_map, y_map, z_map, counter):
    """The first number of every array that is described, and the counter, used and put back."""
    out[:3] = [int(m.array[0, 0, 0, 0]) for m in (x_map, y_map, z_map)]
    out[3] += counter[0] + counter[1]


def test_arguments_follow_numbas_convention(fake_gpu):
    """Strides of any sign, None as an empty array and as nothing, scalars of 4 bytes."""
    import cupy

    kernel = kernel_of(scaled, "vector", "vector", "none", "float32", "int32")
    out, x = cupy.zeros(10, np.float32), cupy.asarray(np.arange(5, dtype=np.float32))
    runtime.launch(kernel, 1, (out[::-2], x, None, 0.1, np.int64(4)))
    expected = np.float32(0.1) * np.array([0, 0, 0, 3, 0, 2, 0, 1, 0, 0], np.float32)
    np.testing.assert_array_equal(out.get(), expected)
    runtime.launch(kernel, 1, (out, None, None, 1.0, True))
    assert out.get()[0] == -1
    with pytest.raises(ValueError, match="zip"):
        runtime.launch(kernel, 1, (out, x, None, 1.0))
    with pytest.raises(Exception, match="2147483648|int"):
        runtime.launch(kernel, 1, (out, x, None, 1.0, 1 << 31))  # no int32
    assert len(fake_gpu.launches) == 2


def test_a_bound_launch_takes_other_arrays_of_the_same_form(fake_gpu):
    """Everything else stays as it was bound."""
    import cupy

    kernel = kernel_of(scaled, "vector", "vector", "none", "float32", "int32")
    out, x = cupy.zeros(4, np.float32), cupy.asarray(np.ones(8, np.float32)[::2])
    call = runtime.bind(kernel, 1, (out, x, None, 2.0, 3), (x, out))
    y = cupy.asarray(np.arange(8, dtype=np.float32)[::2])
    call(y.data.ptr, out.data.ptr)
    assert out.get().tolist() == [0, 4, 8, 0]
    assert x.get().tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("size", [0, 48 << 10, (48 << 10) + 1, 227 << 10])
def test_more_than_48_kb_of_shared_memory_is_asked_for_once(fake_gpu, size):
    """When the kernel is loaded; the launch itself names the size every time."""
    import cupy

    kernel = kernel_of(scaled, "vector", "vector", "none", "float32", "int32", shared_bytes=size)
    asked = []
    fake_gpu.set_attribute, real = lambda *x: asked.append(real(*x)), fake_gpu.set_attribute
    cupy.cuda.driver.funcSetAttribute = fake_gpu.set_attribute
    for _ in range(2):
        runtime.launch(kernel, 1, (cupy.zeros(4, np.float32), None, None, 1.0, 1))
    assert len(asked) == (size > 48 << 10)


class Described:
    """Arrays of one number each, and the kernel that reads three of them through descriptions."""

    def __init__(self, count, rows=64):
        import cupy

        self.kernel = kernel_of(firsts, "vector", "uint64", "uint64", "uint64", "counter")
        self.arrays = [cupy.asarray(np.full((1, 1, 1, 8), i, np.float16)) for i in range(count)]
        self.rows = rows

    def read(self, *numbers):
        import cupy

        out = cupy.zeros(4, np.float32)
        maps = [TensorMap(self.arrays[i], self.rows) for i in numbers]
        runtime.launch(self.kernel, 1, (out, *maps, runtime.COUNTER))
        return out

    def firsts(self, *numbers):
        return [float(self.arrays[i].get().ravel()[0]) for i in numbers]

    def check(self, *numbers):
        assert self.read(*numbers).get().tolist() == [*numbers, 0]


def test_descriptions_are_written_once(fake_gpu):
    """One small kernel writes what a launch needs and the stream does not have yet."""
    described = Described(4)
    described.check(0, 1, 2)
    written = ("write 4 descriptions", 3, 0)
    assert fake_gpu.launches == [written, ("firsts", 1, 0)]
    described.check(2, 0, 1)
    assert fake_gpu.launches[2:] == [("firsts", 1, 0)]
    described.check(3, 3, 3)
    assert fake_gpu.launches[3:] == [("write 4 descriptions", 1, 0), ("firsts", 1, 0)]
    assert fake_gpu.encoded == 4


def test_more_descriptions_than_one_kernel_writes(fake_gpu, monkeypatch):
    """They come in parts."""
    monkeypatch.setattr(kept, "ROWS", 2)
    kept.writer.cache_clear()
    try:
        Described(3).check(0, 1, 2)
        assert [grid for _, grid, _ in fake_gpu.launches] == [2, 1, 1]
    finally:
        kept.writer.cache_clear()


@pytest.mark.parametrize("slots", [3, 4, 5])
def test_few_slots_are_taken_in_turn(fake_gpu, monkeypatch, slots):
    """Any three of seven arrays, in any order: a launch never loses what it has just looked up."""
    monkeypatch.setattr(kept, "SLOTS", slots)
    described, rng = Described(7), np.random.default_rng(0)
    for _ in range(200):
        described.check(*rng.integers(7, size=3))
    (workspace,) = kept._workspaces.values()
    assert len(workspace.addresses) == slots
    assert {key for key in workspace.keys} == set(workspace.addresses)
    assert slots < fake_gpu.encoded < 600


def test_another_form_at_the_same_address_is_another_description(fake_gpu):
    """Freed memory comes back: what is known by its address is known by its form, too."""
    described = Described(1)
    for rows in (64, 128, 64):
        described.rows = rows
        described.check(0, 0, 0)
    assert fake_gpu.encoded == 2


def test_every_stream_and_gpu_has_its_own(fake_gpu):
    """Nothing orders a kernel of one stream before a kernel of another."""
    described = Described(3)
    for fake_gpu.device, fake_gpu.stream in ((0, 0), (0, 4096), (1, 0), (1, 4096), (0, 0)):
        described.check(0, 1, 2)
    assert len(kept._workspaces) == 4
    assert fake_gpu.encoded == 12


def test_a_threads_default_stream_is_the_threads(fake_gpu):
    """Handle 2 is another stream in every thread; all others are the same in all."""
    described = Described(3)
    for stream, expected in ((2, 9), (4096, 3)):
        fake_gpu.stream, before = stream, fake_gpu.encoded
        workers = [threading.Thread(target=described.check, args=(0, 1, 2)) for _ in range(2)]
        described.check(0, 1, 2)
        for worker in workers:
            worker.start()
            worker.join()
        assert fake_gpu.encoded - before == expected


def test_every_thread_enters_every_gpu_once(fake_gpu):
    """The driver launches in the context of the thread, which CUDA's runtime makes."""
    import cupy

    entered = []
    cupy.cuda.runtime.memGetInfo = lambda: entered.append(fake_gpu.device)
    described = Described(3)

    def work():
        for fake_gpu.device in (0, 1, 0):
            described.check(0, 1, 2)

    work()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert entered == [0, 1, 0, 1]


def test_a_failed_description_leaves_the_others(fake_gpu, monkeypatch):
    """What could not be encoded, or not be written, is not taken for written later."""
    described = Described(5)
    described.check(0, 1, 2)

    def fail(*_):
        raise RuntimeError("no")

    encoder, launch = runtime.encoder, runtime.launch
    for name, real in (("encoder", encoder), ("writer", kept.writer)):
        with monkeypatch.context() as patch:
            module = runtime if name == "encoder" else kept
            patch.setattr(module, name, (lambda *_: fail) if name == "encoder" else fail)
            with pytest.raises(RuntimeError, match="no"):
                described.read(3, 4, 0)
        assert getattr(module, name) is real and runtime.launch is launch
    described.check(0, 1, 2)
    described.check(3, 4, 0)


def test_a_graph_writes_its_own_descriptions(fake_gpu, monkeypatch):
    """A captured launch runs again after everything else has been overwritten, on any stream."""
    monkeypatch.setattr(kept, "SLOTS", 3)
    described = Described(6)
    described.check(0, 1, 2)
    known = dict(kept._workspaces[0, 0].addresses)
    with fake_gpu.capture(4096) as graph:
        first, second = described.read(0, 1, 2), described.read(2, 1, 0)
    assert [kernel.key for kernel, *_ in graph] == ["write 4 descriptions", "firsts"] * 2
    assert kept._workspaces.keys() == {(0, 0)}
    assert kept._workspaces[0, 0].addresses == known
    described.check(3, 4, 5)
    for workspace in kept._captured:  # as a graph finds it whose descriptions were lost
        workspace.memory.host[:-1] = 0
    for i in (1, 2):
        described.arrays[i].host[...] = 10 * i
        fake_gpu.replay(graph)
        assert first.get().tolist() == [0, *described.firsts(1, 2), 0]
        assert second.get().tolist() == [*described.firsts(2, 1), 0, 0]


def test_the_kernel_that_writes_descriptions_compiles():
    """For the GPU that needs it, without local memory."""
    if MISSING is not None:
        pytest.skip(MISSING)
    cubin = cached_cubin(kept.writer(), (9, 0))
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch):
    """Counts what goes through `load`."""
    calls = []
    real = runtime.load

    def load(kernel):
        calls.append(kernel.key)
        return real(kernel)

    monkeypatch.setattr(runtime, "load", load)
    return calls


@pytest.mark.gpu
def test_a_kernel_is_loaded_once(loads):
    """The first launch loads; later ones only look up. Arguments follow Numba's convention."""
    import cupy

    kernel = tiny("launched", 3)
    x = cupy.arange(100, dtype=np.float32)
    view = x[::-2]  # negative stride; the parameters in between must not move
    runtime.launch(kernel, 2, (view, None, 0.5, 50))
    expected = np.arange(100, dtype=np.float32)
    expected[::-2] = expected[::-2] * 3 + np.float32(0.5)
    np.testing.assert_array_equal(x.get(), expected)
    extra = cupy.ones(50, np.float32)
    runtime.launch(kernel, 2, (view, extra, 0, 40))
    touched = expected[::-2]
    touched[:40] = touched[:40] * 3 + 1
    np.testing.assert_array_equal(x.get(), expected)
    assert loads == ["launched 3"]


@pytest.mark.gpu
def test_a_second_start_finds_the_kernel_on_disk(loads, monkeypatch, tmp_path):
    """Forgetting what is loaded, as a new process would, costs no compile."""
    import cupy

    monkeypatch.setenv("FLASHNUMBA_CACHE_DIR", str(tmp_path))
    kernel = tiny("restarted", 4)
    x = cupy.ones(32, np.float32)
    runtime.launch(kernel, 1, (x, None, 0, 32))
    monkeypatch.setattr(runtime, "_loaded", {})
    monkeypatch.setattr(runtime, "compile_kernel", lambda *_: pytest.fail("compiled again"))
    runtime.launch(kernel, 1, (x, None, 0, 32))
    assert (x.get() == 16).all()
    assert len(loads) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_the_driver_reports_no_local_memory(name):
    """The widest float32 kernels as loaded: 0 bytes of local memory, and ptxas's registers."""
    from cupy.cuda import driver

    from flashnumba.kernels import simt

    function, cubin = runtime.load(getattr(simt, f"make_{name}")(choose_simt("float32", 128, 128)))
    local_size, registers = (driver.funcGetAttribute(n, function.ptr) for n in (3, 4))
    assert local_size == 0
    assert registers == cubin.registers


@pytest.mark.gpu
def test_a_grid_that_cuda_cannot_launch_is_refused():
    """2^31 blocks: ValueError with both numbers, and nothing runs."""
    import cupy

    x = cupy.ones(32, np.float32)
    with pytest.raises(ValueError, match="2147483648 thread blocks.*2147483647"):
        runtime.launch(tiny("too many", 5), 1 << 31, (x, None, 0, 32))
    assert (x.get() == 1).all()


@pytest.mark.gpu
def test_a_missing_argument_is_refused():
    """One argument too few for the signature: an error instead of a kernel that reads garbage."""
    import cupy

    x = cupy.ones(32, np.float32)
    with pytest.raises(ValueError, match="zip"):
        runtime.launch(tiny("too few", 6), 1, (x, None, 0))
    assert (x.get() == 1).all()


def constants(count):
    """q, k and many v, each of which holds one number, which attention then returns."""
    import cupy

    q, k = (cupy.ones((1, 200, 2, 64), np.float16) for _ in range(2))
    return q, k, [cupy.full(k.shape, i, np.float16) for i in range(count)]


def assert_constant(x, value):
    np.testing.assert_allclose(x.get().astype(np.float32), value, rtol=2e-3)


@pytest.mark.gpu
@pytest.mark.sm90
def test_few_slots_are_reused_on_a_gpu(monkeypatch):
    """TMA keeps no old description of a slot: five slots, always another v and o, no waiting."""
    monkeypatch.setattr(kept, "SLOTS", 5)
    monkeypatch.setattr(kept, "_workspaces", {})
    q, k, values = constants(40)
    order = np.random.default_rng(0).integers(40, size=600)
    results = [fn.attention(q, k, values[i], causal=True, backend="wgmma") for i in order]
    for i, o in zip(order, results, strict=True):
        assert_constant(o, i)


@pytest.mark.gpu
@pytest.mark.sm90
def test_a_captured_graph_describes_its_own_arrays(monkeypatch):
    """It runs after all slots were taken by others, on another stream, with new numbers in v."""
    import cupy

    monkeypatch.setattr(kept, "SLOTS", 5)
    monkeypatch.setattr(kept, "_workspaces", {})
    q, k, values = constants(12)
    v = cupy.empty_like(k)
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    fn.attention(q, k, v, causal=True, backend="wgmma")  # compiles
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        o = fn.attention(q, k, v, causal=True, backend="wgmma")
        twice = fn.attention(q, k, o, causal=True, backend="wgmma")
        graph = stream.end_capture()
    for i, x in enumerate(values):
        assert_constant(fn.attention(q, k, x, causal=True, backend="wgmma"), i)
        with stream if i % 2 else other as current:
            v[...] = x
            graph.launch()
            current.synchronize()
        assert_constant(o, i)
        assert_constant(twice, i)


@pytest.mark.gpu
@pytest.mark.sm90
def test_streams_and_threads_on_a_gpu():
    """Four threads with a stream each and one with the default stream, all at once."""
    import cupy

    q, k, values = constants(5)
    cupy.cuda.Device().synchronize()
    failures = []

    def work(i):
        try:
            stream = cupy.cuda.Stream(non_blocking=True) if i else cupy.cuda.Stream.null
            with stream:
                results = [fn.attention(q, k, values[i], causal=True) for _ in range(50)]
                stream.synchronize()
                for o in results:
                    assert_constant(o, i)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
