"""Accumulation: the working memory of a reduction by messages, and how its result is finished."""

from __future__ import annotations

from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import NUMPY, Array, kernel_operation, name_of
from commlib.execution.reduce_op import ReduceOp
from commlib.kernels.host.reduce import accumulator_dtype


class Accumulation:
    """What a reduction by messages works with: the array itself, or a wider copy of it that is rounded once at the end.

    once: nothing is combined twice on its way, so no copy needs to be wider.
    """

    def __init__(self, x: Array, op: str, size: int, *, once: bool = False) -> None:
        dtype = name_of(x.dtype)
        operation = kernel_operation(dtype, op)
        wide = dtype if once else accumulator_dtype(dtype, operation)
        self.widened = wide != dtype
        self.x = x.astype(NUMPY[wide]) if self.widened else x
        self._finisher = None
        if once:
            self.reduce_op = ReduceOp(dtype, operation, size)
        else:
            self.reduce_op = ReduceOp(wide, "sum" if operation == "mean" else operation)
            if operation == "mean" and size > 1:
                self._finisher = ReduceOp(wide, operation, size)

    def work_in(self, target: Array) -> Array:
        """Return an array with the input that may be overwritten: `target` where its dtype allows."""
        if self.widened:
            return self.x
        if address_of(self.x) != address_of(target):
            target[...] = self.x
        return target

    def finish(self, part: Array, target: Array) -> None:
        """Write a reduced part of the working memory to `target`: divide, then round."""
        if self._finisher is not None and len(part):
            self._finisher.combine([part], part)
        if address_of(part) != address_of(target):
            # Overflow to infinity is what rounding to a narrow float means, not something to warn of.
            with np.errstate(over="ignore", invalid="ignore"):
                target[...] = part.astype(target.dtype) if self.widened else part


def is_widened(dtype: Any, op: str) -> bool:
    """Return whether sums of this dtype are kept in a wider one."""
    return wide_dtype(dtype, op) != name_of(dtype)


def wide_dtype(dtype: Any, op: str) -> str:
    """Return the dtype in which partial results are kept."""
    name = name_of(dtype)
    return accumulator_dtype(name, kernel_operation(name, op))
