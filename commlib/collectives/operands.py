"""The arrays of one call: what is read, and where the result goes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.buffers.views import address_of, as_host, contiguous, writable
from commlib.dtypes import Array, name_of
from commlib.errors import UsageError
from commlib.schedule.layout import Layout, even, uneven


@dataclass(slots=True)
class Result:
    """Where a verb's result goes: `flat` is contiguous and 1-D, `deliver` gives the user what was asked for."""

    array: Array
    flat: Array
    given: Any  # the user's `out`, to be returned as it came
    staged: bool = False  # `array` is not contiguous, so `flat` is a copy

    def deliver(self) -> Any:
        if self.given is None:
            return self.array
        if self.staged:
            self.array[...] = self.flat.reshape(self.array.shape)
        return self.given


def source(x: Any, verb: str) -> Array:
    """Return the array to read from: contiguous, any shape. Raises UsageError."""
    return contiguous(as_host(x, verb), verb)


def result(out: Any, shape: tuple[int, ...], dtype: Any, verb: str) -> Result:
    """Return where to put a result of this shape and dtype: `out`, or a new array. Raises UsageError."""
    if out is None:
        array = np.empty(shape, dtype)
        return Result(array, array.reshape(-1), None)
    array = writable(as_host(out, verb, "out"), verb, "out")
    if array.shape != shape or array.dtype != dtype:
        raise UsageError(
            f"{verb}: out has shape {array.shape} and dtype {name_of(array.dtype)}; "
            f"the result has shape {shape} and dtype {name_of(dtype)}"
        )
    flat = contiguous(array, verb)
    return Result(array, flat.reshape(-1), out, staged=flat is not array)


def apart(x: Array, target: Array) -> Array:
    """Return `x`, or a copy of it if it overlaps `target` without being the same memory."""
    same = address_of(x) == address_of(target) and x.nbytes == target.nbytes
    return x if same or not np.may_share_memory(x, target) else x.copy()


def apart_from(x: Array, target: Array) -> Array:
    """Return `x`, or a copy of it if it shares memory with `target`."""
    return x.copy() if np.may_share_memory(x, target) else x


def rows(array: Array, verb: str) -> tuple[int, int]:
    """Return (length of dimension 0, elements in each row). Raises UsageError for a 0-d array."""
    if array.ndim == 0:
        raise UsageError(f"{verb}: x is 0-dimensional, but {verb} splits dimension 0: reshape it to (1,)")
    return array.shape[0], int(np.prod(array.shape[1:], dtype=np.int64))


def stacked(size: int, array: Array) -> tuple[int, ...]:
    """Return the shape of the arrays of all ranks, one after another."""
    return (size * array.shape[0], *array.shape[1:]) if array.ndim else (size,)


def row_layout(shape: tuple[int, ...], size: int) -> Layout:
    """Return the layout of an array whose rows are shared out among the ranks; the first get one more if need be."""
    row = math.prod(shape[1:])
    return uneven(count * row for count in even(shape[0], size).counts)
