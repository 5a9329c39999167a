"""Pairs: styles of layers whose features reach one other layer, as the operations between them require. [pure]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from commlib.sharding.sharding import parts_of
from commlib.tensor_parallel.lengths import attribute, sources_of
from commlib.tensor_parallel.numbers import NotShardable, ShardedRegion, numbers_per_rank
from commlib.tensor_parallel.placements import SETTLED, Placement
from commlib.tensor_parallel.rules import PlanError, check
from commlib.tensor_parallel.styles import Column, PerRank, Replicate, Row, Sequence, Slice, Style
from commlib.tensor_parallel.trace import ModelTrace, TraceStep

_OUTSIDE = ("given", "constant", "weight")
_ANY_WEIGHT = -1
"""The number of a value that represents weights of earlier layers."""

States = Mapping[int, Placement]
"""Placements of values, by their numbers."""


def shard_pair(
    trace: ModelTrace,
    undivided: States,
    size: int,
    firsts: list[str],
    lasts: list[str],
    given: Mapping[str, PerRank],
    bases: Mapping[str, str],
) -> dict[str, Style]:
    """Return styles for the layers `firsts`, for `lasts`, and for norms, dropout and numbers between them.

    undivided: placements of all values of the unsharded model. given: numbers that have a style already. bases: for
    low-rank layers among `firsts` the layer whose result theirs is added to, and whose sharding they share.

    Styles are checked by the rules, and refused ones are corrected if the trace shows how: fused features that are
    split into parts, heads of keys and values that all queries share, dropout of sharded values, tables with a bias for
    each head. Raises PlanError for styles that are still refused, and NotPossible if the rules cannot decide, if there
    are too few heads, or if numbers in shapes fit only the unsharded model.
    """
    part = _steps_between(trace, undivided, {*firsts, *lasts})
    requested: dict[str, Style] = {**given, **dict.fromkeys(firsts, Column()), **dict.fromkeys(lasts, Row())}
    styles, states = _accept(part, requested, firsts, bases)
    heads = {name: _heads(part, states, name) for name in firsts}
    head_counts = {
        name: count for name in firsts if not any(heads[name]) and (count := _count_heads(part, states, name))
    }
    if any(count < size for count in head_counts.values()):
        heads |= {name: (count,) for name, count in head_counts.items()}
    for name, base in bases.items():  # operations on their sum follow one of the two
        heads[name] = heads[base] = max(heads[name], heads[base])
    most = max((max(counts) for counts in heads.values()), default=0)
    one = [name for name in firsts if 1 in heads[name]]
    if one and most >= size:  # it serves the queries of all ranks
        changes = {name: _with_one_head(styles[name], heads[name]) for name in one}
        styles, states = _accept(part, styles | changes, firsts, bases, size)
        heads = {name: tuple(0 if count == 1 else count for count in counts) for name, counts in heads.items()}
    few = {name: [count for count in counts if _are_few(count, size)] for name, counts in heads.items()}
    shared = {name: min(counts) for name, counts in few.items() if counts}
    units = gcd(*(count for counts in heads.values() for count in counts if not _are_few(count, size)))
    if shared and (units == 0 or units % size):
        raise NotShardable(f"{min(shared.values())} heads for {size} ranks")
    if shared:
        styles = styles | {name: _with_units(styles[name], heads[name], units, size) for name in shared}
        styles |= {name: PerRank(among=size // min(shared.values())) for name in _repeats(part, states, set(shared))}
        styles, states = _accept(part, styles, firsts, bases, size)
    if units and units < size:
        raise NotShardable(f"{units} heads for {size} ranks")
    for name, style in styles.items():
        if isinstance(style, Column) and name not in shared:
            _refuse_few(_call(part, name), style, units, size)
            own = units if isinstance(style.units, int) else tuple(count or units for count in style.units)
            styles[name] = Column(style.parts, own)
        elif isinstance(style, PerRank) and name not in given and not style.among:
            styles[name] = PerRank(units)
    for name, style in styles.items():
        if isinstance(style, Slice) and (style.units % size or (units and units % size)):
            raise NotShardable(f"{name} has values for {style.units} heads, for {size} ranks")
    numbers = {name: style for name, style in styles.items() if isinstance(style, PerRank)}
    more = numbers_per_rank(ShardedRegion(trace, part, states, styles, units, size), numbers)
    rows: dict[str, Style] = dict.fromkeys(lasts, Row(units=units))
    return {name: style for name, style in styles.items() if name not in given} | rows | more


def _are_few(heads: int, size: int) -> bool:
    return 0 < heads < size and size % heads == 0


def _with_one_head(style: Style, heads: tuple[int, ...]) -> Style:
    """Return the style of a layer with one head, in all or in some of its parts, that serves all others."""
    if isinstance(style, Column) and len(heads) > 1:
        return Column(style.parts, tuple(int(count == 1) for count in heads))
    return Replicate(into_sharded=True)


def _with_units(style: Style, heads: tuple[int, ...], units: int, size: int) -> Style:
    """Return the style of a layer with fewer heads than ranks, in all or some of its parts."""
    units_given = style.units if isinstance(style, Column) and not isinstance(style.units, int) else (0,) * len(heads)
    own = [count if _are_few(count, size) else units for count in heads]
    merged = tuple(one or count for one, count in zip(units_given, own, strict=True))
    return Column(style.parts, merged) if isinstance(style, Column) and len(merged) > 1 else Column(units=merged[0])


def _accept(
    part: ModelTrace, styles: dict[str, Style], firsts: list[str], bases: Mapping[str, str], size: int = 1
) -> tuple[dict[str, Style], States]:
    """Return styles that the rules accept, and the placements of values with them.

    Raises PlanError if there are none, and NotPossible if the rules cannot decide.
    """
    for _ in part.steps:
        try:
            check(part, styles, size=size)
            break
        except PlanError as error:
            changes = _correct(part, styles, firsts, error)
            if not changes:
                raise
            together = [{name, base} for name, base in bases.items() if not changes.keys().isdisjoint({name, base})]
            for names in together:
                changes |= dict.fromkeys(names, next(changes[name] for name in names if name in changes))
            styles = styles | changes
    checked = check(part, styles, size=size)
    for doubt in checked.doubts:
        if not doubt.is_of_gradient:
            raise NotShardable(f"{doubt}")
    return styles, checked.states


def _correct(part: ModelTrace, styles: Mapping[str, Style], firsts: list[str], error: PlanError) -> dict[str, Style]:
    """Return corrected styles after the rules have refused some; none if no correction is known."""
    step, state = error.step, error.state
    first = styles.get(state.by)
    if step.layer and step.layer not in styles and (step.weights or step.draws):
        return {step.layer: Sequence(state.dim)}
    if error.rule == "gradient":  # of a norm of each head, written in operations
        makers = [part.maker(value) for value in step.inputs]
        norms = {one.layer for one in makers if one.kind == "weight" and one.layer} - styles.keys()
        return dict.fromkeys(norms, Sequence(state.dim))
    if isinstance(first, Column) and first.parts == 1:
        if error.rule == "parts" and step.kind == "piece" and (lengths := _fused_lengths(part, step, state)):
            return {state.by: Column(lengths if len(set(lengths)) > 1 else len(lengths))}
        if error.rule == "parts" and step.kind == "split":
            fused = len(part.shapes[step.outputs[0]]) == len(part.shapes[step.inputs[0]])
            lengths = tuple(part.shapes[value][step.dim] for value in step.outputs) if fused else ()
            return {state.by: Column(lengths if len(set(lengths)) > 1 else len(step.outputs))}
        if error.rule == "needs" and state.parts == 1:  # picks from fused features that have a separate dimension
            length = part.shapes[step.inputs[0]][state.dim]
            return {state.by: Column(length) if length > 1 else Replicate(into_sharded=True)}  # the one head
    if isinstance(first, Column) and error.rule in ("needs", "match") and state.parts == 1 != first.parts:
        parts = parts_of(state.by, first.parts, _call(part, state.by).size[1])
        one_head = Column(parts, tuple(int(length < max(parts)) for length in parts))
        if len(set(parts)) > 1 and one_head != first:  # of keys and values, for all queries
            return {state.by: one_head}
    if error.rule == "match":
        if of_heads := _head_styles(part, styles, step, state) or _argument_styles(part, styles, step, state):
            return of_heads
        widths = {name: _call(part, name).size[1] for name in firsts if isinstance(styles[name], Column)}
        return {name: Replicate(into_sharded=True) for name, width in widths.items() if width < max(widths.values())}
    return {}


def _fused_lengths(part: ModelTrace, step: TraceStep, state: Placement) -> tuple[int, ...]:
    """Return the lengths of fused features from which pieces are picked; () if the pieces are not all of them."""
    value, length = step.inputs[0], part.shapes[step.inputs[0]][step.dim]
    users = [part.steps[at] for at in part.users[value]]
    picked = {slice(*one.requested).indices(length)[:2] for one in users if one.kind == "piece" and one.dim == step.dim}
    ends = sorted(picked)
    if [0, *(last for _, last in ends)] != [*(first for first, _ in ends), length] or len(ends) < 2:
        return ()
    features = _call(part, state.by).size[1]
    return tuple((last - first) * features // length for first, last in ends) if features % length == 0 else ()


def _head_styles(part: ModelTrace, styles: Mapping[str, Style], step: TraceStep, state: Placement) -> dict[str, Style]:
    """Return styles for values with an entry for each head that combine with heads: tables, and constants."""
    shapes = [part.shapes[value] for value in step.inputs]
    lengths = {shape[state.dim] for shape in shapes if state.dim < len(shape)} - {1}
    result: dict[str, Style] = {}
    for value in step.inputs:
        for one in trace_back(part, value, past_layers=True) or ():
            if one.kind == "equation" and one.requested:  # one head of keys, repeated for all queries
                result |= {name: PerRank() for name in _expanding(part, one) if name not in styles}
        for one in trace_back(part, value) or ():
            if one.kind == "table" and one.layer not in styles and one.size[1] in lengths:
                result[one.layer] = Column()
            for length in one.requested if one.kind == "constant" else ():
                for source in sources_of(length):
                    if int(length) in lengths and isinstance(source[0], str) and attribute(source) not in styles:
                        result[attribute(source)] = PerRank()
    return result


def _argument_styles(
    part: ModelTrace, styles: Mapping[str, Style], step: TraceStep, state: Placement
) -> dict[str, Style]:
    """Return styles for arguments of modules with an entry for each head that combine with heads."""
    lengths = {part.shapes[value][state.dim] for value in step.inputs if state.dim < len(part.shapes[value])}
    length, result = max(lengths, default=1), dict[str, Style]()
    units = length // state.parts
    for value in step.inputs if units > 1 else ():
        last = [one for one in trace_back(part, value) or () if one.kind == "slice"][-1:]
        if last and last[0].layer not in styles:
            shape = part.shapes[last[0].outputs[0]]
            dims = [(one != length, dim) for dim, one in enumerate(shape) if one > 1 and one % units == 0]
            if dims:
                result[last[0].layer] = Slice(min(dims)[1], units)
    return result


def _repeats(part: ModelTrace, states: States, names: set[str]) -> set[str]:
    """Return the numbers of modules that set how often some layers' outputs are repeated for their heads."""
    result = set[str]()
    for step in part.steps:
        if step.kind == "equation" and step.requested and states[step.inputs[0]].by in names:
            result |= _expanding(part, step)
    return result


