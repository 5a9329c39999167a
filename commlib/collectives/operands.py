"""The arrays of one call: the source to read and the result to write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.buffers.views import contiguous
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import address, as_contiguous, as_writable, device_of, overlap
from commlib.devices.host import HOST
from commlib.dtypes import name_of
from commlib.errors import UsageError
from commlib.schedule.layout import Layout, even, uneven


@dataclass(slots=True)
class Result:
    """A verb's result: the call writes to `flat` (contiguous, 1-D), and `deliver` returns the user's array."""

    array: Any
    flat: Any
    user_array: Any  # returned to the user: `out` as passed, or a new array
    staged: bool = False  # `array` is not contiguous, so `flat` is a copy

    def deliver(self) -> Any:
        if self.staged:
            self.array[...] = self.flat.reshape(self.array.shape)
        return self.user_array


def source(x: Any, verb: str) -> Any:
    """Return the array to read: contiguous, of any shape; a DeviceArray if not on the host. Raises UsageError."""
    return as_contiguous(x, verb)


def result(out: Any, shape: tuple[int, ...], dtype: Any, verb: str, device: Any = HOST) -> Result:
    """Return the Result for this shape and dtype: over `out`, or over a new array of the device. Raises UsageError."""
    if out is None:
        if device is HOST:
            array = np.empty(shape, dtype)
            return Result(array, array.reshape(-1), array)
        created = device.empty(shape, dtype)
        target = device.wrap(created, verb, "out")
        return Result(target, target.reshape(-1), created)
    target = as_writable(out, verb, "out")
    if device_of(target) is not device:
        raise UsageError(
            f"{verb}: x is on {device.name} and out on {device_of(target).name}: pass arrays on one device"
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


def allocate_like(x: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Allocate the result of a running call; return it as commlib's array and as the user's.

    On a device the memory belongs to the stream of `x`, and the current stream waits until it may write it.
    """
    if type(x) is not DeviceArray:
        array = np.empty(shape, x.dtype)
        return array, array
    device = x.device
    with device.using(x.stream):
        given = device.empty(shape, x.dtype)
    device.current().wait(x.stream.record())  # work on this memory's previous contents may still run
    return device.wrap(given, "result"), given


def copy_if_overlapping(x: Any, target: Any) -> Any:
    """Return `x`, or a copy of it if it overlaps `target` without being the same memory."""
    same = address(x) == address(target) and x.nbytes == target.nbytes
    return x if same or not overlap(x, target) else x.copy()


def copy_if_shared(x: Any, target: Any) -> Any:
    """Return `x`, or a copy of it if it shares memory with `target`."""
    return x.copy() if overlap(x, target) else x


def rows(array: Any, verb: str) -> tuple[int, int]:
    """Return (length of dimension 0, elements in each row). Raises UsageError for a 0-d array."""
    if array.ndim == 0:
        raise UsageError(f"{verb}: x is 0-dimensional, but {verb} splits dimension 0: reshape it to (1,)")
    return array.shape[0], int(np.prod(array.shape[1:], dtype=np.int64))


def stacked_shape(size: int, array: Any) -> tuple[int, ...]:
    """Return the shape of all ranks' arrays concatenated along dimension 0."""
    return (size * array.shape[0], *array.shape[1:]) if array.ndim else (size,)


def row_layout(shape: tuple[int, ...], size: int) -> Layout:
    """Return the layout of an array with its rows split among the ranks; the first ranks get the remainder."""
    row = math.prod(shape[1:])
    return uneven(count * row for count in even(shape[0], size).counts)
