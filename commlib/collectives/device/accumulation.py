"""Wide: how numbers are combined that cross a network: in a wider dtype where need be, rounded once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.dtypes import WORKING, kernel_operation, name_of
from commlib.execution.accumulation import wide_dtype
from commlib.execution.reduce_op import ReduceOp


@dataclass(frozen=True, slots=True)
class Wide:
    """Hold the dtype in which partial results are kept, the operation on them, and what ends a mean, if it is one."""

    dtype: Any
    operation: ReduceOp
    finisher: ReduceOp | None

    @classmethod
    def of(cls, dtype: Any, op: str, size: int) -> Wide:
        """Return that of a reduction of arrays of `size` ranks."""
        wide, operation = wide_dtype(dtype, op), kernel_operation(name_of(dtype), op)
        is_mean = operation == "mean"
        finisher = ReduceOp(wide, operation, size) if is_mean else None
        return cls(WORKING[wide], ReduceOp(wide, "sum" if is_mean else operation), finisher)

    def combine(self, parts: Sequence[DeviceArray], target: DeviceArray) -> None:
        """Queue target = the first part (operation) the second ...; the target may be one of them."""
        if target.size:
            self.operation.combine(parts, target)

    def finish(self, part: DeviceArray) -> None:
        """Queue the division of a mean."""
        if self.finisher is not None and part.size:
            self.finisher.combine([part], part)
