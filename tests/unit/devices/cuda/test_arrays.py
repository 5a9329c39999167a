"""Arrays of any library on the GPU are taken without a copy, in order with the stream that writes their contents."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from commlib.buffers import dlpack
from commlib.devices.arrays import as_contiguous, as_writable, device_named, device_of
from commlib.devices.cuda import foreign_arrays, process
from commlib.devices.host import HOST
from commlib.devices.registry import lookup, streams
from commlib.dtypes import DTYPES, NUMPY
from commlib.errors import UsageError
from tests.bodies import checks
from tests.bodies.loopback import run
from tests.cuda import standin
from tests.late import OnDevice


class ByInterface:
    """An array of a library that has only `__cuda_array_interface__`, such as numba's."""

    def __init__(self, array, **changes):
        plain = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.data.ptr, False),
            "version": 3,
        }
        self.array = array
        self.interface = {**plain, **changes}

    @property
    def __cuda_array_interface__(self):
        return self.interface


class Capsule(ctypes.Structure):
    """DLManagedTensor, as far as it is read here."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ByDlpack:
    """An array of a library that has only DLPack. `asked`: the streams it was requested for."""

    def __init__(self, array, strides=None, index=0, code=2, kind=dlpack.CUDA):
        self.array, self.strides, self.index, self.code, self.kind, self.asked = array, strides, index, code, kind, []

    def __dlpack_device__(self):
        return self.kind, self.index

    def __dlpack__(self, stream=None):
        self.asked.append(stream)
        ndim, array = len(self.array.shape), self.array
        self.shape = (ctypes.c_int64 * ndim)(*array.shape)
        steps = None if self.strides is None else (ctypes.c_int64 * ndim)(*self.strides)
        pointer = ctypes.POINTER(ctypes.c_int64)
        self.tensor = Capsule(
            array.data.ptr, self.kind, self.index, ndim, self.code, 8 * array.dtype.itemsize, 1,
            ctypes.cast(self.shape, pointer), None if steps is None else ctypes.cast(steps, pointer), 0,
        )  # fmt: skip
        self.steps = steps
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def test_cupy_arrays_share_memory(gpu):
    for dtype in DTYPES:
        x = gpu.device.empty((3, 4), NUMPY[dtype])
        array = as_contiguous(x, "test")
        assert (array.address, array.shape, array.dtype) == (x.data.ptr, (3, 4), NUMPY[dtype])
        assert device_of(x) is gpu.device and array.device.name == "cuda"


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_with_an_interface_share_memory(gpu, dtype):
    x = gpu.put(np.ones((5, 2), NUMPY[dtype]))
    array = as_contiguous(ByInterface(x), "test")
    assert (array.address, array.shape, array.dtype) == (x.data.ptr, (5, 2), NUMPY[dtype])


def test_dlpack_arrays_can_be_bfloat16(gpu):
    x = gpu.put(np.ones((5, 2), ml_dtypes.bfloat16))
    array = as_contiguous(ByDlpack(x, code=4), "test")
    assert (array.address, array.shape, array.dtype) == (x.data.ptr, (5, 2), NUMPY["bfloat16"])
    assert as_contiguous(ByDlpack(x, strides=(2, 1), code=4), "test").shape == (5, 2)


class WithoutStreams(ByDlpack):
    """As TensorFlow's: it takes no stream, so contents are ready on the default stream."""

    def __dlpack__(self, stream=None):
        if stream is not None:
            raise RuntimeError("does not support DLPack export with a non-None stream")
        return super().__dlpack__()


def test_a_library_without_streams_uses_the_default_stream(gpu, monkeypatch):
    """Its contents are written on the default stream; another current stream waits for that."""
    monkeypatch.setattr(standin.ENGINE, "delay", 0.05)
    with gpu.device.using(gpu.device.existing(0)):
        x = gpu.put(np.full(70_000, 3, np.float32))  # late
    with gpu.device.using(gpu.device.stream()):
        copy = as_contiguous(WithoutStreams(x), "test").copy()
        np.testing.assert_array_equal(gpu.fetch(copy.owner), np.full(70_000, 3, np.float32))
        with pytest.raises(UsageError, match="in use on an unknown stream"):
            as_writable(WithoutStreams(x), "test", "out")


def test_host_arrays_stay_on_the_host(gpu):
    x = np.ones(3, np.float32)
    assert lookup(x) is None and device_of(x) is HOST and device_of([1.0]) is HOST
    assert lookup(ByDlpack(gpu.put(x), kind=dlpack.CPU)) is None