def _expanding(part: ModelTrace, step: TraceStep) -> set[str]:
    """Return the numbers of modules that set how often a step repeats a value."""
    shape, expanded = part.shapes[step.inputs[0]], part.shapes[step.outputs[0]]
    shape = (1,) * (len(expanded) - len(shape)) + tuple(shape)
    return {
        attribute(source)
        for length, was, now in zip(step.requested, shape, expanded, strict=False)
        for source in sources_of(length)
        if was != now and isinstance(source[0], str)
    }


def trace_back(trace: ModelTrace, value: int, *, past_layers: bool = False) -> list[TraceStep] | None:
    """Return the steps that make a value, in their order; None if layers that mix features are among them.

    past_layers: return only the steps after these layers instead.
    """
    visited, waiting = set[int](), [value]
    while waiting:
        at = trace.makers.get(waiting.pop())
        if at is None or at in visited:
            continue
        if trace.steps[at].kind in ("product", "attention"):
            if past_layers:
                continue
            return None
        visited.add(at)
        waiting += trace.steps[at].inputs
    return [trace.steps[at] for at in sorted(visited)]


def _steps_between(trace: ModelTrace, undivided: States, names: set[str]) -> ModelTrace:
    """Return the steps from the first to the last call of some layers, with unsharded inputs.

    Earlier steps without layers that mix features are included: angles of positions, tables.
    """
    calls = [at for at, step in enumerate(trace.steps) if step.kind == "product" and step.layer in names]
    steps = list(trace.steps[calls[0] : calls[-1] + 1])
    earlier = [step for step in trace.steps[: calls[0]] if step.kind in _OUTSIDE]
    known = {value for step in (*earlier, *steps) for value in step.outputs}
    sources = [TraceStep("", "weight", (), (_ANY_WEIGHT,))]
    for value in dict.fromkeys(value for step in steps for value in step.inputs):
        if value not in known:
            makers = trace_back(trace, value)
            if makers is None or undivided[value].name != "whole":
                sources.append(TraceStep("", "unknown", (_ANY_WEIGHT,), (value,)))
                known.add(value)
            else:
                more = [step for step in makers if not known.issuperset(step.outputs)]
                earlier += more
                known.update(produced for step in more for produced in step.outputs)
    produced = {value for step in steps for value in step.outputs}
    saved = tuple(value for value in trace.retained if value in produced)
    return replace(trace, steps=(*sources, *earlier, *steps), outputs=(), tied=(), whole=True, retained=saved)


