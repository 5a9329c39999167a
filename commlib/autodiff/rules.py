"""Rules: the verb that each verb runs on gradients in its backward, for all frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from commlib.errors import UsageError


@dataclass(frozen=True, slots=True)
class Rule:
    """The backward of a verb: a verb, the operation of a reduction, and a factor of size ** power on its result.

    reverse: the ranks of the verb have the reverse order.
    """

    verb: str
    op: str = ""
    power: int = 0
    reverse: bool = False

    def factor(self, size: int) -> float:
        """Return the factor on the result in a group of `size` ranks."""
        return float(size) ** self.power


Rules = Mapping[tuple[str, str], Rule]
"""Rules by (verb, operation of a reduction or "")."""

TRANSPOSED: Rules = MappingProxyType({
    ("all_reduce", "sum"): Rule("all_reduce", "sum"),
    ("all_reduce", "mean"): Rule("all_reduce", "mean"),
    ("reduce_scatter", "sum"): Rule("all_gather"),
    ("reduce_scatter", "mean"): Rule("all_gather", power=-1),
    ("reduce_scatter_v", "sum"): Rule("all_gather"),
    ("reduce_scatter_v", "mean"): Rule("all_gather", power=-1),
    ("all_gather", ""): Rule("reduce_scatter", "sum"),
    ("all_gather_v", ""): Rule("reduce_scatter_v", "sum"),
    ("scan", "sum"): Rule("scan", "sum", reverse=True),
    ("exscan", "sum"): Rule("exscan", "sum", reverse=True),
    ("reduce", "sum"): Rule("broadcast"),
    ("reduce", "mean"): Rule("broadcast", power=-1),
    ("broadcast", ""): Rule("reduce", "sum"),
    ("gather", ""): Rule("scatter"),
    ("scatter", ""): Rule("gather"),
    ("all_to_all", ""): Rule("all_to_all"),
    ("all_to_all_v", ""): Rule("all_to_all_v"),
    ("send", ""): Rule("recv"),
    ("recv", ""): Rule("send"),
    ("send_recv", ""): Rule("send_recv"),
})  # fmt: skip

HOROVOD: Rules = MappingProxyType({
    **TRANSPOSED,
    ("reduce_scatter", "sum"): Rule("all_gather", power=1),
    ("reduce_scatter", "mean"): Rule("all_gather"),
    ("reduce_scatter_v", "sum"): Rule("all_gather", power=1),
    ("reduce_scatter_v", "mean"): Rule("all_gather"),
    ("all_gather", ""): Rule("reduce_scatter", "mean"),
    ("all_gather_v", ""): Rule("reduce_scatter_v", "mean"),
    ("broadcast", ""): Rule("reduce", "mean"),
})  # fmt: skip
"""Gathers and broadcasts average gradients over ranks; a reduce_scatter multiplies them by the number of ranks."""

_REDUCTIONS = frozenset(verb for verb, op in TRANSPOSED if op)


def find_rule(verb: str, op: str = "sum", rules: Rules = TRANSPOSED) -> Rule:
    """Return the rule of a verb. Raises UsageError if it has none: min, max and prod are not linear."""
    rule = rules.get((verb, op if verb in _REDUCTIONS else ""))
    if rule is None:
        linear = " and ".join(known for name, known in TRANSPOSED if name == verb and known)
        why = (
            f"with op {op!r} has no backward: only {linear} {'have' if ' and ' in linear else 'has'} one"
            if linear
            else "has no backward"
        )
        raise UsageError(f"{verb} {why}")
    return rule
