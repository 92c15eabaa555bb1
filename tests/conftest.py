"""Which backends a test runs on, and the skips of tests that need a GPU."""

import os
import shutil
import tempfile

import pytest
from fake_gpu import FakeGPU

from flashnumba import runtime

# Before the workers of pytest-xdist start, which inherit this: one cache of compiled kernels for
# all, and one BLAS thread each, since as many workers as cores would fight over the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
CACHE = None
if "FLASHNUMBA_CACHE_DIR" not in os.environ:
    CACHE = os.environ["FLASHNUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="flashnumba-test-")

GPU = pytest.param("gpu", marks=pytest.mark.gpu)
AMPERE = pytest.param("gpu-mma", marks=[pytest.mark.gpu, pytest.mark.sm80])
HOPPER = [pytest.param(f"gpu-{x}", marks=[pytest.mark.gpu, pytest.mark.sm90])
          for x in ("wgmma", "split")]  # fmt: skip


def pytest_unconfigure():
    if CACHE is not None:  # not in a worker, which found it set
        shutil.rmtree(CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items):
    problem = no_hopper = too_old = runtime.gpu_problem()
    if problem is None and runtime.capability() != (9, 0):
        no_hopper = "this GPU is not of compute capability 9.0"
    if problem is None and runtime.capability() < (8, 0):
        too_old = "this GPU is not of compute capability 8.0 or more"
    for item in items:
        if "simulator-split" in item.name and not item.name.startswith(SPLIT):
            item.add_marker(pytest.mark.skip(reason="simulator-wgmma runs it, a GPU runs both"))
        if problem is not None and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=problem))
        elif too_old is not None and "sm80" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=too_old))
        elif no_hopper is not None and "sm90" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=no_hopper))


# What is particular to float32 in parts, some seconds each: values, masks, sums.
SPLIT = tuple(f"test_case_{n}" for n in ("01", "06", "07_a", "12", "29")) + (
    "test_case_07_what_is_hidden_may_be_anything[simulator-split-padding_causal_window",
    "test_sums", "test_precision",
)  # fmt: skip
SIMULATORS = "simulator", "simulator-mma", "simulator-wgmma", "simulator-split"


@pytest.fixture(params=["numpy", *SIMULATORS, GPU, AMPERE, *HOPPER])
def backend(request):
    """Every backend in turn; "gpu", "gpu-mma", ... are simt, mma, ..., CuPy in and CuPy out.

    "split" is wgmma in float32, where "wgmma" itself gets halves.
    """
    return request.param


@pytest.fixture
def fake_gpu(monkeypatch):
    """A GPU that is not there: see fake_gpu.py."""
    return FakeGPU().install(monkeypatch)