def _call(part: ModelTrace, name: str) -> TraceStep:
    return next(step for step in part.steps if step.layer == name and step.kind in ("product", "table"))


def _heads(part: ModelTrace, states: States, name: str) -> tuple[int, ...]:
    """Return the number of heads that the features of a layer, or of each of its parts, become; 0 for none."""
    placement = next(states[step.outputs[0]] for step in part.steps if step.layer == name and step.kind == "product")
    heads = [0] * max(1, len(placement.fused))
    for step in part.steps:
        if step.kind == "reshape":
            before, after = states[step.inputs[0]], states[step.outputs[0]]
            if before.by == after.by == name and before.unit != SETTLED and after.unit == SETTLED:
                if after.fused:
                    return tuple(length for length, _ in after.fused)
                if before.parts > 1:
                    return (part.shapes[step.outputs[0]][after.dim],)
                heads[before.place] = heads[before.place] or part.shapes[step.outputs[0]][after.dim]
    return tuple(heads)


def _count_heads(part: ModelTrace, states: States, name: str) -> int:
    """Return the number of heads in the output of a layer with a dimension of heads; 0 without one."""
    call = _call(part, name)
    state = states[call.outputs[0]]
    return call.size[1] if state.by == name and state.dim + 1 < len(part.shapes[call.outputs[0]]) else 0


def _refuse_few(step: TraceStep, style: Column, units: int, size: int) -> None:
    parts = parts_of(step.layer, style.parts, step.size[1]) or (step.size[1],)
    if not isinstance(style.units, int):
        parts = tuple(part for part, count in zip(parts, style.units, strict=True) if count != 1)
    if min(parts) < size:
        raise NotShardable(f"{min(parts)} features for {size} ranks")
    if units and any(part % units for part in parts):
        raise NotShardable(f"features {list(parts)} of {step.layer} cannot be split into {units} equal heads")
