"""Check: follow a model's values under a plan, step by step. [pure]"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from commlib.tensor.rules import layers, operations, shapes
from commlib.tensor.rules.broken import PlanError, counted
from commlib.tensor.rules.following import Following
from commlib.tensor.states import SHARED, State
from commlib.tensor.styles import Replicate, Style, Vocabulary
from commlib.tensor.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class Checked:
    """The states of all values, and what could not be told (in words): it may be right or not."""

    states: Mapping[int, State]
    doubts: tuple[str, ...] = ()


def check(trace: Trace, styles: Mapping[str, Style], *, divided_output: bool = False) -> Checked:
    """Follow all values of a trace under a plan. Raises PlanError, a UsageError, for the first rule that is broken.

    divided_output: the caller goes on with this rank's part of what the model returns, as it does where the model is
    one divided layer itself.
    """
    following = Following(trace, styles)
    for names in trace.tied:
        given = {name: styles.get(name) for name in names}
        if len({_way(style) for style in given.values()}) > 1:
            said = ", ".join(f"{name}: {style or 'whole'}" for name, style in given.items())
            raise PlanError(Step(names[0], "weight", (), ()), "tied", f"these share one: {said}", "give them the same")
    for step in trace.steps:
        result = _KINDS[step.kind](following, step)
        for value in step.outputs:
            following.states[value] = result
    for value in () if divided_output or "" in styles else trace.outputs:
        _returned(following, value)
    return Checked(following.states, tuple(following.doubts))


def _way(style: Style | None) -> object:
    """Return what tied layers must have in common."""
    return type(style) if isinstance(style, Vocabulary) else None if isinstance(style, Replicate) else style


def _returned(following: Following, value: int) -> None:
    state, step = following.of(value), following.trace.maker(value)
    style = following.styles.get(state.by)
    if state.name == "partial":
        raise PlanError(step, "partial", f"the model returns it, {state}", "put it together first")
    if state.name == "sequence" and following.sequences_came:
        return
    if state.is_divided and not isinstance(style, Vocabulary):
        todo = (
            f"let {state.by} or the last Row give what is whole, without sequence="
            if state.name == "sequence"
            else f"give {state.by} gather=True, or a Row after it"
        )
        raise PlanError(step, "output", f"it is {state}", f"{todo}; or say divided_output=True", state)
    if state == SHARED:
        raise counted(step, state)


_KINDS: dict[str, Callable[[Following, Step], State]] = {
    "given": operations.given,
    "constant": operations.given,
    "weight": operations.given,
    "unseen": operations.given,
    "product": layers.product,
    "table": layers.table,
    "attention": layers.attention,
    "equation": operations.equation,
    "reshape": shapes.reshape,
    "split": shapes.split,
    "join": shapes.join,
    "unknown": operations.unknown,
}
