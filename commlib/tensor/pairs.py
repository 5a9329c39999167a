"""Pairs: the styles of layers whose features reach one other layer, as the operations between them ask for. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from commlib.tensor.rules import PlanError, check
from commlib.tensor.states import SETTLED, State
from commlib.tensor.styles import Column, Replicate, Row, Sequence, Style
from commlib.tensor.trace import Step, Trace

_OUTSIDE = ("given", "constant", "weight")

States = Mapping[int, State]
"""The states of values, by their numbers."""


class NotPossible(Exception):
    """The reason why a pair stays whole."""


def divided_pair(trace: Trace, undivided: States, size: int, firsts: list[str], last: str) -> dict[str, Style]:
    """Return styles for the layers `firsts`, for `last`, and for norms and dropout between them.

    undivided: the states of all values where no layer is divided.

    The rules are asked, and what they refuse is mended where the trace shows how: fused features that are split into
    parts, heads of keys and values that all queries share, dropout of what is divided. Raises PlanError for what they
    refuse after that, and NotPossible where there are too few heads, or numbers in reshapes that fit the whole alone.
    """
    part = _between(trace, undivided, {*firsts, last})
    styles, states = _accepted(part, {**dict.fromkeys(firsts, Column()), last: Row()}, firsts)
    heads = {name: _heads(part, states, name) for name in firsts}
    one = [name for name in firsts if heads[name] == 1]
    if one and max(heads.values()) >= size:  # it serves the queries of all ranks
        styles, states = _accepted(part, styles | dict.fromkeys(one, Replicate(into_sharded=True)), firsts)
        heads = {name: count for name, count in heads.items() if count != 1}
    _refuse_numbers(part, states)
    units = gcd(*heads.values())
    if units and units < size:
        raise NotPossible(f"{units} heads for {size} ranks")
    for name, style in styles.items():
        if isinstance(style, Column):
            _refuse_few(_call(part, name), style, units, size)
            styles[name] = Column(style.parts, units)
    return styles | {last: Row(units=units)}


def _accepted(part: Trace, styles: dict[str, Style], firsts: list[str]) -> tuple[dict[str, Style], States]:
    """Return styles that the rules accept, and the states of values with them. Raises PlanError if there are none."""
    for _ in part.steps:
        try:
            return styles, check(part, styles).states
        except PlanError as error:
            changes = _mended(part, styles, firsts, error)
            if not changes:
                raise
            styles = styles | changes
    return styles, check(part, styles).states


def _mended(part: Trace, styles: Mapping[str, Style], firsts: list[str], error: PlanError) -> dict[str, Style]:
    """Return other styles after the rules have refused some; none if there is nothing to be done."""
    step, state = error.step, error.state
    first = styles.get(state.by)
    if step.layer and step.layer not in styles and (step.weights or step.draws):
        return {step.layer: Sequence(state.dim)}
    if isinstance(first, Column) and first.parts == 1:
        if error.rule == "parts" and step.kind == "split":
            lengths = tuple(part.shapes[value][step.dim] for value in step.outputs)
            fused = len(part.shapes[step.outputs[0]]) == len(part.shapes[step.inputs[0]])
            return {state.by: Column(lengths if fused and len(set(lengths)) > 1 else len(lengths))}
        if error.rule == "needs":  # picks from fused features that have a dimension of their own
            return {state.by: Column(part.shapes[step.inputs[0]][state.dim])}
    if error.rule == "meet":
        widths = {name: _call(part, name).size[1] for name in firsts if isinstance(styles[name], Column)}
        return {name: Replicate(into_sharded=True) for name, width in widths.items() if width < max(widths.values())}
    return {}


def _between(trace: Trace, undivided: States, names: set[str]) -> Trace:
    """Return the steps from the first to the last call of some layers. What they take from before is whole.

    It has gradients but where all that it is made of has none, as angles of positions.
    """
    calls = [at for at, step in enumerate(trace.steps) if step.kind == "product" and step.layer in names]
    steps = trace.steps[calls[0] : calls[-1] + 1]
    outside = [step for step in trace.steps[: calls[0]] if step.kind in _OUTSIDE]
    known = {value for step in (*outside, *steps) for value in step.outputs}
    before = tuple(dict.fromkeys(value for step in steps for value in step.inputs if value not in known))
    weight = -1
    sources = [Step("", "weight", (), (weight,))]
    for value in before:
        origin = undivided[value].origin
        has_none = origin in ("given", "constant")
        sources.append(Step("", origin, (), (value,)) if has_none else Step("", "unknown", (weight,), (value,)))
    return Trace((*sources, *outside, *steps), trace.shapes, (), discrete=trace.discrete)


def _call(part: Trace, name: str) -> Step:
    return next(step for step in part.steps if step.layer == name and step.kind == "product")


def _heads(part: Trace, states: States, name: str) -> int:
    """Return how many heads the features of a layer become; 0 if they become none."""
    for step in part.steps:
        if step.kind == "reshape":
            before, after = states[step.inputs[0]], states[step.outputs[0]]
            if before.by == after.by == name and before.unit != SETTLED and after.unit == SETTLED:
                return part.shapes[step.outputs[0]][after.dim]
    return 0


def _refuse_numbers(part: Trace, states: States) -> None:
    """Raise NotPossible if the model says how long a dimension is that will be shorter."""
    for step in part.steps:
        if not step.asked or not states[step.inputs[0]].is_divided:
            continue
        after = states[step.outputs[0]]
        if step.kind == "reshape" and after.is_divided and step.asked[after.dim] != -1:
            raise NotPossible(
                f"{step.where} asks for the shape {list(step.asked)}: let it say -1 for dimension {after.dim}, of "
                f"which a rank has less than {step.asked[after.dim]}"
            )
        if step.kind == "split" and step.dim % len(part.shapes[step.inputs[0]]) == states[step.inputs[0]].dim:
            raise NotPossible(f"{step.where} splits features into {list(step.asked)}: let it say how many pieces")


def _refuse_few(step: Step, style: Column, units: int, size: int) -> None:
    parts = (step.size[1] // style.parts,) * style.parts if isinstance(style.parts, int) else style.parts
    if min(parts) < size:
        raise NotPossible(f"{min(parts)} features for {size} ranks")
    if units and any(part % units for part in parts):
        raise NotPossible(f"features {list(parts)} of {step.layer} are not {units} equal heads")
