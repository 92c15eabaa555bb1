"""What TMA is told about arrays, and which arrays it is told about."""

from types import SimpleNamespace

import numpy as np
import pytest

from flashnumba import arrays, tensormap
from flashnumba.tensormap import TensorMap, addressable, encoder

try:
    from cuda.bindings import driver
except ImportError as error:
    driver, MISSING = None, str(error)
needs_bindings = pytest.mark.skipif(driver is None, reason="cuda.bindings is not installed")


def halves(*shape, offset=0):
    """Zeros that start `offset` bytes after a multiple of 128."""
    memory = np.zeros(2 * int(np.prod(shape)) + 256, np.uint8)
    start = -memory.ctypes.data % 128 + offset
    return memory[start : start + 2 * int(np.prod(shape))].view(np.float16).reshape(shape)


def test_sizes_and_strides_are_those_of_the_memory():
    """(dim, seqlen, heads, batch), strides in bytes and without that of the columns."""
    x = halves(2, 5, 3, 40)
    tensor = TensorMap(x, 64)
    assert tensor.sizes == (40, 5, 3, 2)
    assert tensor.strides == (3 * 80, 80, 5 * 3 * 80)


def test_heads_may_stand_before_rows():
    """A (batch, heads, seqlen, dim) array, as a view in our order."""
    tensor = TensorMap(halves(2, 3, 5, 40).transpose(0, 2, 1, 3), 64)
    assert tensor.sizes == (40, 5, 3, 2)
    assert tensor.strides == (80, 5 * 80, 5 * 3 * 80)


def test_the_stride_of_one_entry_says_nothing():
    """NumPy may give an axis of length 1 any stride; TMA gets a valid one."""
    x = np.lib.stride_tricks.as_strided(halves(1, 5, 1, 8), strides=(2, 16, -6, 2))
    assert TensorMap(x, 64).strides == (16, 16, 16)
    assert addressable(x, 0)


BASE = halves(4, 6, 4, 48)
ADDRESSABLE = {
    "contiguous": BASE,
    "heads_first": BASE.transpose(0, 2, 1, 3),
    "every_other_head": BASE[:, :, ::2],
    "every_other_row": BASE[:, 1::2],
    "first_columns": BASE[..., :40],
    "columns_from_8": BASE[..., 8:],
    "five_columns_of_48": BASE[..., :5],
    "broadcast_heads": np.broadcast_to(BASE[:, :, :1], BASE.shape),
    "broadcast_all": np.broadcast_to(BASE[:1, :1, :1], BASE.shape),
    "one_row_of_5": halves(1, 1, 1, 5),
    "rows_of_one": halves(2, 3, 4, 8)[..., :1],
}
NOT_ADDRESSABLE = {
    "columns_from_1": BASE[..., 1:],
    "columns_from_4": BASE[..., 4:],
    "offset_of_8": halves(2, 3, 4, 8, offset=8),
    "rows_of_5": halves(2, 3, 4, 5),
    "rows_of_12": halves(2, 3, 4, 12),
    "every_other_column": BASE[..., ::2],
    "columns_outside": BASE.transpose(0, 3, 2, 1),
    "broadcast_columns": np.broadcast_to(BASE[..., :1], BASE.shape),
    "reversed_rows": BASE[:, ::-1],
    "reversed_heads": BASE[:, :, ::-1],
    "reversed_columns": BASE[..., ::-1],
    "far_apart": np.lib.stride_tricks.as_strided(BASE[:2], strides=(1 << 40, *BASE.strides[1:])),
}


@pytest.mark.parametrize("name", ADDRESSABLE)
def test_what_tma_can_address(name):
    """Any order of the outer axes, stride 0 included, as long as rows start at multiples of 16."""
    x = ADDRESSABLE[name]
    assert addressable(x, arrays.address(x))


@pytest.mark.parametrize("name", NOT_ADDRESSABLE)
def test_what_tma_cannot_address(name):
    """Rows that start elsewhere, gaps between columns, negative strides, 2^40 bytes."""
    x = NOT_ADDRESSABLE[name]
    assert not addressable(x, arrays.address(x))


@needs_bindings
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_the_driver_is_asked(monkeypatch, dtype):
    """Boxes of 64 columns by `rows`, 128-byte swizzle, zeros outside; words come back."""
    asked = []

    class Map:
        opaque = [driver.cuuint64_t(2**63 + i) for i in range(16)]

    def encode(*arguments):
        asked.append(arguments)
        return driver.CUresult.CUDA_SUCCESS, Map

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    words = encoder(dtype, (40, 5, 3, 2), (240, 80, 1200), 96)(0x7000)
    assert words == tuple(2**63 + i for i in range(16))
    ((kind, rank, address, *lists, interleave, swizzle, promotion, fill),) = asked
    assert kind.name == f"CU_TENSOR_MAP_DATA_TYPE_{dtype.upper()}"
    assert (rank, address) == (4, 0x7000)
    lists = [[int(x) for x in part] for part in lists]
    assert lists == [[40, 5, 3, 2], [240, 80, 1200], [64, 96, 1, 1], [1, 1, 1, 1]]
    assert interleave.name.endswith("INTERLEAVE_NONE")
    assert swizzle.name.endswith("SWIZZLE_128B")
    assert promotion.name.endswith("L2_256B")
    assert fill.name.endswith("OOB_FILL_NONE")


@needs_bindings
def test_what_the_driver_refuses_is_an_error(monkeypatch):
    """With the driver's word for it and what it was asked."""
    refuse = lambda *_: (driver.CUresult.CUDA_ERROR_INVALID_VALUE, None)
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", refuse)
    message = r"CUDA_ERROR_INVALID_VALUE.*float16 at 0x7001, sizes=\(40, 5, 3, 2\), strides="
    with pytest.raises(RuntimeError, match=message):
        encoder("float16", (40, 5, 3, 2), (240, 80, 1200), 97)(0x7001)


@needs_bindings
def test_one_encoder_for_one_form():
    """The runtime knows a description by its array's address and this object."""
    form = ("float16", (40, 5, 3, 2), (240, 80, 1200), 98)
    assert encoder(*form) is encoder(*form)
    assert encoder(*form) is not encoder(*form[:3], 64)


@pytest.mark.gpu
@pytest.mark.sm90
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ADDRESSABLE)
def test_the_driver_takes_what_is_called_addressable(name, dtype):
    """All of the above, stride 0 and boxes wider than the array included."""
    import cupy

    x = ADDRESSABLE[name]
    memory = cupy.zeros(4096, np.float16)
    tensor = TensorMap(x, 128)
    words = encoder(dtype, tensor.sizes, tensor.strides, 128)(memory.data.ptr)
    assert len(words) == 16 and any(words)


@needs_bindings
def test_a_thread_without_a_context_gets_one(monkeypatch):
    """A thread's first use of the GPU may be to encode: the driver refuses, then it works."""
    current = []
    result = driver.CUresult

    def encode_tiled(*_):
        status = result.CUDA_SUCCESS if current else result.CUDA_ERROR_INVALID_CONTEXT
        return status, SimpleNamespace(opaque=range(16))

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)
    monkeypatch.setattr(tensormap, "make_context_current", lambda: current.append(True))
    encode = encoder("float16", (64, 3, 2, 1), (256, 128, 16), 3)
    assert encode(4096) == tuple(range(16))
    assert current == [True]
    assert encode(8192) == tuple(range(16))
    assert current == [True]
    monkeypatch.setattr(tensormap, "make_context_current", lambda: None)
    current.clear()
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_CONTEXT: TMA cannot address"):
        encode(4096)
