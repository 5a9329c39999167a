"""Operation rules: follow values through equations and unknown operations. [pure]"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from commlib.tensor_parallel.lengths import Source, attribute, sources_of
from commlib.tensor_parallel.placements import (
    CALLER,
    COMPUTED,
    CONSTANT,
    GIVEN,
    SETTLED,
    SHARED,
    UNKNOWN,
    WEIGHT,
    Placement,
    combine_unsharded,
)
from commlib.tensor_parallel.rules.plan_error import PlanError, count_error, refuse_partial
from commlib.tensor_parallel.rules.value_tracker import Doubt, ValueTracker
from commlib.tensor_parallel.styles import Column, Replicate, Row, Sequence, Slice, Vocabulary
from commlib.tensor_parallel.trace import TraceStep

_UNKNOWN = "the rules do not know whether it can take shards, and its input is {}"
_NUMBER = "Python numbers are read from a tensor, and may differ between ranks, because its input is {}"

_SHAPE = "the model reads it, and each rank has the shape of a shard: read units or out_features instead"

_GRADIENT = "a user's function takes values made of shards, and the rules do not know its gradient"


def follow_given(following: ValueTracker, step: TraceStep) -> Placement:
    """Return the placement of a value from outside, or of a weight used outside its layer."""
    if step.equation is not None:  # of a function that was tried on shards
        return equation(following, step)
    if step.kind == "weight" and isinstance(following.styles.get(step.layer), Column | Row | Vocabulary):
        actual = f"{step.layer}'s weight is used outside it, so its gradient and its values are this rank's shard"
        raise PlanError(step, "inside", actual, "call the layer, or do not shard it")
    if step.kind == "weight" and isinstance(following.styles.get(step.layer), Sequence):
        calls = [one for one in following.trace.steps if one.layer == step.layer and one.kind == "equation"]
        if any(one.dims[0] >= 0 for one in calls):
            actual = f"{step.layer}'s weight is used outside it, so it has this rank's features only"
            raise PlanError(step, "inside", actual, "call the layer, or do not shard it")
        return SHARED
    for dim, length in enumerate(step.requested if step.kind == "constant" else ()):
        for source in sorted(sources_of(length), key=repr):  # in the same order on all ranks
            if (name := attribute(source)) in following.styles:  # filled on each rank with its own number
                return Placement("features", dim, name)
    following.doubt(step, _UNKNOWN)
    if step.kind == "given" and step.outputs[0] in following.entered:
        return following.entered[step.outputs[0]]
    if step.kind == "given":
        return replace(GIVEN, learns=step.outputs[0] in following.trace.learns)
    return {"constant": CONSTANT, "weight": WEIGHT, "unseen": UNKNOWN}[step.kind]


def unknown(following: ValueTracker, step: TraceStep) -> Placement:
    """Return UNKNOWN, unless all inputs are unsharded, or a style gives the placement."""
    style, states = following.styles.get(step.layer), [following.of(value) for value in step.inputs]
    if step.equation is not None:
        following.doubt(step, _UNKNOWN)
        return equation(following, step)
    if isinstance(style, Sequence):
        _check_sequence(following, step, style)
        if step.open_doubt:
            following.doubt(step, step.open_doubt, stays=True)
        same = step.outputs and following.shape(step.inputs[0]) == following.shape(step.outputs[0])
        return following.of(step.inputs[0]) if same else UNKNOWN
    if not all(state.name == "whole" for state in states):
        following.doubt(step, _UNKNOWN)
        return UNKNOWN
    return SHARED if isinstance(style, Replicate) and style.into_sharded else combine_unsharded(states)


def follow_slice(following: ValueTracker, step: TraceStep) -> Placement:
    """Return the placement of an argument of a module; a rank may get its slice of it."""
    state, style = following.of(step.inputs[0]), following.styles.get(step.layer)
    dim = following.dim(style.dim, step.inputs[0]) if isinstance(style, Slice) else 0
    length = following.shape(step.inputs[0])[dim]
    if not isinstance(style, Slice) or length == 1:
        return state
    if state.name != "whole" or state.origin not in ("constant", "given") or state.learns:
        actual = f"it has {style}, but its argument is {state}, and not a constant"
        raise PlanError(step, "gradient", actual, "remove it from the plan", state)
    return Placement("features", dim, step.layer, max(1, length // style.units), SETTLED)


def penalty(following: ValueTracker, step: TraceStep) -> Placement:
    """Check a sum over elements: elements that several ranks have would count more than once."""
    state = following.of(step.inputs[0])
    refuse_partial(step, state)
    if state == SHARED:
        raise count_error(step, state)
    if state.copies(following.size) > 1:
        actual = f"it counts elements that are {state}, with parts that ranks share"
        raise PlanError(step, "count", actual, f"give the regularizer to {state.by} itself", state)
    return UNKNOWN


def number(following: ValueTracker, step: TraceStep) -> Placement:
    """Record a doubt for numbers read from sharded elements, which cannot be followed."""
    is_length, state = step.dim >= 0, following.of(step.inputs[0])
    stays = is_length or not following.trace.discrete.isdisjoint(step.inputs)
    if stays and not following.unknown.isdisjoint(step.inputs):
        following.doubts.append(Doubt(step, state, _NUMBER.format("made of sharded values"), stays))
    elif not is_length or (state.is_divided and state.dim == step.dim):
        following.doubt(step, _NUMBER, stays=stays)
    return UNKNOWN


def shape(following: ValueTracker, step: TraceStep) -> Placement:
    """Record a doubt for the shape of a sharded weight: as a length of a reshape it may be right, as a factor not."""
    following.doubts.append(Doubt(step, Placement("features", 0, step.layer), _SHAPE))
    return UNKNOWN


def gradient(following: ValueTracker, step: TraceStep) -> Placement:
    """Return the placement of the gradient of a function's input: like the value's, if it is known and trained."""
    state = _state_of_source(following, step.inputs[0])
    if state.name == "whole":
        counts = state.origin in ("computed", "weight") or state.learns
        return COMPUTED if counts else UNKNOWN
    if state.is_divided:
        return state
    if state.name == "partial" or not following.unknown.isdisjoint(step.inputs):
        following.doubts.append(Doubt(step, state, _GRADIENT, True))
    return UNKNOWN


def _state_of_source(following: ValueTracker, value: int) -> Placement:
    """Return the placement of a value; for results of users' functions, of their inputs of the same shape."""
    state, maker = following.of(value), following.trace.maker(value)
    looks_at_elements = maker.kind in ("unseen", "unknown") or (maker.equation is not None and not maker.equation.needs)
    if state != UNKNOWN or not looks_at_elements:
        return state
    same = [one for one in maker.inputs if following.shape(one) == following.shape(value)]
    states = {_state_of_source(following, one) for one in same}
    return states.pop() if len(states) == 1 else UNKNOWN


