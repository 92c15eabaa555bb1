"""Which backends a test runs on, and the skips of tests that need a GPU."""

import os
import shutil
import tempfile

import pytest

from flashnumba import runtime

# Before the workers of pytest-xdist start, which inherit this: one cache of compiled kernels for
# all, and one BLAS thread each, since as many workers as cores would fight over the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
CACHE = None
if "FLASHNUMBA_CACHE_DIR" not in os.environ:
    CACHE = os.environ["FLASHNUMBA_CACHE_DIR"] = tempfile.mkdtemp(prefix="flashnumba-test-")

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


def pytest_unconfigure():
    if CACHE is not None:  # not in a worker, which found it set
        shutil.rmtree(CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items):
    problem = runtime.gpu_problem()
    if problem is None:
        return
    skip = pytest.mark.skip(reason=problem)
    for item in items:
        if "gpu" in item.keywords or "sm90" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["numpy", "simulator", GPU])
def backend(request):
    """Every backend in turn; "gpu" is CuPy in and CuPy out."""
    return request.param
