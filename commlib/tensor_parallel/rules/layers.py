"""Layer rules: follow values through layers that a plan may shard. [pure]"""

from __future__ import annotations

from commlib.sharding.sharding import parts_of
from commlib.tensor_parallel.placements import CALLER, COMPUTED, SHARED, UNKNOWN, Placement
from commlib.tensor_parallel.rules.plan_error import PlanError, count_error, refuse_partial
from commlib.tensor_parallel.rules.value_tracker import ValueTracker
from commlib.tensor_parallel.styles import Column, Replicate, Row, Vocabulary
from commlib.tensor_parallel.trace import TraceStep


def product(following: ValueTracker, step: TraceStep) -> Placement:
    """Follow a layer that mixes all features."""
    value, style = step.inputs[0], following.styles.get(step.layer)
    state, dim = following.of(value), following.dim(step.dims[0], value)
    out = following.result_dim(step.dims[1], step)
    refuse_partial(step, state)
    if state == SHARED:
        raise count_error(step, state)
    if isinstance(style, Row):
        return _row(following, step, style, state, dim)
    if not isinstance(style, Column | Vocabulary):
        if state.name == "features" and state.dim == dim:
            todo = f"give it Row(), or set gather=True for {state.by}"
            raise PlanError(step, "whole", f"its input is {state}", todo, state)
        if state.is_divided:
            actual = f"its input is {state}, so each rank has a partial gradient of its weights"
            raise PlanError(step, "gradient", actual, "give it a Column with sequence=, or gather before it", state)
        if state == UNKNOWN:
            return UNKNOWN
        return SHARED if isinstance(style, Replicate) and style.into_sharded else COMPUTED
    _check_input(following, step, style.sequence, value)
    if style.gather:
        return COMPUTED
    parts = style.parts if isinstance(style, Column) else 1
    count = parts if isinstance(parts, int) else len(parts)
    units = style.units if isinstance(style, Column) and isinstance(style.units, int) else 0
    unit = step.size[1] // count // units if units and isinstance(parts, int) else 0
    fused = _fused_parts(following, step, style, out) if isinstance(style, Column) and count > 1 else ()
    return Placement("features", out, step.layer, count, unit, units if count == 1 else 0, fused=fused)


def _fused_parts(following: ValueTracker, step: TraceStep, style: Column, out: int) -> tuple[tuple[int, int], ...]:
    """Return the length on this rank, and the units, of each part of a layer's fused outputs.

    In a sharded model, a part with fewer units than ranks has one unit on each rank, and the other parts share the
    remaining length. () if unknown.
    """
    if not step.outputs:
        return ()
    lengths = parts_of(step.layer, style.parts, step.size[1])
    units = (style.units,) * len(lengths) if isinstance(style.units, int) else style.units
    if not following.trace.whole:
        shared = [style.shares and 0 < count < following.size for count in units]
        here = [length // count if one else 0 for one, length, count in zip(shared, lengths, units, strict=True)]
        remaining = following.shape(step.outputs[0])[out] - sum(here)
        rest = sum(length for one, length in zip(shared, lengths, strict=True) if not one)
        if any(not own and length * remaining % rest for own, length in zip(here, lengths, strict=True)):
            return ()
        lengths = tuple(own or length * remaining // rest for own, length in zip(here, lengths, strict=True))
    return tuple(zip(lengths, units, strict=True))


def _check_input(following: ValueTracker, step: TraceStep, sequence: int | None, value: int) -> None:
    """Check the input of a layer that shards its outputs."""
    state = following.of(value)
    if sequence is not None:
        dim = following.dim(sequence, value)
        if (state.name == "sequence" and state.dim == dim) or state == UNKNOWN:
            return
        if state.name == "whole" and state.origin == "given":
            return following.mark_sharded(step, value, Placement("sequence", dim, CALLER))
        todo = (
            f"remove sequence={sequence}, or let earlier layers shard along {dim}. If the model is called "
            "with each rank's part of a sequence, every earlier layer and weight needs a style"
        )
        raise PlanError(step, "sequence", f"its input is {state}", todo, state)
    if state.name == "sequence":
        raise PlanError(step, "column", f"its input is {state}", f"give it sequence={state.dim}", state)
    if state.name == "features":
        todo = f"put a Row between {state.by} and this, or set gather=True for {state.by}"
        raise PlanError(step, "column", f"its input is {state}", todo, state)


def _row(following: ValueTracker, step: TraceStep, style: Row, state: Placement, dim: int) -> Placement:
    if state.name == "whole":
        is_from_caller = state.origin == "given" and not following.trace.whole
        if is_from_caller and not style.split:
            following.mark_sharded(step, step.inputs[0], Placement("features", dim, CALLER))
        if style.split or is_from_caller:
            return _summed_state(following, step, style.sequence)
        raise PlanError(step, "row", "its input is unsharded", "give it split=True, or a Column before it", state)
    if state.is_divided:
        if style.split:
            raise PlanError(step, "row", f"it has split=True, and its input is {state}", "remove split", state)
        if (state.name, state.dim) != ("features", dim):
            raise PlanError(step, "row", f"its input is {state}", f"shard dimension {dim} before it", state)
        if state.copies(following.size) > 1:
            todo = f"do not shard {state.by}, or use fewer ranks"
            raise PlanError(step, "heads", f"its input is {state}, with parts that ranks share", todo, state)
        if state.parts > 1:
            todo = "split them before it, or give the Column one part"
            raise PlanError(step, "parts", f"its input has {state.parts} of them still, {state}", todo, state)
    return _summed_state(following, step, style.sequence)


def _summed_state(following: ValueTracker, step: TraceStep, sequence: int | None) -> Placement:
    """Return the placement of a sum over ranks."""
    if sequence is None:
        return COMPUTED
    return Placement("sequence", following.result_dim(sequence, step), step.layer)


def table(following: ValueTracker, step: TraceStep) -> Placement:
    """Follow a layer that looks up rows."""
    state, style = following.of(step.inputs[0]), following.styles.get(step.layer)
    refuse_partial(step, state)
    if isinstance(style, Column) and style.sequence is not None:
        _check_input(following, step, style.sequence, step.inputs[0])
    elif state.is_divided:
        actual = f"its input is {state}, so each rank has a partial gradient of its weights"
        raise PlanError(step, "gradient", actual, "look up rows before they are sharded", state)
    if isinstance(style, Vocabulary):
        return _summed_state(following, step, style.sequence)
    if isinstance(style, Column) and not style.gather:
        return Placement("features", following.result_dim(-1, step), step.layer)
    return SHARED if isinstance(style, Replicate) and style.into_sharded else COMPUTED


def attention(following: ValueTracker, step: TraceStep) -> Placement:
    """Follow a layer that is a complete attention."""
    style = following.styles.get(step.layer)
    for value in step.inputs:
        state = following.of(value)
        refuse_partial(step, state)
        if state == SHARED:
            raise count_error(step, state)
        if isinstance(style, Column):
            _check_input(following, step, style.sequence, value)
        elif state.is_divided:
            todo = "shard its heads with a Column, or gather before it"
            raise PlanError(step, "whole", f"an input is {state}", todo, state)
    if isinstance(style, Column):
        return _summed_state(following, step, style.sequence)
    return UNKNOWN if any(following.of(value) == UNKNOWN for value in step.inputs) else COMPUTED
