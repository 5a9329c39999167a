"""ReduceFunction: one reduction of one dtype, for every path of a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.devices.array import DeviceArray
from commlib.dtypes import HALVES, WORKING, Array, kernel_operation, name_of
from commlib.kernels.machine_code import entry_point
from commlib.kernels.reductions import reduction


@dataclass(frozen=True, slots=True)
class ReduceFunction:
    """An operation of the kernels on a dtype. divisor: the divisor of a mean, else 0."""

    dtype: str
    operation: str
    divisor: int = 0

    @classmethod
    def of(cls, dtype: Any, op: str, divisor: int) -> ReduceFunction:
        """Return the reduction for a verb's `op`. Raises UsageError if the dtype does not support it."""
        name = name_of(dtype)
        return cls(name, kernel_operation(name, op), divisor)

    @property
    def item_bytes(self) -> int:
        return WORKING[self.dtype].itemsize

    @property
    def address(self) -> int:
        """The address of the compiled function, which is compiled on first use."""
        return reduction(self.dtype, self.operation).address

    def combine(self, operands: Sequence[Any], target: Any) -> None:
        """Set target = operands[0] (operation) operands[1] ... Contiguous 1-D arrays; target may be an operand."""
        if type(target) is DeviceArray:
            target.device.kernels.reduce(self.dtype, self.operation, self.divisor, operands, target)
            return
        reduce = reduction(self.dtype, self.operation).call
        inputs = np.array([address_of(operand) for operand in operands], np.int64)
        output = np.array([address_of(target)], np.int64)
        reduce(address_of(inputs), len(inputs), address_of(output), 1, 0, len(target), self.divisor)

    def bind(self, operands: Sequence[Array], target: Array) -> Combination:
        """Return a prepared `combine` of fixed arrays."""
        return Combination(self, operands, target)


class Combination:
    """One prepared call of a reduction: running it costs no more than calling a compiled function."""

    __slots__ = ("_keep", "_written", "address")

    def __init__(self, op: ReduceFunction, operands: Sequence[Array], target: Array) -> None:
        inputs = np.array([address_of(operand) for operand in operands], np.int64)
        output = np.array([address_of(target)], np.int64)
        arguments = address_of(inputs), len(inputs), address_of(output), 1, 0, len(target), op.divisor
        self._written = np.array([op.address, *arguments], np.int64)
        self.address = address_of(self._written)
        self._keep = operands, target, inputs, output


def split_in_halves(x: Array) -> Array:
    """Convert contiguous 64-bit integers to halves, 1-D: see `kernels.host.exact_mean`."""
    halves = np.empty(x.size, WORKING[HALVES])
    entry_point("exact_mean.split_halves", 4)(address_of(x), address_of(halves), x.size, x.dtype.kind == "i")
    return halves


def mean_of_halves(halves: Array, target: Array, size: int) -> None:
    """Write sums of halves, divided by `size` and truncated toward zero, as 64-bit integers."""
    entry_point("exact_mean.join_halves", 5)(
        address_of(halves), address_of(target), len(halves), size, target.dtype.kind == "i"
    )
