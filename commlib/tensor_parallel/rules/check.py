"""Check: follow a model's values under a plan, step by step. [pure]"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from commlib.tensor_parallel.rules import keeping, layers, operations, shapes
from commlib.tensor_parallel.rules.broken import PlanError, counted
from commlib.tensor_parallel.rules.following import Doubt, Following
from commlib.tensor_parallel.states import CALLER, SHARED, State
from commlib.tensor_parallel.styles import Column, Replicate, Style, Vocabulary
from commlib.tensor_parallel.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class Checked:
    """The states of all values, and what could not be told: it may be right or not.

    came_in_parts: what the model was called with is divided already. sequences_came: it is so along a sequence. came:
    which dimensions these are of which arguments, by their places among the tensors that it was called with; none where
    some are divided in another way.
    """

    states: Mapping[int, State]
    doubts: tuple[Doubt, ...] = ()
    came_in_parts: bool = False
    sequences_came: bool = False
    came: Mapping[int, int] = field(default_factory=dict)


def check(trace: Trace, styles: Mapping[str, Style], *, divided_output: bool = False, size: int = 1) -> Checked:
    """Follow all values of a trace under a plan. Raises PlanError, a UsageError, for the first rule that is broken.

    divided_output: the caller goes on with this rank's part of what the model returns, or keeps, as it does where the
    model is one divided layer itself. size: of the axis, where that is known.
    """
    _check_tied(trace, styles)
    following, known = Following(trace, styles, size=size), -1
    while known < len(following.entered):  # where arguments are parts, what was made of them before is another one
        known, following = len(following.entered), following.again()
        for step in trace.steps:
            following.follow(step, _KINDS[step.kind](following, step))
    if not (divided_output or "" in styles):
        for value in trace.outputs:
            _returned(following, value)
        for value in trace.kept:
            keeping.kept(following, value)
    return Checked(
        following.states, tuple(following.doubts), following.came_in_parts, following.sequences_came, _came(following)
    )


def _came(following: Following) -> dict[int, int]:
    entered = following.entered
    if any(state.name != "sequence" for state in entered.values()):
        return {}
    given = [step.outputs[0] for step in following.trace.steps if step.kind == "given"]
    return {at: entered[value].dim for at, value in enumerate(given) if value in entered}


def _check_tied(trace: Trace, styles: Mapping[str, Style]) -> None:
    tables = {step.layer for step in trace.steps if step.kind == "table"}
    for names in trace.tied:
        if len({_way(styles.get(name), name in tables) for name in names}) > 1:
            said = ", ".join(f"{name}: {styles.get(name) or 'whole'}" for name in names)
            raise PlanError(Step(names[0], "weight", (), ()), "tied", f"these share one: {said}", "give them the same")


def _way(style: Style | None, is_table: bool) -> object:
    """Return what tied layers must have in common: rows of a table are the outputs of a linear layer."""
    if isinstance(style, Vocabulary) or (style == Column(gather=getattr(style, "gather", False)) and not is_table):
        return "rows"
    return None if isinstance(style, Replicate) else style


def _returned(following: Following, value: int) -> None:
    state, step = following.of(value), following.trace.maker(value)
    style = following.styles.get(state.by)
    if state.name == "partial":
        raise PlanError(step, "partial", f"the model returns it, {state}", "put it together first")
    if (state.name == "sequence" and following.sequences_came) or state.by == CALLER:
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


_KINDS: dict[str, Callable[[Following, Step], State | tuple[State, ...]]] = {
    "given": operations.given,
    "constant": operations.given,
    "weight": operations.given,
    "unseen": operations.given,
    "product": layers.product,
    "table": layers.table,
    "attention": layers.attention,
    "equation": operations.equation,
    "slice": operations.sliced,
    "reshape": shapes.reshape,
    "split": shapes.split,
    "piece": shapes.piece,
    "join": shapes.join,
    "unknown": operations.unknown,
    "number": operations.number,
    "penalty": operations.penalty,
    "shape": operations.shape,
    "gradient": operations.gradient,
}
