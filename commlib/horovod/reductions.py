"""Horovod's reduce operations, by its numbers, and what the core calls them."""

from __future__ import annotations

import enum
from typing import Any

from commlib.errors import UsageError


class ReduceOp(enum.IntEnum):
    """What a reduction does with the values of the ranks. Average divides by the number of ranks."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    @property
    def core(self) -> str:
        """The core's name of it."""
        return _CORE[self]


Average, Sum, Adasum, Min, Max, Product = ReduceOp

_CORE = dict(zip(ReduceOp, ("mean", "sum", "adasum", "min", "max", "prod"), strict=True))
_BY_NAME = {name: op for op, name in _CORE.items()}


def resolve_op(op: Any = None, average: bool | None = None, default: ReduceOp = ReduceOp.AVERAGE) -> ReduceOp:
    """Return the operation that `op` (a ReduceOp, its number, or a name of the core such as "mean") stands for.

    `average` is Horovod's older way to say Average or Sum. Raises UsageError if both are given, or neither is known.
    """
    if average is not None:
        if op is not None:
            raise UsageError("give op or average, not both: average=True is op=Average, average=False is op=Sum")
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    if op is None:
        return default
    try:
        return _BY_NAME[op] if isinstance(op, str) else ReduceOp(op)
    except (KeyError, ValueError):
        known = ", ".join(_BY_NAME)
        raise UsageError(f"op is {op!r}; expected Average, Sum, Adasum, Min, Max or Product, or {known}") from None


def reduction_name(op: Any) -> str:
    """Return "mean" or "sum" for what `op=` of an optimizer takes. Raises UsageError for others."""
    names = {Average: "mean", Sum: "sum"}
    try:
        return names[resolve_op(op)]
    except (KeyError, ValueError):
        raise UsageError(f"op must be one of {', '.join(names.values())}, got {op!r}") from None
