"""Shape rules: follow values through reshapes, splits and joins. [pure]"""

from __future__ import annotations

from itertools import accumulate, pairwise

from commlib.tensor_parallel.placements import UNKNOWN, Placement, reshape_placement
from commlib.tensor_parallel.rules.operations import equation, place_unsharded, refuse_unlike
from commlib.tensor_parallel.rules.plan_error import PlanError
from commlib.tensor_parallel.rules.value_tracker import Doubt, ValueTracker
from commlib.tensor_parallel.trace import TraceStep

_OWN_PIECES = "each rank splits its shard into pieces, and its input is {}"


def reshape(following: ValueTracker, step: TraceStep) -> Placement:
    """Follow the same elements into another shape."""
    state = following.of(step.inputs[0])
    if not state.is_divided:
        return place_unsharded([state])
    old = following.shape(step.inputs[0])
    if not step.outputs:
        actual = f"{list(old)}, {state}, cannot become {list(step.requested)} on this rank"
        raise PlanError(step, "shape", actual, "use -1 in the model, or give its number PerRank() in the plan", state)
    new = following.shape(step.outputs[0])
    placement = reshape_placement(state, old, new, step.requested)
    if placement is None:
        actual = f"its input has {state.parts} parts, {state}, and is reshaped to {list(new)}"
        todo = f"make them a dimension of {state.parts}, chunk them, or describe the fused parts with Column(parts=)"
        raise PlanError(step, "parts", actual, todo, state)
    if placement.is_divided and new[placement.dim] < old[state.dim] and not following.trace.whole and state.parts == 1:
        _check_heads(following, step, state, old[state.dim], new[placement.dim], placement.dim)
    return placement


def _check_heads(following: ValueTracker, step: TraceStep, state: Placement, length: int, count: int, dim: int) -> None:
    """Check that heads on one rank, along `dim`, are heads of the full layer: with -1 their number is the rank's."""
    inner = length // max(1, count)
    if state.unit > 0 and inner % state.unit and state.unit % inner:
        actual = f"{state.by} has units of {state.unit} features, and {length} of them become {count} of {inner}"
        raise PlanError(step, "heads", actual, "use -1 for the number of heads in the model's reshape", state)
    after = step.requested[dim] if dim < len(step.requested) else 0
    if after != -1 and (state.unit == 0 or (state.unit > 0 and inner % state.unit)):
        why = (
            f"{length} features of {state.by} become {count} of {inner} on this rank. If the model uses a fixed "
            "number of heads, these are not heads of the full layer: pass verify= or example=, or Column(units=)"
        )
        following.doubts.append(Doubt(step, state, why))


def split(following: ValueTracker, step: TraceStep) -> Placement | tuple[Placement, ...]:
    """Follow a value that is split into pieces."""
    state, value = following.of(step.inputs[0]), step.inputs[0]
    if not state.is_divided or not step.outputs:
        return place_unsharded([state])
    dim = following.dim(step.dim, value)
    dropped = len(following.shape(step.outputs[0])) < len(following.shape(value))
    if dim != state.dim:
        return state.at(state.dim - 1) if dropped and dim < state.dim else state
    if state.name == "features" and state.parts == len(step.outputs) and not dropped:
        lengths = [following.shape(piece)[dim] for piece in step.outputs]
        if following.trace.whole and state.fused and lengths != (own := [length for length, _ in state.fused]):
            actual = f"{state.by} has parts of {own}, and its features become {lengths}"
            raise PlanError(step, "parts", actual, f"give it Column(parts={tuple(lengths)})", state)
        return tuple(state.part(place, dim) for place in range(state.parts))
    if state.name == "sequence":
        following.doubt(step, _OWN_PIECES)
        return UNKNOWN
    actual = f"{state.by} has {state.parts} part{'s' * (state.parts > 1)}, and its features become {len(step.outputs)}"
    todo = f"give it Column(parts={len(step.outputs)})"
    raise PlanError(step, "parts", actual, todo, state)


def piece(following: ValueTracker, step: TraceStep) -> Placement:
    """Follow a slice of contiguous elements along one dimension; of fused parts, it is one part."""
    state, value = following.of(step.inputs[0]), step.inputs[0]
    dim, length = step.dim, following.shape(value)[step.dim]
    if not state.is_divided or dim != state.dim:
        return equation(following, step)
    ends = list(accumulate((part for part, _ in state.fused), initial=0))
    first, last, _ = slice(*step.requested).indices(length)
    if (first, last) in (places := list(pairwise(ends))) and ends[-1] == length:
        return state.part(places.index((first, last)), dim)
    if state.parts > 1 and not state.fused:
        following.doubt(step, "it is not known which part of several it picks, and its input is {}")
        return UNKNOWN
    if state.name != "features":
        return equation(following, step)
    actual = (
        f"{state.by} has {state.parts} part{'s' * (state.parts > 1)}, and {first}:{last} of {length} is picked here"
    )
    raise PlanError(step, "parts", actual, "give it Column(parts=), the lengths of the fused parts", state)


def join(following: ValueTracker, step: TraceStep) -> Placement:
    """Follow pieces that are concatenated or stacked."""
    if not step.outputs:
        return UNKNOWN
    rank = len(following.shape(step.outputs[0]))
    # Inputs without elements, such as an empty cache, add nothing: PyTorch accepts them in any shape.
    inputs = [value for value in step.inputs if 0 not in following.shape(value)] or step.inputs
    states = [following.of(value) for value in inputs]
    inserts = len(following.shape(inputs[0])) < rank
    dim = step.dim % max(1, rank)
    plain = tuple(range(rank - inserts))
    divided = next((state for state in states if state.is_divided), None)
    if divided is None or UNKNOWN in states:
        return place_unsharded(states)
    if any(state.name == "whole" for state in states):
        actual = f"one input is unsharded, and another one is {divided}"
        raise PlanError(step, "match", actual, "shard both the same way", divided)
    refuse_unlike(following, step, states, (plain,) * len(states))
    if inserts:
        return divided.at(divided.dim + (dim <= divided.dim))
    if dim != divided.dim:
        return divided
    if divided.name == "sequence":
        return UNKNOWN
    return Placement("features", dim, divided.by, sum(state.parts for state in states), 0)