def test_wrong_arrays_are_refused(gpu):
    x = gpu.put(np.ones((4, 4), np.float32))
    for odd, words in [
        (ByInterface(x, strides=(4, 16)), "not contiguous"),
        (ByDlpack(x, strides=(1, 4)), "not contiguous"),
        (ByInterface(x, typestr="<M8[s]"), "not supported"),
        (ByDlpack(x, code=9), "not supported"),
        (ByInterface(x, typestr="?!"), "cannot be read"),
    ]:
        with pytest.raises(UsageError, match=f"test: x.*{words}"):
            as_contiguous(odd, "test")
    with pytest.raises(UsageError, match="read-only"):
        as_writable(ByInterface(x, data=(x.data.ptr, True)), "test")
    assert as_contiguous(ByInterface(x, data=(x.data.ptr, True)), "test").size == 16
    assert as_contiguous(ByInterface(x, shape=(0, 4), strides=(1, 99)), "test").shape == (0, 4)
    assert as_contiguous(ByInterface(x, shape=(1, 4), strides=(999, 4)), "test").shape == (1, 4)


def test_one_process_uses_one_gpu(gpu):
    with pytest.raises(UsageError, match=r"on GPU 1.*already uses GPU 0.*set_device"):
        as_contiguous(ByDlpack(gpu.put(np.ones(3, np.float32)), index=1), "test")
    assert process.find_used() is gpu.device is device_named("cuda", "test") and "cuda" in streams()


def test_the_stream_of_the_contents_is_awaited(gpu, slowly):
    """The stream that the interface names, or the stream passed to DLPack."""
    device, x = gpu.device, gpu.device.empty((100,), "float32")
    theirs = device.stream()
    with device.using(theirs):
        gpu.fill(x, 7)
    with device.using(device.stream()):
        copied = as_contiguous(ByInterface(x, stream=theirs.raw.ptr), "test").copy().owner
        np.testing.assert_array_equal(gpu.fetch(gpu.cupy.ndarray((100,), "float32", copied.data)), 7)
        requested = ByDlpack(x)
        as_contiguous(requested, "test")
        assert requested.asked == [device.current().raw.ptr]
    as_contiguous(requested, "test")
    assert requested.asked[-1] == 1  # the default stream has this number there


def test_writing_to_memory_of_a_foreign_stream_is_refused(gpu):
    x = gpu.put(np.ones(4, np.float32))
    with pytest.raises(UsageError, match=r"in use on stream 0x.*make its stream CuPy's current one"):
        as_writable(ByInterface(x, stream=gpu.device.stream().raw.ptr), "test")
    with pytest.raises(UsageError, match="in use on an unknown stream, but the result is written"):
        as_writable(ByDlpack(x), "test")
    for same in (None, 1):
        assert as_writable(ByInterface(x, stream=same), "test").size == 4


def test_a_library_may_report_its_current_stream(gpu, slowly):
    class Tensor(ByInterface):
        pass

    theirs = gpu.device.stream()
    foreign_arrays.register_stream(Tensor, lambda x: theirs.raw.ptr)
    x = gpu.device.empty((100,), "float32")
    with gpu.device.using(theirs):
        gpu.fill(x, 3)
    with gpu.device.using(gpu.device.stream()):
        with pytest.raises(UsageError, match="in use on stream"):
            as_writable(Tensor(x), "test")
        copied = as_contiguous(Tensor(x), "test").copy().owner
        np.testing.assert_array_equal(gpu.fetch(gpu.cupy.ndarray((100,), "float32", copied.data)), 3)
    with gpu.device.using(theirs):
        assert as_writable(Tensor(x), "test").size == 100


def test_every_verb_accepts_foreign_arrays(gpu):
    """Results are CuPy's; `out` may be of any library."""

    class Foreign:
        def __init__(self, gpu):
            self.__dict__.update(vars(gpu))
            self.kind, self.gpu = ByInterface, gpu

        def put(self, values):
            return ByInterface(self.gpu.put(values))

        def fetch(self, array):
            return self.gpu.fetch(array)

    def check(comm):
        x = ByInterface(gpu.put(np.full(30, comm.rank + 1.0)))
        assert comm.all_reduce(x, out=x) is x
        np.testing.assert_array_equal(gpu.fetch(x), 3.0)
        assert type(comm.all_reduce(x)) is gpu.kind
        checks.broadcast(OnDevice(comm, Foreign(gpu)), "float32", (40,), root=1)

    run(2, check)
