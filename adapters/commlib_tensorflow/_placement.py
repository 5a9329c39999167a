"""Placement: choose where a node of a graph runs, so that GPU tensors stay on the GPU.

In a traced function TensorFlow mostly decides after tracing where tensors are. So the device is guessed. If the guess
is wrong, TensorFlow copies tensors to the node's device and results back: that takes time, but results are the same.
The guess must be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from commlib.devices.arrays import device_named
from commlib.devices.protocol import Device
from commlib_tensorflow.devices import kind_of, types


class DevicePlace(NamedTuple):
    """A device of TensorFlow, such as "GPU:0", and the core's name of it."""

    where: str
    name: str

    @property
    def device(self) -> Device:
        """The core's device. Raises UsageError if this process has none."""
        device: Device = device_named(self.name, "TensorFlow's tensors")
        return device


def place_of(values: Iterable[Any]) -> DevicePlace | None:
    """Return the first device that holds one of these tensors or variables; None if the host holds all.

    A symbolic tensor without a device is on TensorFlow's default device: from an enclosing `tf.device`, or the first
    GPU.
    """
    if not types():
        return None
    is_unknown = False
    for value in values:
        spec = tf.DeviceSpec.from_string(_device_of_value(value))
        if spec.device_type is None:
            is_unknown = True
        elif (place := _place(spec)) is not None:
            return place
    return _default() if is_unknown else None


def fits(dtypes: Sequence[Any]) -> bool:
    """Return whether a node that takes and returns these dtypes may run on a GPU: TensorFlow has none for int32."""
    return all(tf.as_dtype(dtype) != tf.int32 for dtype in dtypes)


def _device_of_value(value: Any) -> str:
    """Return the device that a tensor or variable reports."""
    holder = value if hasattr(value, "device") else getattr(value, "value", None)  # a variable of Keras 3 wraps one
    return str(getattr(holder, "backing_device", None) or getattr(holder, "device", None) or "")


def _place(spec: Any) -> DevicePlace | None:
    kind = kind_of(spec.device_type)
    return None if kind is None else DevicePlace(f"{spec.device_type}:{spec.device_index or 0}", kind.name)


def _default() -> DevicePlace | None:
    if not tf.executing_eagerly():
        spec = tf.DeviceSpec.from_string(tf.no_op().device)
        if spec.device_type is not None:
            return _place(spec)
    return _place(tf.DeviceSpec(device_type=types()[0], device_index=0))
