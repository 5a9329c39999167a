"""Wide accumulation: reduce data that crosses a network in a wider dtype if needed, and round once at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commlib.devices.array import DeviceArray
from commlib.dtypes import WORKING, kernel_operation, name_of
from commlib.execution.accumulation import wide_dtype
from commlib.execution.reduce_function import ReduceFunction


@dataclass(frozen=True, slots=True)
class WideAccumulation:
    """The dtype of partial results, the operation on them, and the final division of a mean."""

    dtype: Any
    operation: ReduceFunction
    finisher: ReduceFunction | None

    @classmethod
    def of(cls, dtype: Any, op: str, size: int) -> WideAccumulation:
        """Return the accumulation of a reduction over `size` ranks."""
        wide, operation = wide_dtype(dtype, op), kernel_operation(name_of(dtype), op)
        is_mean = operation == "mean"
        finisher = ReduceFunction(wide, operation, size) if is_mean else None
        return cls(WORKING[wide], ReduceFunction(wide, "sum" if is_mean else operation), finisher)

    def combine(self, parts: Sequence[DeviceArray], target: DeviceArray) -> None:
        """Queue target = parts[0] (operation) parts[1] ...; the target may be one of the parts."""
        if target.size:
            self.operation.combine(parts, target)

    def finish(self, part: DeviceArray) -> None:
        """Queue the division of a mean."""
        if self.finisher is not None and part.size:
            self.finisher.combine([part], part)
