"""Devices: TensorFlow's tensors on a GPU as arrays of the core and back, by DLPack, over the same memory.

TensorFlow works on streams of its own, which Python cannot see. What it promises, by its documentation and sources:

- `to_dlpack` returns when the GPU has done all that TensorFlow has told it: the host waits, and what is there is read;
- `from_dlpack` waits for nothing: what is given must be there. So the host waits for a result before that;
- memory that it was given goes back as soon as no tensor refers to it, though what reads it may not have run yet. So it
  is kept until the next `to_dlpack`, and a slot of a bucket is not written before that either (`settle`);
- `tf.py_function` runs on the device that it is placed on, and has tensors in that device's memory, if it is told of
  them when a function is traced and none is of int32 (else it runs on the host, and has the host's);
- int32 tensors of a GPU mostly lie in the host's memory: `backing_device` says where each one does.

Both waits are the price: TensorFlow's queue runs dry once before and once after each operation, and for gradients once
for each bucket that is sent while backward goes on. There is no way around: it tells nobody its streams or events.

A GPU is chosen by CUDA_VISIBLE_DEVICES, so that its number is the same for all libraries of the process. TensorFlow
takes all of its memory unless it is told to leave some (`tf.config.experimental.set_memory_growth`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.buffers import dlpack
from commlib.devices.array import DeviceArray
from commlib.devices.cuda import process
from commlib.devices.protocol import Device, Stream
from commlib.devices.registry import lookup
from commlib.devices.waiting import wait_for
from commlib.dtypes import name_of


class Kind(Protocol):
    """Find TensorFlow's tensors on one kind of device of the core."""

    @property
    def name(self) -> str:
        """That of the core's device."""
        ...

    def device_of(self, tensor: Any, number: int) -> Device | None:
        """Return the device that has an eager tensor; None if it is the host's after all. Raises UsageError.

        number: that of TensorFlow's device.
        """
        ...

    def capsule(self, array: DeviceArray) -> Any:
        """Return a DLPack capsule over an array (which is not empty, and of a dtype of numpy's own); it keeps it."""
        ...


class Cuda:
    """See `Kind`."""

    name = "cuda"

    def device_of(self, tensor: Any, number: int) -> Device:
        return process.device(number)

    def capsule(self, array: DeviceArray) -> Any:
        return array.device.at(array.address, array.shape, array.dtype, array.owner).__dlpack__()


# By TensorFlow's name of a type of devices, such as "GPU", and by the core's.
_KINDS: dict[str, Kind] = {}
_BY_NAME: dict[str, Kind] = {}


@cache
def types() -> tuple[str, ...]:
    """Return the types of TensorFlow's devices that are not the host's and of which this process has some."""
    return tuple(where for where in _KINDS if tf.config.list_logical_devices(where))


def register(where: str, kind: Kind) -> Callable[[], None]:
    """Let tensors on devices that TensorFlow calls `where` be on one of the core's; return what ends that."""
    before = [(table, key, table.get(key)) for table, key in ((_KINDS, where), (_BY_NAME, kind.name))]
    _KINDS[where] = _BY_NAME[kind.name] = kind
    types.cache_clear()

    def end() -> None:
        for table, key, kept in before:
            if kept is None:
                del table[key]
            else:
                table[key] = kept
        types.cache_clear()

    return end


register("GPU", Cuda())


def kind_of(where: str) -> Kind | None:
    """Return the kind of TensorFlow's devices of a type, such as "GPU"; None if they are the host's."""
    return _KINDS.get(where)


def device_of(tensor: Any) -> Device | None:
    """Return the core's device that has an eager tensor; None if it is on the host. Raises UsageError."""
    where, _, number = tensor.backing_device.rpartition("/")[2].removeprefix("device:").partition(":")
    kind = _KINDS.get(where)
    return None if kind is None else kind.device_of(tensor, int(number))


_given_back: deque[Any] = deque()
"""What TensorFlow has given back, and may still read."""


class _Lent:
    """Owns memory that TensorFlow has: it goes when no tensor refers to that any more.

    Until then it refers to the very array, by which who lent that knows.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._array = array


def _to_dlpack(tensor: Any) -> Any:
    """Return a capsule over a tensor, when TensorFlow's device has done what it was told; let go of what it read."""
    before = []
    with suppress(IndexError):  # other threads take from it, too
        while True:
            before.append(_given_back.popleft())
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    del before
    return capsule


def array_over(tensor: Any, device: Device) -> DeviceArray:
    """Return an array over an eager tensor of a device, which must only be read. The host waits for TensorFlow."""
    capsule = _to_dlpack(tensor)
    there = dlpack.read(capsule)
    return DeviceArray(
        device, there.address, there.shape, tensor.dtype.as_numpy_dtype, (tensor, capsule), device.current()
    )


def settle(where: str) -> None:
    """Wait until TensorFlow's device of this name has done all that it was told: what it gave back may be written."""
    _to_dlpack(_any_tensor(where))


@cache
def _any_tensor(where: str) -> Any:
    with tf.device(where):
        return tf.identity(tf.zeros([1]))


def tensor_over(made: Any) -> Any:
    """Return an eager tensor over an array that nobody else writes to: a DeviceArray, or what a device makes.

    The host waits until what this thread's stream has been told is done.
    """
    return tensors_over([made])[0]


def tensors_over(made: Sequence[Any], pairs: Sequence[bool] = ()) -> list[Any]:
    """Return what `tensor_over` does, of several arrays of one device. The host waits once.

    pairs: for each array, whether its last dimension is real and imaginary part of complex numbers.
    """
    arrays = [array if type(array) is DeviceArray else lookup(array).wrap(array, "a result") for array in made]
    if arrays:
        device = arrays[0].device
        wait_for(device.current().record(), core.running().watch(f"a result on {device.name}"))
    return list(map(_over, arrays, pairs or [False] * len(arrays)))


def _over(array: DeviceArray, is_pairs: bool) -> Any:
    shape, dtype = array.shape, array.dtype
    if is_pairs:
        shape, dtype = shape[:-1], np.result_type(dtype, np.complex64)
    kind = tf.as_dtype(name_of(dtype))
    if array.nbytes == 0:
        return tf.zeros(shape, kind)
    lent = _Lent(array)
    weakref.finalize(lent, _given_back.append, array.owner).atexit = False
    plain = np.dtype(np.uint16) if array.dtype.kind == "V" else dtype  # bfloat16, which numpy has not
    bits = DeviceArray(array.device, array.address, shape, plain, lent, array.stream)
    tensor = tf.experimental.dlpack.from_dlpack(_BY_NAME[array.device.name].capsule(bits))
    if tensor.dtype == kind:
        return tensor
    return tf.cast(tensor, kind) if kind == tf.bool else tf.bitcast(tensor, kind)


_streams: dict[Device, Stream] = {}


@contextmanager
def working(device: Device) -> Iterator[None]:
    """Make one stream of the device, the same for all threads, the current one within a `with`.

    Nodes of one graph run in several threads, whose current streams are not in order with each other.
    """
    stream = _streams.get(device)
    if stream is None:
        stream = _streams.setdefault(device, device.stream())
    with device.using(stream):
        yield
