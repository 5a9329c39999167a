"""Pairs: the styles of layers whose features reach one other layer, as the operations between them ask for. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from commlib.tensor.rules import PlanError, check
from commlib.tensor.states import SETTLED, State
from commlib.tensor.styles import Column, Replicate, Row, Sequence, Style
from commlib.tensor.trace import Step, Trace

_OUTSIDE = ("given", "constant", "weight")


class NotPossible(Exception):
    """The reason why a pair stays whole."""


def divided_pair(trace: Trace, size: int, firsts: list[str], last: str) -> dict[str, Style]:
    """Return styles for the layers `firsts`, for `last`, and for norms and dropout between them.

    The rules are asked, and what they refuse is mended where the trace shows how: fused features that are split into
    parts, heads of keys and values that all queries share, dropout of what is divided. Raises PlanError for what they
    refuse after that, and NotPossible where there are too few heads, or numbers in reshapes that fit the whole alone.
    """
    part = _between(trace, {*firsts, last})
    styles: dict[str, Style] = {**dict.fromkeys(firsts, Column()), last: Row()}
    for _ in part.steps:
        try:
            states = check(part, styles).states
            break
        except PlanError as error:
            changes = _mended(part, styles, firsts, error)
            if not changes:
                raise
            styles |= changes
    _refuse_numbers(part, states)
    heads = {name: _heads(part, states, name) for name in firsts}
    units = gcd(*heads.values())
    if units and units < size:
        raise NotPossible(f"{units} heads for {size} ranks")
    for name, style in styles.items():
        if isinstance(style, Column):
            _refuse_few(_call(part, name), style, units, size)
            styles[name] = Column(style.parts, units)
    return styles | {last: Row(units=units)}


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


def _between(trace: Trace, names: set[str]) -> Trace:
    """Return the steps from the first to the last call of some layers. What they take from before is whole."""
    calls = [at for at, step in enumerate(trace.steps) if step.kind == "product" and step.layer in names]
    steps = trace.steps[calls[0] : calls[-1] + 1]
    outside = [step for step in trace.steps[: calls[0]] if step.kind in _OUTSIDE]
    known = {value for step in (*outside, *steps) for value in step.outputs}
    before = tuple(dict.fromkeys(value for step in steps for value in step.inputs if value not in known))
    weight = -1  # so that what comes from before has gradients
    source = (Step("", "weight", (), (weight,)), Step("", "unknown", (weight,), before))
    return Trace((*source, *outside, *steps), trace.shapes, ())


def _call(part: Trace, name: str) -> Step:
    return next(step for step in part.steps if step.layer == name and step.kind == "product")


def _heads(part: Trace, states: Mapping[int, State], name: str) -> int:
    """Return how many heads the features of a layer become; 0 if they become none."""
    for step in part.steps:
        if step.kind == "reshape":
            before, after = states[step.inputs[0]], states[step.outputs[0]]
            if before.by == after.by == name and before.unit != SETTLED and after.unit == SETTLED:
                return part.shapes[step.outputs[0]][after.dim]
    return 0


def _refuse_numbers(part: Trace, states: Mapping[int, State]) -> None:
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