def equation(following: ValueTracker, step: TraceStep) -> Placement:
    """Return the placement of an equation's result."""
    terms, style = step.equation, following.styles.get(step.layer)
    assert terms is not None
    if isinstance(style, Sequence) and (step.weights or step.draws or _needs_full_dim(following, step, style)):
        _check_sequence(following, step, style)
    states = [following.of(value) for value in step.inputs]
    if step.requested and step.kind != "piece" and (expanded := _expand(following, step, states[0])) is not None:
        return expanded
    if any(state.inner for state in states):
        return UNKNOWN
    if states == [SHARED] and not step.requested and (repeated := _repeat(following, step)) is not None:
        return repeated
    refuse_unlike(following, step, states, terms.inputs)
    if not any(state.is_divided for state in states) or UNKNOWN in states:
        return place_unsharded(states)
    divided_inputs = [(state, dims) for state, dims in zip(states, terms.inputs, strict=True) if state.is_divided]
    divided, dims = min(
        divided_inputs, key=lambda one: one[0].copies(following.size)
    )  # otherwise shared heads combine with each rank's own
    if divided.dim >= len(dims):
        return UNKNOWN
    label = _plain(dims[divided.dim])
    if label in terms.needs:
        todo = f"gather the shards of {divided.by} before it: " + (
            "with gather=True, or a Row" if divided.name == "features" else "gather along the sequence"
        )
        if divided.by == CALLER:
            todo = "do it before the model is called, on the full input, or let the model shard its input"
        raise PlanError(step, "needs", f"its input is {divided}", todo, divided)
    of_features = step.weights and divided.dim == step.dims[0]
    if step.weights and not isinstance(style, Sequence):
        actual = f"its input is {divided}"
        rule = "features" if of_features else "gradient"
        actual += "" if of_features else ", so each rank has a partial gradient of its weights"
        raise PlanError(step, rule, actual, f"give it Sequence({divided.dim})", divided)
    if of_features and divided.parts > 1:
        actual = (
            f"its input is {divided}, which is {divided.parts} fused parts, but its weights would be sharded as one"
        )
        raise PlanError(step, "parts", actual, "split them first", divided)
    if of_features and divided.unit > 1 and divided.units % following.size:
        actual = f"its input is {divided} in {divided.units} units for {following.size} ranks, so not evenly"
        raise PlanError(
            step, "features", actual, f"remove units from {divided.by}, or do not shard this layer", divided
        )
    if of_features and step.size[0] % following.size:
        actual = f"its input is {divided} among {following.size} ranks, and its {step.size[0]} groups cannot be split"
        raise PlanError(step, "features", actual, f"do not shard {divided.by}, or use another number of ranks", divided)
    if step.draws and not isinstance(style, Sequence):
        actual = f"its input is {divided}, and it would draw the same numbers on all ranks"
        raise PlanError(step, "draws", actual, f"use a dropout layer with Sequence({divided.dim})", divided)
    if step.draws and divided.copies(following.size) > 1:
        actual = f"its input is {divided}, with parts that ranks share, but they would draw different numbers"
        raise PlanError(step, "draws", actual, f"do not shard {divided.by}, or use fewer ranks", divided)
    if label not in terms.output:
        return Placement("partial", by=f"{step.where}, of values sharded by {divided.by}", source=divided.by)
    return divided.at(terms.output.index(label))


