"""Operations: follow values through what an equation describes, and what is unknown. [pure]"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from commlib.tensor_parallel.lengths import Source, attribute, sources_of
from commlib.tensor_parallel.rules.broken import PlanError, counted, refuse_partial
from commlib.tensor_parallel.rules.following import Doubt, Following
from commlib.tensor_parallel.states import (
    CALLER,
    COMPUTED,
    CONSTANT,
    GIVEN,
    SETTLED,
    SHARED,
    UNKNOWN,
    WEIGHT,
    State,
    whole_of,
)
from commlib.tensor_parallel.styles import Column, Replicate, Row, Sequence, Slice, Vocabulary
from commlib.tensor_parallel.trace import Step

_UNKNOWN = "the rules do not know whether it can take parts, and its input is {}"
_NUMBER = "numbers leave the tensors here, which may be others on each rank, for its input is {}"

_SHAPE = "the model asks for it, and on each rank it is that of a part: ask the layer (units, out_features), or a value"

_GRADIENT = "a function of the user's takes what is made of parts here, and the rules do not know its gradient"


def given(following: Following, step: Step) -> State:
    """Return the state of what comes from outside, or of a weight that is used by itself."""
    if step.equation is not None:  # of what was tried on parts
        return equation(following, step)
    if step.kind == "weight" and isinstance(following.styles.get(step.layer), Column | Row | Vocabulary):
        came = f"{step.layer}'s weight is used outside it, where its gradient and its values are this rank's part"
        raise PlanError(step, "inside", came, "call the layer, or leave it whole")
    if step.kind == "weight" and isinstance(following.styles.get(step.layer), Sequence):
        calls = [one for one in following.trace.steps if one.layer == step.layer and one.kind == "equation"]
        if any(one.dims[0] >= 0 for one in calls):
            came = f"{step.layer}'s weight is used outside it, where it is that of this rank's features"
            raise PlanError(step, "inside", came, "call the layer, or leave it whole")
        return SHARED
    for dim, length in enumerate(step.asked if step.kind == "constant" else ()):
        for source in sorted(sources_of(length), key=repr):  # in one order on all ranks
            if (name := attribute(source)) in following.styles:  # filled on each rank with its own number
                return State("features", dim, name)
    following.doubt(step, _UNKNOWN)
    if step.kind == "given" and step.outputs[0] in following.entered:
        return following.entered[step.outputs[0]]
    if step.kind == "given":
        return replace(GIVEN, learns=step.outputs[0] in following.trace.learns)
    return {"constant": CONSTANT, "weight": WEIGHT, "unseen": UNKNOWN}[step.kind]


def unknown(following: Following, step: Step) -> State:
    """Claim nothing, unless all that it takes is whole, or a style says how it goes on."""
    style, found = following.styles.get(step.layer), [following.of(value) for value in step.inputs]
    if step.equation is not None:
        following.doubt(step, _UNKNOWN)
        return equation(following, step)
    if isinstance(style, Sequence):
        _sequence(following, step, style)
        if step.untold:
            following.doubt(step, step.untold, stays=True)
        same = step.outputs and following.shape(step.inputs[0]) == following.shape(step.outputs[0])
        return following.of(step.inputs[0]) if same else UNKNOWN
    if not all(state.name == "whole" for state in found):
        following.doubt(step, _UNKNOWN)
        return UNKNOWN
    return SHARED if isinstance(style, Replicate) and style.into_sharded else whole_of(found)


def sliced(following: Following, step: Step) -> State:
    """Return the state of an argument of a module, of which it may be given this rank's part."""
    state, style = following.of(step.inputs[0]), following.styles.get(step.layer)
    dim = following.dim(style.dim, step.inputs[0]) if isinstance(style, Slice) else 0
    length = following.shape(step.inputs[0])[dim]
    if not isinstance(style, Slice) or length == 1:
        return state
    if state.name != "whole" or state.origin not in ("constant", "given") or state.learns:
        came = f"it has {style}, and what it is called with is {state}, and not a constant"
        raise PlanError(step, "gradient", came, "leave it out of the plan", state)
    return State("features", dim, step.layer, max(1, length // style.units), SETTLED)


def penalty(following: Following, step: Step) -> State:
    """Check what is added up over elements: those that several ranks have would count more than once."""
    state = following.of(step.inputs[0])
    refuse_partial(step, state)
    if state == SHARED:
        raise counted(step, state)
    if state.copies(following.size) > 1:
        came = f"it counts what is {state}, of which ranks share parts"
        raise PlanError(step, "count", came, f"give the regularizer to {state.by} itself", state)
    return UNKNOWN


def number(following: Following, step: Step) -> State:
    """Doubt what is made of elements that are a part, outside of what can be followed."""
    is_length, state = step.dim >= 0, following.of(step.inputs[0])
    stays = is_length or not following.trace.discrete.isdisjoint(step.inputs)
    if stays and not following.unknown.isdisjoint(step.inputs):
        following.doubts.append(Doubt(step, state, _NUMBER.format("made of what is divided"), stays))
    elif not is_length or (state.is_divided and state.dim == step.dim):
        following.doubt(step, _NUMBER, stays=stays)
    return UNKNOWN


def shape(following: Following, step: Step) -> State:
    """Doubt what is made of the shape of a divided weight: a length to reshape by may be right, a factor is not."""
    following.doubts.append(Doubt(step, State("features", 0, step.layer), _SHAPE))
    return UNKNOWN


def gradient(following: Following, step: Step) -> State:
    """Return the state of the gradient of what a function takes: that of the value, where it is told, and counts."""
    state = _like_its_source(following, step.inputs[0])
    if state.name == "whole":
        counts = state.origin in ("computed", "weight") or state.learns
        return COMPUTED if counts else UNKNOWN
    if state.is_divided:
        return state
    if state.name == "partial" or not following.unknown.isdisjoint(step.inputs):
        following.doubts.append(Doubt(step, state, _GRADIENT, True))
    return UNKNOWN


def _like_its_source(following: Following, value: int) -> State:
    """Return the state of a value; of what functions of the user's made, that of what they took in the same shape."""
    state, maker = following.of(value), following.trace.maker(value)
    looks_at_elements = maker.kind in ("unseen", "unknown") or (maker.equation is not None and not maker.equation.needs)
    if state != UNKNOWN or not looks_at_elements:
        return state
    same = [one for one in maker.inputs if following.shape(one) == following.shape(value)]
    found = {_like_its_source(following, one) for one in same}
    return found.pop() if len(found) == 1 else UNKNOWN


def equation(following: Following, step: Step) -> State:
    """Return the state of what an equation gives."""
    terms, style = step.equation, following.styles.get(step.layer)
    assert terms is not None
    if isinstance(style, Sequence) and (step.weights or step.draws or _sees(following, step, style)):
        _sequence(following, step, style)
    found = [following.of(value) for value in step.inputs]
    if step.asked and step.kind != "piece" and (expanded := _expanded(following, step, found[0])) is not None:
        return expanded
    if any(state.inner for state in found):
        return UNKNOWN
    if found == [SHARED] and not step.asked and (repeated := _repeated(following, step)) is not None:
        return repeated
    refuse_unlike(following, step, found, terms.inputs)
    if not any(state.is_divided for state in found) or UNKNOWN in found:
        return of_whole(found)
    lying = [(state, dims) for state, dims in zip(found, terms.inputs, strict=True) if state.is_divided]
    divided, dims = min(
        lying, key=lambda one: one[0].copies(following.size)
    )  # what meets shared heads is each rank's own
    if divided.dim >= len(dims):
        return UNKNOWN
    label = _plain(dims[divided.dim])
    if label in terms.needs:
        todo = f"put {divided.by}'s parts together before it: " + (
            "by gather=True, or by a Row" if divided.name == "features" else "gather along the sequence"
        )
        if divided.by == CALLER:
            todo = "do it before the model is called, with the whole, or let the model divide what it is called with"
        raise PlanError(step, "needs", f"its input is {divided}", todo, divided)
    of_features = step.weights and divided.dim == step.dims[0]
    if step.weights and not isinstance(style, Sequence):
        came = f"its input is {divided}"
        rule = "features" if of_features else "gradient"
        came += "" if of_features else ", so each rank has a part of its weights' gradient"
        raise PlanError(step, rule, came, f"give it Sequence({divided.dim})", divided)
    if of_features and divided.parts > 1:
        came = f"its input is {divided}, which is {divided.parts} fused parts, and its weights would be divided as one"
        raise PlanError(step, "parts", came, "split them first", divided)
    if of_features and divided.unit > 1 and divided.units % following.size:
        came = f"its input is {divided} in {divided.units} units for {following.size} ranks, so not evenly"
        raise PlanError(step, "features", came, f"give {divided.by} no units, or leave this whole", divided)
    if of_features and step.size[0] % following.size:
        came = f"its input is {divided} among {following.size} ranks, and has {step.size[0]} groups, which stay whole"
        raise PlanError(step, "features", came, f"leave {divided.by} whole, or use other numbers of ranks", divided)
    if step.draws and not isinstance(style, Sequence):
        came = f"its input is {divided}, and it would draw the same on all"
        raise PlanError(step, "draws", came, f"let a dropout layer draw them, with Sequence({divided.dim})", divided)
    if step.draws and divided.copies(following.size) > 1:
        came = f"its input is {divided}, of which ranks have the same and would not draw the same"
        raise PlanError(step, "draws", came, f"leave {divided.by} whole, or use fewer ranks", divided)
    if label not in terms.output:
        return State("partial", by=f"{step.where}, of what is divided by {divided.by}", source=divided.by)
    return divided.at(terms.output.index(label))


def _expanded(following: Following, step: Step, state: State) -> State | None:
    """Return the state of what each rank repeats as often as it needs, by a number of its own; None if it does not."""
    shape, rank = following.shape(step.inputs[0]), len(step.asked)
    shape, made = (1,) * (rank - len(shape)) + tuple(shape), following.shape(step.outputs[0])
    for dim, (length, was) in enumerate(zip(step.asked, shape, strict=False)):
        sources = sorted(sources_of(length), key=repr)
        own = next((name for name in map(partial(_own_number, following), sources) if name), "")
        if not own or was == made[dim]:
            continue
        if state.name == "whole" and was == 1:
            return State("features", dim, own)
        if state.is_divided and dim == state.dim:
            return replace(state, units=0)
        if state.is_divided and was == 1 and dim == state.dim + 1:
            return replace(state, inner=dim)
    return None


def _repeated(following: Following, step: Step) -> State | None:
    """Return the state of one head that is repeated for all, which each rank does for its own; None if it is not.

    What a rank asks for is its own number, or the shapes of its run, and of what it meets there, do not fit.
    """
    shape, made = following.shape(step.inputs[0]), following.shape(step.outputs[0])
    terms = step.equation
    if terms is None or len(shape) != len(made) or len(terms.inputs) != 1:
        return None
    moved = {_plain(label) for label, length in zip(terms.inputs[0], shape, strict=False) if length != 1}
    lengths = zip(shape, made, map(_plain, terms.output), strict=False)
    more = [dim for dim, (was, now, label) in enumerate(lengths) if was == 1 < now and label not in moved]
    if len(more) != 1 or more[0] == 0:  # along the batch nothing is divided
        return None
    return State("features", more[0], _maker(following, step.inputs[0]))


def _maker(following: Following, value: int) -> str:
    """Return the layer with `Replicate(into_sharded=True)` that a value comes from."""
    waiting, seen = [value], {value}
    while waiting:
        step = following.trace.maker(waiting.pop())
        if isinstance(following.styles.get(step.layer), Replicate):
            return step.layer
        waiting += [one for one in step.inputs if one not in seen]
        seen.update(step.inputs)
    return ""


def _own_number(following: Following, source: Source) -> str:
    """Return who has made a number another one on each rank; "" if nobody."""
    first, second = source
    if isinstance(first, int):
        state = following.of(first)
        return state.by if state.is_divided and state.dim == second else ""
    return attribute(source) if attribute(source) in following.styles else ""


def _sees(following: Following, step: Step, style: Sequence) -> bool:
    """Return whether a layer needs all of the dimension along which it takes its input for divided."""
    return step.equation is not None and following.dim(style.dim, step.inputs[0]) in step.equation.needs


def _sequence(following: Following, step: Step, style: Sequence) -> None:
    """Check a layer that takes its input for divided."""
    value = step.inputs[0]
    state, dim = following.of(value), following.dim(style.dim, value)
    if _sees(following, step, style):
        what = "the features" if step.kind == "equation" else "all positions that it looks at, as tried on random parts"
        came = f"it has {style}, so that it would see a part of {what}"
        raise PlanError(step, "needs", came, "gather them before it", state)
    if state.name == "whole":
        if state.origin != "given":
            came = f"it has {style}, and its input is whole"
            rule = "count" if step.weights else "same"
            raise PlanError(step, rule, came, "leave it out of the plan, or divide its input", state)
        following.came_divided(step, value, State("sequence", dim, CALLER))


def refuse_unlike(following: Following, step: Step, found: list[State], inputs: tuple[tuple[int, ...], ...]) -> None:
    """Raise PlanError if values meet that lie differently on the ranks."""
    for state in found:
        if len(found) > 1:
            refuse_partial(step, state)
    known = [(state, dims) for state, dims in zip(found, inputs, strict=True) if state.is_divided]
    labels = {_plain(dims[state.dim]): state for state, dims in known if state.dim < len(dims)}
    if not labels:
        return
    (label, first), *others = labels.items()
    if others:
        raise PlanError(step, "meet", f"one is {first}, another one {others[0][1]}", "divide both alike", first)
    _refuse_shared(following, step, [state for state, _ in known])
    fused = {state.parts for state, _ in known}
    if len(fused) > 1:
        raise PlanError(step, "parts", f"{sorted(fused)} of them meet", "split them first", first)
    for at, (state, dims) in enumerate(zip(found, inputs, strict=True)):
        if state.name != "whole":
            continue
        if _has_all(following, step.inputs[at], dims, label):
            if state.origin == "given" and first.name == "sequence" and following.sequences_came:
                following.came_divided(step, step.inputs[at], State("sequence", dims.index(label), CALLER))
                continue
            what = {"weight": "a weight that is not divided", "constant": "a constant"}.get(state.origin, "a value")
            came = f"{what} has all of that dimension (input {at}), and another input is {first}"
            todo = f"put {first.by}'s parts together before (Row, or gather=True), or divide this one, too"
            if first.by == CALLER:
                todo = "give it as an argument, each rank its part, or let the model divide the sequence itself"
            raise PlanError(step, "meet", came, todo, first)
        if state.origin in ("computed", "weight") or state.learns:
            came = f"input {at} is whole and meets what is {first}, so each rank has a part of its gradient"
            todo = "let it come from a layer with Replicate(into_sharded=True), or of a Sequence"
            if state.learns:
                todo = (
                    "it comes from outside of the model that is divided: divide the one that makes it, too, and " + todo
                )
            raise PlanError(step, "gradient", came, todo, first)


def _refuse_shared(following: Following, step: Step, states: list[State]) -> None:
    """Raise PlanError if heads that ranks share serve others, which do not go up in the ranks."""
    shared = [state for state in states if state.copies(following.size) > 1]
    for state in states if shared else ():
        if state.copies(following.size) > 1:
            continue
        count = state.units or max((one.size[1] for one in following.trace.steps if one.layer == state.by), default=0)
        if count % following.size:
            came = f"{shared[0].by} has {shared[0].units} that ranks share, and {state.by} {count}"
            todo = f"use a number of ranks that divides {count}, or one that {shared[0].units} are enough for"
            raise PlanError(step, "heads", came, todo, state)


def _has_all(following: Following, value: int, dims: tuple[int, ...], label: int) -> bool:
    """Return whether a whole value has all of a dimension: of length 1 it is repeated, however few a rank has."""
    return any(one == label and length != 1 for one, length in zip(dims, following.shape(value), strict=False))


def of_whole(found: list[State]) -> State:
    """Return the state of what is computed where nothing is divided, or too little is known."""
    if any(state.name == "partial" for state in found):
        return next(state for state in found if state.name == "partial")
    return whole_of(found) if all(state.name == "whole" for state in found) else UNKNOWN


def _plain(label: int) -> int:
    """Return the number of a dimension, be it repeated along that or not."""
    return label if label >= 0 else ~label
