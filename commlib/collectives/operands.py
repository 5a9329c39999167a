"""The arrays of one call: what is read, and where the result goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.buffers.views import contiguous
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import address, device_of, overlap, readable, written
from commlib.devices.host import HOST
from commlib.dtypes import name_of
from commlib.errors import UsageError
from commlib.schedule.layout import Layout, even, uneven


@dataclass(slots=True)
class Result:
    """Hold a verb's result: `flat` is contiguous and 1-D, `deliver` gives the user what was asked for."""

    array: Any
    flat: Any
    given: Any  # what is returned: the user's `out` as it came, or a new array
    staged: bool = False  # `array` is not contiguous, so `flat` is a copy

    def deliver(self) -> Any:
        if self.staged:
            self.array[...] = self.flat.reshape(self.array.shape)
        return self.given


def source(x: Any, verb: str) -> Any:
    """Return the array to read from: contiguous, any shape; a DeviceArray if it is not on the host. UsageError."""
    return readable(x, verb)


def result(out: Any, shape: tuple[int, ...], dtype: Any, verb: str, device: Any = HOST) -> Result:
    """Return where to put a result of this shape and dtype: `out`, or a new array of the device. Raises UsageError."""
    if out is None:
        if device is HOST:
            array = np.empty(shape, dtype)
            return Result(array, array.reshape(-1), array)
        made = device.empty(shape, dtype)
        target = device.wrap(made, verb, "out")
        return Result(target, target.reshape(-1), made)
    target = written(out, verb, "out")
    if device_of(target) is not device:
        raise UsageError(
            f"{verb}: x is on {device.name} and out on {device_of(target).name}: pass arrays of one device"
        )
    if target.shape != shape or target.dtype != dtype:
        raise UsageError(
            f"{verb}: out has shape {target.shape} and dtype {name_of(target.dtype)}; "
            f"the result has shape {shape} and dtype {name_of(dtype)}"
        )
    if type(target) is DeviceArray:
        return Result(target, target.reshape(-1), out)
    flat = contiguous(target, verb)
    return Result(target, flat.reshape(-1), out, staged=flat is not target)


def made_like(x: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return a new array for a result that a call makes when it runs, and that as the user gets it.

    On a device it is memory of the stream from which `x` came, and the current stream may write it.
    """
    if type(x) is not DeviceArray:
        made = np.empty(shape, x.dtype)
        return made, made
    device = x.device
    with device.using(x.stream):
        given = device.empty(shape, x.dtype)
    device.current().wait(x.stream.record())  # who had this memory before may still use it
    return device.wrap(given, "result"), given


def apart(x: Any, target: Any) -> Any:
    """Return `x`, or a copy of it if it overlaps `target` without being the same memory."""
    same = address(x) == address(target) and x.nbytes == target.nbytes
    return x if same or not overlap(x, target) else x.copy()


def apart_from(x: Any, target: Any) -> Any:
    """Return `x`, or a copy of it if it shares memory with `target`."""
    return x.copy() if overlap(x, target) else x


def rows(array: Any, verb: str) -> tuple[int, int]:
    """Return (length of dimension 0, elements in each row). Raises UsageError for a 0-d array."""
    if array.ndim == 0:
        raise UsageError(f"{verb}: x is 0-dimensional, but {verb} splits dimension 0: reshape it to (1,)")
    return array.shape[0], int(np.prod(array.shape[1:], dtype=np.int64))


def stacked(size: int, array: Any) -> tuple[int, ...]:
    """Return the shape of the arrays of all ranks, one after another."""
    return (size * array.shape[0], *array.shape[1:]) if array.ndim else (size,)


def row_layout(shape: tuple[int, ...], size: int) -> Layout:
    """Return the layout of an array whose rows are shared out among the ranks; the first get one more if need be."""
    row = math.prod(shape[1:])
    return uneven(count * row for count in even(shape[0], size).counts)