def _expand(following: ValueTracker, step: TraceStep, state: Placement) -> Placement | None:
    """Return the placement of a value that each rank repeats by a per-rank number; None if it does not."""
    shape, rank = following.shape(step.inputs[0]), len(step.requested)
    shape, expanded = (1,) * (rank - len(shape)) + tuple(shape), following.shape(step.outputs[0])
    for dim, (length, was) in enumerate(zip(step.requested, shape, strict=False)):
        sources = sorted(sources_of(length), key=repr)
        own = next((name for name in map(partial(_own_number, following), sources) if name), "")
        if not own or was == expanded[dim]:
            continue
        if state.name == "whole" and was == 1:
            return Placement("features", dim, own)
        if state.is_divided and dim == state.dim:
            return replace(state, units=0)
        if state.is_divided and was == 1 and dim == state.dim + 1:
            return replace(state, inner=dim)
    return None


def _repeat(following: ValueTracker, step: TraceStep) -> Placement | None:
    """Return the placement of one head that each rank repeats for its own heads; None if it is not repeated.

    If the repeat count is not the rank's number, the shapes of the run do not fit.
    """
    shape, repeated = following.shape(step.inputs[0]), following.shape(step.outputs[0])
    terms = step.equation
    if terms is None or len(shape) != len(repeated) or len(terms.inputs) != 1:
        return None
    moved = {_plain(label) for label, length in zip(terms.inputs[0], shape, strict=False) if length != 1}
    lengths = zip(shape, repeated, map(_plain, terms.output), strict=False)
    more = [dim for dim, (was, now, label) in enumerate(lengths) if was == 1 < now and label not in moved]
    if len(more) != 1 or more[0] == 0:  # along the batch nothing is sharded
        return None
    return Placement("features", more[0], _maker(following, step.inputs[0]))


def _maker(following: ValueTracker, value: int) -> str:
    """Return the layer with `Replicate(into_sharded=True)` that a value comes from."""
    waiting, seen = [value], {value}
    while waiting:
        step = following.trace.maker(waiting.pop())
        if isinstance(following.styles.get(step.layer), Replicate):
            return step.layer
        waiting += [one for one in step.inputs if one not in seen]
        seen.update(step.inputs)
    return ""


def _own_number(following: ValueTracker, source: Source) -> str:
    """Return the layer that makes a number differ between ranks; "" if none does."""
    first, second = source
    if isinstance(first, int):
        state = following.of(first)
        return state.by if state.is_divided and state.dim == second else ""
    return attribute(source) if attribute(source) in following.styles else ""


def _needs_full_dim(following: ValueTracker, step: TraceStep, style: Sequence) -> bool:
    """Return whether a layer needs the full dimension along which its style assumes a sharded input."""
    return step.equation is not None and following.dim(style.dim, step.inputs[0]) in step.equation.needs


