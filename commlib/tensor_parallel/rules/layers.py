"""Layers: follow values through layers that a plan may divide. [pure]"""

from __future__ import annotations

from commlib.sharding.sharding import parts_of
from commlib.tensor_parallel.rules.broken import PlanError, counted, refuse_partial
from commlib.tensor_parallel.rules.following import Following
from commlib.tensor_parallel.states import CALLER, COMPUTED, SHARED, UNKNOWN, State
from commlib.tensor_parallel.styles import Column, Replicate, Row, Vocabulary
from commlib.tensor_parallel.trace import Step


def product(following: Following, step: Step) -> State:
    """Follow a layer that mixes all features."""
    value, style = step.inputs[0], following.styles.get(step.layer)
    state, dim = following.of(value), following.dim(step.dims[0], value)
    out = following.result_dim(step.dims[1], step)
    refuse_partial(step, state)
    if state == SHARED:
        raise counted(step, state)
    if isinstance(style, Row):
        return _row(following, step, style, state, dim)
    if not isinstance(style, Column | Vocabulary):
        if state.name == "features" and state.dim == dim:
            todo = f"give it Row(), or {state.by} gather=True"
            raise PlanError(step, "whole", f"its input is {state}", todo, state)
        if state.is_divided:
            came = f"its input is {state}, so each rank has a part of its weights' gradient"
            raise PlanError(step, "gradient", came, "give it a Column with sequence=, or gather before it", state)
        if state == UNKNOWN:
            return UNKNOWN
        return SHARED if isinstance(style, Replicate) and style.into_sharded else COMPUTED
    _enters(following, step, style.sequence, value)
    if style.gather:
        return COMPUTED
    parts = style.parts if isinstance(style, Column) else 1
    count = parts if isinstance(parts, int) else len(parts)
    units = style.units if isinstance(style, Column) and isinstance(style.units, int) else 0
    unit = step.size[1] // count // units if units and isinstance(parts, int) else 0
    fused = _fused(following, step, style, out) if isinstance(style, Column) and count > 1 else ()
    return State("features", out, step.layer, count, unit, units if count == 1 else 0, fused=fused)


def _fused(following: Following, step: Step, style: Column, out: int) -> tuple[tuple[int, int], ...]:
    """Return the length here, and the units, of each part of the outputs of a layer that has several.

    In a model that is divided these are a rank's: what has fewer units than there are ranks has one of them, and the
    others have their share of the rest. () where that is not known.
    """
    if not step.outputs:
        return ()
    lengths = parts_of(step.layer, style.parts, step.size[1])
    units = (style.units,) * len(lengths) if isinstance(style.units, int) else style.units
    if not following.trace.whole:
        shared = [style.shares and 0 < count < following.size for count in units]
        here = [length // count if one else 0 for one, length, count in zip(shared, lengths, units, strict=True)]
        left = following.shape(step.outputs[0])[out] - sum(here)
        rest = sum(length for one, length in zip(shared, lengths, strict=True) if not one)
        if any(not own and length * left % rest for own, length in zip(here, lengths, strict=True)):
            return ()
        lengths = tuple(own or length * left // rest for own, length in zip(here, lengths, strict=True))
    return tuple(zip(lengths, units, strict=True))


def _enters(following: Following, step: Step, sequence: int | None, value: int) -> None:
    """Check what goes into a layer that divides its outputs."""
    state = following.of(value)
    if sequence is not None:
        dim = following.dim(sequence, value)
        if (state.name == "sequence" and state.dim == dim) or state == UNKNOWN:
            return
        if state.name == "whole" and state.origin == "given":
            return following.came_divided(step, value, State("sequence", dim, CALLER))
        todo = (
            f"leave out sequence={sequence}, or let what comes before divide along {dim}; where the model is called "
            "with each rank's part of a sequence, let no layer or weight without a style come before this"
        )
        raise PlanError(step, "sequence", f"its input is {state}", todo, state)
    if state.name == "sequence":
        raise PlanError(step, "column", f"its input is {state}", f"give it sequence={state.dim}", state)
    if state.name == "features":
        todo = f"put a Row between {state.by} and this, or give {state.by} gather=True"
        raise PlanError(step, "column", f"its input is {state}", todo, state)


def _row(following: Following, step: Step, style: Row, state: State, dim: int) -> State:
    if state.name == "whole":
        came_from_caller = state.origin == "given" and not following.trace.whole
        if came_from_caller and not style.split:
            following.came_divided(step, step.inputs[0], State("features", dim, CALLER))
        if style.split or came_from_caller:
            return _left(following, step, style.sequence)
        raise PlanError(step, "row", "its input is whole", "give it split=True, or a Column before it", state)
    if state.is_divided:
        if style.split:
            raise PlanError(step, "row", f"it has split=True, and its input is {state}", "leave out split", state)
        if (state.name, state.dim) != ("features", dim):
            raise PlanError(step, "row", f"its input is {state}", f"divide dimension {dim} before it", state)
        if state.copies(following.size) > 1:
            todo = f"leave {state.by} whole, or use fewer ranks"
            raise PlanError(step, "heads", f"its input is {state}, of which ranks share parts", todo, state)
        if state.parts > 1:
            todo = "split them before it, or give the Column one part"
            raise PlanError(step, "parts", f"its input has {state.parts} of them still, {state}", todo, state)
    return _left(following, step, style.sequence)


def _left(following: Following, step: Step, sequence: int | None) -> State:
    """Return the state of what was added up."""
    if sequence is None:
        return COMPUTED
    return State("sequence", following.result_dim(sequence, step), step.layer)


def table(following: Following, step: Step) -> State:
    """Follow a layer that looks rows up."""
    state, style = following.of(step.inputs[0]), following.styles.get(step.layer)
    refuse_partial(step, state)
    if isinstance(style, Column) and style.sequence is not None:
        _enters(following, step, style.sequence, step.inputs[0])
    elif state.is_divided:
        came = f"its input is {state}, so each rank has a part of its weights' gradient"
        raise PlanError(step, "gradient", came, "look rows up before what divides them", state)
    if isinstance(style, Vocabulary):
        return _left(following, step, style.sequence)
    if isinstance(style, Column) and not style.gather:
        return State("features", following.result_dim(-1, step), step.layer)
    return SHARED if isinstance(style, Replicate) and style.into_sharded else COMPUTED


def attention(following: Following, step: Step) -> State:
    """Follow a layer that is a whole attention."""
    style = following.styles.get(step.layer)
    for value in step.inputs:
        state = following.of(value)
        refuse_partial(step, state)
        if state == SHARED:
            raise counted(step, state)
        if isinstance(style, Column):
            _enters(following, step, style.sequence, value)
        elif state.is_divided:
            todo = "divide its heads by a Column, or gather before it"
            raise PlanError(step, "whole", f"an input is {state}", todo, state)
    if isinstance(style, Column):
        return _left(following, step, style.sequence)
    return UNKNOWN if any(following.of(value) == UNKNOWN for value in step.inputs) else COMPUTED
