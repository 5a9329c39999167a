"""Devices: TensorFlow's eager tensors on a GPU as arrays of the core and back, by DLPack, over the same memory.

TensorFlow works on streams of its own, which Python cannot see. What it promises, by its documentation and sources:

- `to_dlpack` returns when the GPU has done all that TensorFlow has told it: the host waits, and what is there is read;
- `from_dlpack` waits for nothing: what is given must be there. So the host waits for a verb's result before that;
- memory that it was given goes back as soon as no tensor refers to it, though what reads it may not have run yet. So it
  is kept until the next `to_dlpack`, which is behind that.

In a traced function TensorFlow itself copies what is on a GPU to the host, and back; so do operations by name, and
gradients. A GPU is chosen by CUDA_VISIBLE_DEVICES, so that its number is the same for all libraries of the process.
TensorFlow takes all of its memory unless it is told to leave some (`tf.config.experimental.set_memory_growth`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.buffers import dlpack
from commlib.devices.array import DeviceArray
from commlib.devices.cuda import process
from commlib.devices.protocol import Device
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


def register(where: str, kind: Kind) -> Callable[[], None]:
    """Let tensors on devices that TensorFlow calls `where` be on one of the core's; return what ends that."""
    before = _BY_NAME.get(kind.name)
    _KINDS[where] = _BY_NAME[kind.name] = kind

    def end() -> None:
        del _KINDS[where], _BY_NAME[kind.name]
        if before is not None:
            _BY_NAME[kind.name] = before

    return end


register("GPU", Cuda())


def device_of(tensor: Any) -> Device | None:
    """Return the core's device that has an eager tensor; None if it is on the host. Raises UsageError."""
    where, _, number = tensor.backing_device.rpartition("/")[2].removeprefix("device:").partition(":")
    kind = _KINDS.get(where)
    return None if kind is None else kind.device_of(tensor, int(number))


class _GivenBack:
    """What TensorFlow has given back, and may still read."""

    def __init__(self) -> None:
        self.owners: list[Any] = []


_given_back = _GivenBack()


class _Lent:
    """Owns memory that TensorFlow has: it goes when no tensor refers to that any more."""


def array_over(tensor: Any, device: Device) -> DeviceArray:
    """Return an array over an eager tensor of a device, which must only be read. The host waits for TensorFlow."""
    before = len(_given_back.owners)
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    del _given_back.owners[:before]
    there = dlpack.read(capsule)
    return DeviceArray(
        device, there.address, there.shape, tensor.dtype.as_numpy_dtype, (tensor, capsule), device.current()
    )


def tensor_over(made: Any) -> Any:
    """Return an eager tensor over an array that nobody else writes to: a DeviceArray, or what a device makes.

    The host waits until what this thread's stream has been told is done.
    """
    array = made if type(made) is DeviceArray else lookup(made).wrap(made, "a result")
    kind = tf.as_dtype(name_of(array.dtype))
    if array.nbytes == 0:
        return tf.zeros(array.shape, kind)
    device = array.device
    wait_for(device.current().record(), core.running().watch(f"a result on {device.name}"))
    lent = _Lent()
    weakref.finalize(lent, _given_back.owners.append, array.owner).atexit = False
    dtype = np.dtype(np.uint16) if array.dtype.kind == "V" else array.dtype  # bfloat16, which numpy has not
    bits = DeviceArray(device, array.address, array.shape, dtype, lent, array.stream)
    tensor = tf.experimental.dlpack.from_dlpack(_BY_NAME[device.name].capsule(bits))
    if tensor.dtype == kind:
        return tensor
    return tf.cast(tensor, kind) if kind == tf.bool else tf.bitcast(tensor, kind)
