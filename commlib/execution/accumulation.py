"""Accumulation: the working memory of a reduction by messages, and the finish of its result."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.arrays import address
from commlib.dtypes import HALVES, WORKING, accumulator_dtype, kernel_operation, name_of
from commlib.execution.reduce_function import ReduceFunction, mean_of_halves, split_in_halves


class Accumulation:
    """The working memory of a reduction by messages: the array itself, or a wider copy that is rounded once at the end.

    once: every element is combined only once, so no wider copy is needed.
    """

    def __init__(self, x: Any, op: str, size: int, *, once: bool = False) -> None:
        dtype = name_of(x.dtype)
        operation = kernel_operation(dtype, op)
        wide = dtype if once else accumulator_dtype(dtype, operation)
        self.widened = wide != dtype
        self._size, self._in_halves = size, wide == HALVES
        self.x = _cast(x, wide) if self.widened else x
        self._finisher = None
        if once:
            self.reduce_op = ReduceFunction(dtype, operation, size)
        else:
            self.reduce_op = ReduceFunction(wide, "sum" if operation == "mean" else operation)
            if operation == "mean" and size > 1 and not self._in_halves:
                self._finisher = ReduceFunction(wide, operation, size)

    def working_array(self, target: Any) -> Any:
        """Return an overwritable array with the input: `target`, if its dtype allows."""
        if self.widened:
            return self.x
        if address(self.x) != address(target):
            target[:] = self.x
        return target

    def finish(self, part: Any, target: Any) -> None:
        """Write a reduced slice of the working memory to `target`: divide, then round."""
        if self._in_halves:
            mean_of_halves(part, target, self._size)
            return
        if self._finisher is not None and len(part):
            self._finisher.combine([part], part)
        if address(part) != address(target):
            if not self.widened:
                target[:] = part
            elif type(target) is DeviceArray:
                target.device.kernels.cast(part, target)
            else:
                # Rounding to a narrow float may overflow to infinity; that needs no warning.
                with np.errstate(over="ignore", invalid="ignore"):
                    target[:] = part.astype(target.dtype)


def _cast(x: Any, dtype: str) -> Any:
    """Return a copy of an array in another dtype."""
    if dtype == HALVES:
        return split_in_halves(x)
    if type(x) is not DeviceArray:
        return x.astype(WORKING[dtype])
    wide = x.empty(x.shape, WORKING[dtype])
    x.device.kernels.cast(x, wide)
    return wide


def is_widened(dtype: Any, op: str) -> bool:
    """Return whether sums of this dtype accumulate in a wider dtype."""
    return wide_dtype(dtype, op) != name_of(dtype)


def is_in_halves(dtype: Any, op: str) -> bool:
    """Return whether sums accumulate in halves, which only the host can: the mean of 64-bit integers."""
    return wide_dtype(dtype, op) == HALVES


def wide_dtype(dtype: Any, op: str) -> str:
    """Return the dtype of partial results."""
    name = name_of(dtype)
    return accumulator_dtype(name, kernel_operation(name, op))


def wide_bytes(count: int, dtype: Any, op: str) -> int:
    """Return the bytes of `count` partial results."""
    return count * WORKING[wide_dtype(dtype, op)].itemsize
