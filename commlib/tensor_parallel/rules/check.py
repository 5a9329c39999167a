"""Plan check: follow a model's values under a plan, step by step. [pure]"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from commlib.tensor_parallel.placements import CALLER, SHARED, Placement
from commlib.tensor_parallel.rules import layers, operations, retained_values, shapes
from commlib.tensor_parallel.rules.plan_error import PlanError, count_error
from commlib.tensor_parallel.rules.value_tracker import Doubt, ValueTracker
from commlib.tensor_parallel.styles import Column, Replicate, Style, Vocabulary
from commlib.tensor_parallel.trace import ModelTrace, TraceStep


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """The placements of all values, and open doubts about steps that may be right or wrong.

    inputs_sharded: whether inputs of the model are sharded already. sequences_sharded: whether they are so along a
    sequence. sharded_dims: the sharded dimensions of such arguments, by index among the model's tensor arguments; empty
    if some are sharded in another way.
    """

    states: Mapping[int, Placement]
    doubts: tuple[Doubt, ...] = ()
    inputs_sharded: bool = False
    sequences_sharded: bool = False
    sharded_dims: Mapping[int, int] = field(default_factory=dict)


def check(
    trace: ModelTrace, styles: Mapping[str, Style], *, divided_output: bool = False, size: int = 1
) -> CheckedPlan:
    """Follow all values of a trace under a plan. Raises PlanError, a UsageError, for the first broken rule.

    divided_output: the caller uses this rank's shard of the returned or kept values, as for a model that is itself one
    sharded layer. size: of the axis, if it is known.
    """
    _check_tied(trace, styles)
    following, known = ValueTracker(trace, styles, size=size), -1
    while known < len(following.entered):  # if arguments are shards, earlier values made of them have other placements
        known, following = len(following.entered), following.again()
        for step in trace.steps:
            following.follow(step, _KINDS[step.kind](following, step))
    if not (divided_output or "" in styles):
        for value in trace.outputs:
            _check_returned(following, value)
        for value in trace.retained:
            retained_values.check_retained(following, value)
    return CheckedPlan(
        following.states,
        tuple(following.doubts),
        following.inputs_sharded,
        following.sequences_sharded,
        _sharded_arguments(following),
    )


def _sharded_arguments(following: ValueTracker) -> dict[int, int]:
    entered = following.entered
    if any(state.name != "sequence" for state in entered.values()):
        return {}
    arguments = [step.outputs[0] for step in following.trace.steps if step.kind == "given"]
    return {at: entered[value].dim for at, value in enumerate(arguments) if value in entered}


def _check_tied(trace: ModelTrace, styles: Mapping[str, Style]) -> None:
    tables = {step.layer for step in trace.steps if step.kind == "table"}
    for names in trace.tied:
        if len({_tying_key(styles.get(name), name in tables) for name in names}) > 1:
            text = ", ".join(f"{name}: {styles.get(name) or 'unsharded'}" for name in names)
            raise PlanError(
                TraceStep(names[0], "weight", (), ()), "tied", f"they share it: {text}", "give them one style"
            )


def _tying_key(style: Style | None, is_table: bool) -> object:
    """Return the property that tied layers must share: rows of a table are the outputs of a linear layer."""
    if isinstance(style, Vocabulary) or (style == Column(gather=getattr(style, "gather", False)) and not is_table):
        return "rows"
    return None if isinstance(style, Replicate) else style


def _check_returned(following: ValueTracker, value: int) -> None:
    state, step = following.of(value), following.trace.maker(value)
    style = following.styles.get(state.by)
    if state.name == "partial":
        raise PlanError(step, "partial", f"the model returns it, {state}", "sum or gather it first")
    if (state.name == "sequence" and following.sequences_sharded) or state.by == CALLER:
        return
    if state.is_divided and not isinstance(style, Vocabulary):
        todo = (
            f"let {state.by} or the last Row return an unsharded value, without sequence="
            if state.name == "sequence"
            else f"set gather=True for {state.by}, or add a Row after it"
        )
        raise PlanError(step, "output", f"it is {state}", f"{todo}; or pass divided_output=True", state)
    if state == SHARED:
        raise count_error(step, state)


_KINDS: dict[str, Callable[[ValueTracker, TraceStep], Placement | tuple[Placement, ...]]] = {
    "given": operations.follow_given,
    "constant": operations.follow_given,
    "weight": operations.follow_given,
    "unseen": operations.follow_given,
    "product": layers.product,
    "table": layers.table,
    "attention": layers.attention,
    "equation": operations.equation,
    "slice": operations.follow_slice,
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
