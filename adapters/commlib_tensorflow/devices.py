"""Devices: share memory between TensorFlow's GPU tensors and arrays of the core, by DLPack.

TensorFlow works on its own streams, which Python cannot access. Its documentation and sources promise:

- `to_dlpack` returns when the GPU has finished all of TensorFlow's work: the host waits, and the data can be read;
- `from_dlpack` does not wait: the data must be complete. So the host waits for a result first;
- TensorFlow releases adopted memory as soon as no tensor refers to it, though kernels that read it may still be queued.
So the memory is kept until the next `to_dlpack`, and a slot of a bucket is not written earlier either (`settle`);
- `tf.py_function` runs on the device that it is placed on, and gets tensors in that device's memory, if the placement
is known at trace time and no tensor is int32 (otherwise it runs on the host, with host memory);
- int32 tensors of a GPU are mostly in host memory: `backing_device` returns the device of each one.

Both waits have a price: TensorFlow's queue drains once before and once after each operation, and for gradients once for
each bucket that is sent during backward. This cannot be avoided, because TensorFlow does not expose its streams or
events.

Choose a GPU with CUDA_VISIBLE_DEVICES, so that its number is the same for all libraries of the process. TensorFlow
takes all of its memory unless configured to leave some (`tf.config.experimental.set_memory_growth`).
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


class DeviceBackend(Protocol):
    """Access to TensorFlow's tensors on one kind of device."""

    @property
    def name(self) -> str:
        """The name of the core's device."""
        ...

    def device_of(self, tensor: Any, number: int) -> Device | None:
        """Return the core's device of an eager tensor; None if its data is on the host after all. Raises UsageError.

        number: the number of TensorFlow's device.
        """
        ...

    def capsule(self, array: DeviceArray) -> Any:
        """Return a DLPack capsule over a non-empty array with a numpy dtype; the capsule keeps the array alive."""
        ...


class Cuda:
    """CUDA devices."""

    name = "cuda"

    def device_of(self, tensor: Any, number: int) -> Device:
        return process.device(number)

    def capsule(self, array: DeviceArray) -> Any:
        return array.device.at(array.address, array.shape, array.dtype, array.owner).__dlpack__()


# By TensorFlow's name of a device type, such as "GPU", and by the core's name.
_KINDS: dict[str, DeviceBackend] = {}
_BY_NAME: dict[str, DeviceBackend] = {}


@cache
def types() -> tuple[str, ...]:
    """Return TensorFlow's device types, except the host's, that this process has devices of."""
    return tuple(where for where in _KINDS if tf.config.list_logical_devices(where))


def register(where: str, kind: DeviceBackend) -> Callable[[], None]:
    """Map TensorFlow's device type `where` to one of the core's; return a function that undoes this."""
    before = [(table, key, table.get(key)) for table, key in ((_KINDS, where), (_BY_NAME, kind.name))]
    _KINDS[where] = _BY_NAME[kind.name] = kind
    types.cache_clear()

    def end() -> None:
        for table, key, old in before:
            if old is None:
                del table[key]
            else:
                table[key] = old
        types.cache_clear()

    return end


register("GPU", Cuda())


def kind_of(where: str) -> DeviceBackend | None:
    """Return the kind for a TensorFlow device type, such as "GPU"; None for the host."""
    return _KINDS.get(where)


def device_of(tensor: Any) -> Device | None:
    """Return the core's device of an eager tensor; None if it is on the host. Raises UsageError."""
    where, _, number = tensor.backing_device.rpartition("/")[2].removeprefix("device:").partition(":")
    kind = _KINDS.get(where)
    return None if kind is None else kind.device_of(tensor, int(number))


_released: deque[Any] = deque()
"""Memory that TensorFlow has released, but may still read."""


class _BorrowedMemory:
    """Owner of memory that TensorFlow has adopted: it dies when no tensor refers to the memory any more.

    Until then it refers to the original array, which marks it as in use.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._array = array


def _to_dlpack(tensor: Any) -> Any:
    """Return a capsule over a tensor after TensorFlow's device has finished; free the memory it has read."""
    before = []
    with suppress(IndexError):  # other threads take from it, too
        while True:
            before.append(_released.popleft())
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    del before
    return capsule


def array_over(tensor: Any, device: Device) -> DeviceArray:
    """Return a read-only array over an eager tensor of a device. The host waits for TensorFlow."""
    capsule = _to_dlpack(tensor)
    there = dlpack.read(capsule)
    return DeviceArray(
        device, there.address, there.shape, tensor.dtype.as_numpy_dtype, (tensor, capsule), device.current()
    )


def settle(where: str) -> None:
    """Wait until TensorFlow's device of this name has finished: memory it has released may then be overwritten."""
    _to_dlpack(_any_tensor(where))


@cache
def _any_tensor(where: str) -> Any:
    with tf.device(where):
        return tf.identity(tf.zeros([1]))


def finish_reads(arrays: Sequence[Any]) -> None:
    """Wait until the work queued on this thread's stream has read arrays, which a call without a result took.

    Afterwards TensorFlow may reuse their memory. A call with a result needs no such wait: see `tensors_over`.
    """
    for array in arrays:
        if type(array) is DeviceArray and array.nbytes:
            device = array.device
            wait_for(device.current().record(), core.require_world().watch(f"reads of an array on {device.name}"))
            return


def tensor_over(array: Any) -> Any:
    """Return an eager tensor over a device array that nobody else writes to.

    The host waits until the work queued on this thread's stream is done.
    """
    return tensors_over([array])[0]


def tensors_over(lent: Sequence[Any], pairs: Sequence[bool] = ()) -> list[Any]:
    """Do the same as `tensor_over` for several arrays of one device. The host waits once.

    pairs: for each array, whether its last dimension holds real and imaginary part of complex numbers.
    """
    arrays = [array if type(array) is DeviceArray else lookup(array).wrap(array, "a result") for array in lent]
    if arrays:
        device = arrays[0].device
        wait_for(device.current().record(), core.require_world().watch(f"a result on {device.name}"))
    return list(map(_tensor_over, arrays, pairs or [False] * len(arrays)))


def _tensor_over(array: DeviceArray, is_pairs: bool) -> Any:
    shape, dtype = array.shape, array.dtype
    if is_pairs:
        shape, dtype = shape[:-1], np.result_type(dtype, np.complex64)
    kind = tf.as_dtype(name_of(dtype))
    if array.nbytes == 0:
        return tf.zeros(shape, kind)
    lent = _BorrowedMemory(array)
    weakref.finalize(lent, _released.append, array.owner).atexit = False
    plain = np.dtype(np.uint16) if array.dtype.kind == "V" else dtype  # bfloat16, which numpy lacks
    bits = DeviceArray(array.device, array.address, shape, plain, lent, array.stream)
    tensor = tf.experimental.dlpack.from_dlpack(_BY_NAME[array.device.name].capsule(bits))
    if tensor.dtype == kind:
        return tensor
    return tf.cast(tensor, kind) if kind == tf.bool else tf.bitcast(tensor, kind)


_streams: dict[Device, Stream] = {}


@contextmanager
def use_device_stream(device: Device) -> Iterator[None]:
    """Make one stream of the device, the same for all threads, the current one within a `with`.

    Nodes of one graph run in several threads, whose current streams are not ordered with each other.
    """
    stream = _streams.get(device)
    if stream is None:
        stream = _streams.setdefault(device, device.stream())
    with device.using(stream):
        yield