def _check_sequence(following: ValueTracker, step: TraceStep, style: Sequence) -> None:
    """Check a layer whose style assumes a sharded input."""
    value = step.inputs[0]
    state, dim = following.of(value), following.dim(style.dim, value)
    if _needs_full_dim(following, step, style):
        what = "the features" if step.kind == "equation" else "all positions it depends on, as tried on random parts"
        actual = f"it has {style}, but would see only a part of {what}"
        raise PlanError(step, "needs", actual, "gather them before it", state)
    if state.name == "whole":
        if state.origin != "given":
            actual = f"it has {style}, but its input is unsharded"
            rule = "count" if step.weights else "same"
            raise PlanError(step, rule, actual, "remove it from the plan, or shard its input", state)
        following.mark_sharded(step, value, Placement("sequence", dim, CALLER))


def refuse_unlike(
    following: ValueTracker, step: TraceStep, states: list[Placement], inputs: tuple[tuple[int, ...], ...]
) -> None:
    """Raise PlanError if values with different placements are combined."""
    for state in states:
        if len(states) > 1:
            refuse_partial(step, state)
    divided = [(state, dims) for state, dims in zip(states, inputs, strict=True) if state.is_divided]
    labels = {_plain(dims[state.dim]): state for state, dims in divided if state.dim < len(dims)}
    if not labels:
        return
    (label, first), *others = labels.items()
    if others:
        raise PlanError(step, "match", f"one is {first}, another one {others[0][1]}", "shard both the same way", first)
    _refuse_shared(following, step, [state for state, _ in divided])
    fused = {state.parts for state, _ in divided}
    if len(fused) > 1:
        raise PlanError(step, "parts", f"{sorted(fused)} of them are combined", "split them first", first)
    for at, (state, dims) in enumerate(zip(states, inputs, strict=True)):
        if state.name != "whole":
            continue
        if _has_all(following, step.inputs[at], dims, label):
            if state.origin == "given" and first.name == "sequence" and following.sequences_sharded:
                following.mark_sharded(step, step.inputs[at], Placement("sequence", dims.index(label), CALLER))
                continue
            what = {"weight": "an unsharded weight", "constant": "a constant"}.get(state.origin, "a value")
            actual = f"{what} has that dimension in full (input {at}), but another input is {first}"
            todo = f"gather the shards of {first.by} before (Row, or gather=True), or shard this one, too"
            if first.by == CALLER:
                todo = "pass each rank's part as an argument, or let the model shard the sequence itself"
            raise PlanError(step, "match", actual, todo, first)
        if state.origin in ("computed", "weight") or state.learns:
            actual = f"input {at} is unsharded and another is {first}, so each rank has a partial gradient of it"
            todo = "produce it in a layer with Replicate(into_sharded=True), or a Sequence"
            if state.learns:
                todo = "it comes from outside the sharded model: shard the model that makes it, too, and " + todo
            raise PlanError(step, "gradient", actual, todo, first)


def _refuse_shared(following: ValueTracker, step: TraceStep, states: list[Placement]) -> None:
    """Raise PlanError if heads that ranks share serve others that do not divide evenly among the ranks."""
    shared = [state for state in states if state.copies(following.size) > 1]
    for state in states if shared else ():
        if state.copies(following.size) > 1:
            continue
        count = state.units or max((one.size[1] for one in following.trace.steps if one.layer == state.by), default=0)
        if count % following.size:
            actual = f"{shared[0].by} has {shared[0].units} heads that ranks share, and {state.by} {count}"
            todo = f"use a number of ranks that divides {count}, or at most {shared[0].units} ranks"
            raise PlanError(step, "heads", actual, todo, state)


def _has_all(following: ValueTracker, value: int, dims: tuple[int, ...], label: int) -> bool:
    """Return whether an unsharded value has a dimension in full; with length 1 it is broadcast on any rank."""
    return any(one == label and length != 1 for one, length in zip(dims, following.shape(value), strict=False))


def place_unsharded(states: list[Placement]) -> Placement:
    """Return the placement of a result if no input is sharded, or too little is known."""
    if any(state.name == "partial" for state in states):
        return next(state for state in states if state.name == "partial")
    return combine_unsharded(states) if all(state.name == "whole" for state in states) else UNKNOWN


def _plain(label: int) -> int:
    """Return the number of a dimension, broadcast or not."""
    return label if label >= 0 else ~label
