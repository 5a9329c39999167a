"""Views: foreign arrays that are accepted, over the same memory, and those that are refused, with their errors."""

from __future__ import annotations

import array
import gc

import ml_dtypes
import numpy as np
import pytest

from commlib.buffers.views import as_host, contiguous, writable
from commlib.dtypes import DTYPES, NUMPY
from commlib.errors import UsageError


def test_a_numpy_array_is_returned_as_is():
    x = np.zeros((2, 3), np.float32)
    assert as_host(x, "verb") is x


@pytest.mark.parametrize("make", [bytearray, lambda b: memoryview(bytearray(b)), lambda b: array.array("B", b)])
def test_buffers_are_viewed_in_place(make):
    x = make(b"abc")
    view = as_host(x, "verb")
    assert view.dtype == np.uint8 and view.tolist() == [97, 98, 99]
    view[0] = 1
    assert x[0] == 1


def test_a_typed_memoryview_keeps_its_dtype_and_shape():
    x = np.arange(6, dtype=np.int16).reshape(2, 3)
    view = as_host(x.data[::-1], "verb")
    assert view.dtype == np.int16 and view.shape == (2, 3) and np.shares_memory(view, x)
    assert view.tolist() == [[3, 4, 5], [0, 1, 2]]


def test_read_only_buffers_stay_read_only():
    view = as_host(memoryview(b"abc"), "verb")
    assert not view.flags.writeable
    with pytest.raises(UsageError, match="verb: out is read-only, but the result is written to it"):
        writable(view, "verb", "out")


def test_an_array_interface_is_viewed_in_place():
    class Foreign:
        def __init__(self, inner):
            self.inner, self.__array_interface__ = inner, inner.__array_interface__

    inner = np.arange(4.0)
    view = as_host(Foreign(inner), "verb")
    view[0] = 9
    assert inner[0] == 9


@pytest.mark.parametrize("scalar", [np.float32(1), np.int8(1), ml_dtypes.bfloat16(1), np.bool_(True)], ids=repr)
def test_numpy_scalars_may_be_read_but_not_written(scalar):
    """They are values: a write to a view of one is lost."""
    view = as_host(scalar, "verb")
    assert view.shape == () and view == scalar
    with pytest.raises(UsageError, match="read-only"):
        writable(view, "verb", "x")


class Dlpack:
    """An array that offers DLPack and nothing else."""

    def __init__(self, inner):
        self.inner = inner

    def __dlpack__(self, **options):
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "bfloat16"])  # numpy cannot export that
def test_dlpack_is_viewed_in_place(dtype):
    inner = np.ones((4, 3), NUMPY[dtype])
    for part in (inner, inner[::2, 1:], inner[0], inner[0, 0:1].reshape(()), inner.T, inner[:0]):
        view = as_host(Dlpack(part), "verb")
        assert view.dtype == part.dtype and view.shape == part.shape
        if part.size:
            assert view.strides == part.strides and view.ctypes.data == part.ctypes.data
            view[...] = 0
            assert not part.any()
            part[...] = 1


def test_dlpack_keeps_the_memory_alive():
    view = as_host(Dlpack(np.full(100_000, 7)), "verb")
    gc.collect()
    junk = [np.zeros(100_000, int) for _ in range(5)]
    assert (view == 7).all() and len(junk) == 5


def test_dlpack_that_raises_is_a_usage_error():
    class Refuses:
        def __dlpack__(self, **options):
            raise BufferError("cannot export this")

    with pytest.raises(UsageError, match="verb: x of type Refuses cannot be viewed on the host: cannot export this"):
        as_host(Refuses(), "verb")


def test_gpu_arrays_are_refused():
    class Cuda:
        __cuda_array_interface__ = {"shape": (3,), "typestr": "<f4", "data": (4096, False), "version": 3}  # noqa: RUF012

    with pytest.raises(UsageError, match=r"verb: out is a .* array on a GPU: copy it to the host first"):
        as_host(Cuda(), "verb", "out")


TORCH_DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64"),
    *("uint8", "bool", "complex64", "complex128"),
]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_torch_tensors_are_viewed_in_place(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 3, dtype=getattr(torch, dtype))
    for part in (tensor, tensor[::2, 1:], tensor.t(), tensor[1, 1], tensor[:0]):
        view = as_host(part, "verb")
        assert view.dtype == NUMPY[dtype] and view.shape == tuple(part.shape)
        view[...] = 1
        assert bool((part == 1).all())
        part.zero_()
        assert not view.astype(bool).any()


def test_torch_bfloat16_keeps_its_values():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.5, -2.0, float("inf")], dtype=torch.bfloat16)
    assert as_host(tensor, "verb").astype(np.float32).tolist() == [1.5, -2.0, float("inf")]


def test_torch_tensors_that_need_a_gradient_are_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(UsageError, match="verb: x of type Tensor cannot be viewed on the host"):
        as_host(torch.ones(3, requires_grad=True), "verb")
    with pytest.raises(UsageError, match="verb: x"):
        as_host(torch.ones(3, device="meta"), "verb")


@pytest.mark.parametrize("x", [None, 1.0, [1.0], (1,), "text", {1: 2}, object()], ids=lambda x: type(x).__name__)
def test_other_objects_are_refused(x):
    with pytest.raises(
        UsageError, match=rf"^verb: x is a {type(x).__name__}: expected an array .*numpy.array\(value\)"
    ):
        as_host(x, "verb")


@pytest.mark.parametrize("dtype", ["U3", "S3", "O", "M8[s]", "m8[s]", ">f4", "g", [("a", "i4")]], ids=str)
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(UsageError, match=r"verb: x: dtype .* is not supported; supported are float16, bfloat16"):
        as_host(np.zeros(2, dtype), "verb")


def test_equivalent_dtypes_are_accepted():
    for dtype in (np.longlong, np.ulonglong, np.intc, np.uintp, "<f4", "=i8"):
        as_host(np.zeros(2, dtype), "verb")


def test_contiguous_copies_only_when_needed(caplog):
    x = np.zeros((4, 4))
    assert contiguous(x, "verb") is x
    assert contiguous(x[:2], "verb").base is x
    with caplog.at_level("DEBUG", "commlib"):
        copy = contiguous(x[:, :2], "verb")
    assert copy.flags.c_contiguous and copy.shape == (4, 2) and not np.shares_memory(copy, x)
    assert contiguous(np.array(5.0), "verb").shape == ()
