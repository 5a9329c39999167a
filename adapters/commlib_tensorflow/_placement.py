"""Placement: where a node of a graph should run, so that tensors of a GPU need not leave it.

A traced function mostly leaves to TensorFlow where its tensors are: that is decided after it was traced. So it is
guessed. Where the guess is wrong, TensorFlow copies tensors to where the node runs, and results from there: that takes
time, and results are the same. But it must be the same guess on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from commlib.devices.arrays import device_named
from commlib.devices.protocol import Device
from commlib_tensorflow.devices import kind_of, types


class Place(NamedTuple):
    """A device of TensorFlow, such as "GPU:0", and the name of the core's."""

    where: str
    name: str

    @property
    def device(self) -> Device:
        """The core's. Raises UsageError if this process has none."""
        device: Device = device_named(self.name, "TensorFlow's tensors")
        return device


def place_of(values: Iterable[Any]) -> Place | None:
    """Return the first device that has one of these tensors or variables; None if the host has all.

    What is symbolic and says nothing is where TensorFlow puts things by default: where an enclosing `tf.device` says,
    or on the first GPU.
    """
    if not types():
        return None
    is_unknown = False
    for value in values:
        spec = tf.DeviceSpec.from_string(_said(value))
        if spec.device_type is None:
            is_unknown = True
        elif (place := _place(spec)) is not None:
            return place
    return _default() if is_unknown else None


def fits(dtypes: Sequence[Any]) -> bool:
    """Return whether a node that takes and returns these dtypes may run on a GPU: TensorFlow has none for int32."""
    return all(tf.as_dtype(dtype) != tf.int32 for dtype in dtypes)


def _said(value: Any) -> str:
    """Return where a tensor or variable says that it is."""
    holder = value if hasattr(value, "device") else getattr(value, "value", None)  # a variable of Keras 3 wraps one
    return str(getattr(holder, "backing_device", None) or getattr(holder, "device", None) or "")


def _place(spec: Any) -> Place | None:
    kind = kind_of(spec.device_type)
    return None if kind is None else Place(f"{spec.device_type}:{spec.device_index or 0}", kind.name)


def _default() -> Place | None:
    if not tf.executing_eagerly():
        spec = tf.DeviceSpec.from_string(tf.no_op().device)
        if spec.device_type is not None:
            return _place(spec)
    return _place(tf.DeviceSpec(device_type=types()[0], device_index=0))
