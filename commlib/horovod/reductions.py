"""Reductions: translate Horovod's reduce operations, numbered as in Horovod, into the core's."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from commlib.arguments import nearest
from commlib.autodiff import HOROVOD, find_rule
from commlib.errors import UsageError
from commlib.horovod.process_sets import ProcessSet, process_set_of


class ReduceOp(enum.IntEnum):
    """The operation of a reduction. Average divides by the number of ranks."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5

    @property
    def core(self) -> str:
        """The core's name of the operation."""
        return _CORE[self]


Average, Sum, Adasum, Min, Max, Product = ReduceOp

OpName = Literal["mean", "sum", "adasum", "min", "max", "prod"]
"""Their names in commlib."""

OptimizerOpName = Literal["mean", "sum", "adasum"]
"""The names of those that combine gradients or steps."""

_CORE = dict(zip(ReduceOp, ("mean", "sum", "adasum", "min", "max", "prod"), strict=True))
_BY_NAME = {name: op for op, name in _CORE.items()}


def resolve_op(op: Any = None, average: bool | None = None, default: ReduceOp = ReduceOp.AVERAGE) -> ReduceOp:
    """Return the operation of `op` (a ReduceOp, its number, or a name of the core such as "mean").

    `average` is Horovod's older form of Average or Sum. Raises UsageError if both are given, or if `op` is unknown.
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
        raise UsageError(
            f"op is {op!r}; expected Average, Sum, Adasum, Min, Max or Product, or {known}{_suggest(op, ReduceOp)}"
        ) from None


def reduction_name(op: Any, *, adasum: bool = False) -> str:
    """Return "mean" or "sum" for the `op=` of an optimizer. Raises UsageError for others.

    adasum: whether the optimizer accepts "adasum", too, which its caller handles.
    """
    names = {Average: "mean", Sum: "sum"}
    try:
        return names[resolve_op(op)]
    except (KeyError, ValueError):
        known = [*names, Adasum] if adasum else [*names]
        listed = ", ".join(each.core for each in known)
        raise UsageError(f"op must be one of {listed}, got {op!r}{_suggest(op, known)}") from None


def _suggest(op: Any, known: Iterable[ReduceOp]) -> str:
    """Return the end of an error's text: the name for `op`, text that is like one of commlib's or Horovod's names."""
    names = {name: each.core for each in known for name in (each.core, each.name)}
    near = names.get(nearest(op, names)) if isinstance(op, str) else None
    return f"; did you mean {near!r}?" if near else ""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction: operation, name, factors and process set. None as `process_set` means all ranks."""

    op: ReduceOp
    name: str | None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: ProcessSet | None = None

    @classmethod
    def of(
        cls,
        op: Any,
        average: bool | None,
        name: str | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet | None,
    ) -> Reduction:
        """Return the reduction for the arguments of a verb; `average` is the old form of `op`."""
        return cls(resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)

    @classmethod
    def of_gradients(cls, verb: str, name: str | None, process_set: ProcessSet | None) -> Reduction:
        """Return the reduction of gradients in the backward of `verb`, a gather or a broadcast of the core."""
        return cls(resolve_op(find_rule(verb, rules=HOROVOD).op), name, process_set=process_set)

    def options(self) -> dict[str, Any]:
        """Return the arguments of `start_allreduce` and `start_reducescatter`."""
        return {
            "name": self.name,
            "op": self.op,
            "prescale_factor": self.prescale_factor,
            "postscale_factor": self.postscale_factor,
            "process_set": self.process_set,
        }

    def called(self, name: str | None) -> Reduction:
        """Return the same reduction under another name."""
        return replace(self, name=name)

    def check_linear(self, call: str) -> None:
        """Raise UsageError unless the operation has a gradient; `call` names the verb and the operation."""
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise UsageError(f"{call} has no gradient: only Average and Sum have one")

    @property
    def gathered_factor(self) -> float:
        """The factor by which backward of a reducescatter multiplies the gathered gradients."""
        factor = find_rule("reduce_scatter", self.op.core, HOROVOD).factor(process_set_of(self.process_set).size() or 1)
        return self.prescale_factor * self.postscale_factor * factor
