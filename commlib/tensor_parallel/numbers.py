"""Per-rank numbers: find a model's numbers, such as heads, that need a rank's value for its shapes to be right. [pure]

Each number in a shape is compared with its required value on every rank, where some dimensions are shorter. If it
would have the unsharded value, the attributes that it was computed from are tried: each gets the rank's part of its
value, as few of them as possible, until all shapes of the model are right, including those of unsharded tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, combinations, product

from commlib.schedule.layout import even
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel.equations import UNKNOWN_LENGTH
from commlib.tensor_parallel.lengths import Source, attribute, length_at, sources_of
from commlib.tensor_parallel.placements import Placement
from commlib.tensor_parallel.styles import Column, PerRank, Style
from commlib.tensor_parallel.trace import ModelTrace, TraceStep

_MOST = 6
"""Maximum number of attributes that are tried."""

_MOST_LINES = 4
"""Maximum number of lines of a model in a reason for not sharding layers."""


class NotShardable(Exception):
    """The reason for not sharding some layers."""


@dataclass(frozen=True, slots=True)
class ShardedRegion:
    """Layers of a model to shard, with the steps between them, the placements of values in them, styles, and units.

    model: the full trace.
    """

    model: ModelTrace
    trace: ModelTrace
    states: Mapping[int, Placement]
    styles: Mapping[str, Style]
    units: int
    size: int

    @property
    def shared(self) -> set[int]:
        """Numbers of heads that are smaller than the number of ranks."""
        divided = [state for state in self.states.values() if state.is_divided]
        units_of = {state.units for state in divided} | {units for state in divided for _, units in state.fused}
        return {units for units in units_of if 1 < units < self.size and self.size % units == 0}

    def own(self, value: int, dim: int, rank: int) -> int:
        """Return the length of a value's dimension on a rank."""
        length, state = self.model.shapes[value][dim], self.states.get(value)
        if state is not None and state.inner and dim == state.inner:
            return length // state.copies(self.size)
        if state is None or not state.is_divided or state.dim != dim:
            return length
        if state.fused:
            return sum(stop - start for start, stop in self._spans(state, rank))
        if state.copies(self.size) > 1:
            return length // state.units
        if self.units:
            return length * even(self.units, self.size).counts[rank] // self.units
        style = self.styles.get(state.by)
        outputs = next((step.size[1] for step in self.trace.steps if step.layer == state.by and step.size[1]), 0)
        if isinstance(style, Column) and length == outputs:
            return Sharding((length,), 0, parts_of(state.by, style.parts, length)).length(rank, self.size)
        return even(length, self.size).counts[rank]

    def _spans(self, state: Placement, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the spans of a rank's pieces in the full dimension, along fused features."""
        parts, units = zip(*state.fused, strict=True)
        whole = Sharding((sum(parts),), 0, parts, tuple(count or self.units for count in units), shared=True)
        return whole.spans(rank, self.size)

    def ends(self, step: TraceStep, rank: int) -> tuple[int, int]:
        """Return the bounds that a slice needs on a rank, in the form of the given ones: also from the end."""
        (first, last), state = step.requested, self.states.get(step.inputs[0])
        if state is None or not (state.fused and state.is_divided and state.dim == step.dim):
            return int(first), int(last)
        parts = [0, *accumulate(part for part, _ in state.fused)]
        own = [0, *accumulate(stop - start for start, stop in self._spans(state, rank))]

        def at(place: int) -> int:
            if place > parts[-1]:
                return place
            return own[parts.index(place % parts[-1] if place < 0 else place)] - (own[-1] if place < 0 else 0)

        return at(int(first)), at(int(last))


def numbers_per_rank(part: ShardedRegion, given: Mapping[str, PerRank]) -> dict[str, PerRank]:
    """Return the attributes that need a rank's value. given: those found before.

    Raises NotPossible if no change of attributes makes all shapes right.
    """
    for source, line in part.trace.used.items():
        value, dim = source
        if isinstance(value, int) and isinstance(dim, int):
            state = part.states.get(value)
            if state is not None and state.is_divided and state.dim == dim:
                raise NotShardable(
                    f"{line}: the length of a tensor that is {state} is used as a number, and differs on a rank"
                )
    wrong = [step for step in part.trace.steps if _misfit(part, step, given)]
    if not wrong:
        return {}
    first = {one for step in wrong for number, _ in _misfits(part, step, given) for one in _attributes_of(number)}
    able = {one for step in part.trace.steps for one in _attributes(step)}.difference(
        given, _used_attributes(part.trace)
    )
    tried = sorted(able, key=lambda name: (name not in first, name))[:_MOST]
    options = [PerRank(part.units), *(PerRank(among=count) for count in sorted(part.shared))]
    for names in (some for count in range(len(tried)) for some in combinations(tried, count + 1)):
        if first.isdisjoint(names):
            continue
        for styles in product(options, repeat=len(names)):
            more = dict(zip(names, styles, strict=True))
            if any(part.model.numbers[name] % (one.units or one.among or 1) for name, one in more.items()):
                continue
            if not any(_misfit(part, step, {**given, **more}) for step in part.trace.steps) and not any(
                _misfit(part, step, more) for step in part.model.steps if _is_elsewhere(part, step, names)
            ):
                return more
    raise NotShardable(_describe_fixed(part, given, tried, options))


def _describe_fixed(part: ShardedRegion, given: Mapping[str, PerRank], tried: list[str], options: list[PerRank]) -> str:
    """Return the lines that fix shapes to unsharded values, whichever numbers have a rank's value."""

    def problems_of(numbers: Mapping[str, PerRank]) -> list[str]:
        return [problem for step in part.trace.steps if (problem := _misfit(part, step, numbers))]

    best, numbers = problems_of(given), dict(given)
    for name, style in product(tried, options):
        if len(fewer := problems_of({**numbers, name: style})) < len(best):
            best, numbers = fewer, {**numbers, name: style}
    problems = list(dict.fromkeys(best))
    more = f"; and {len(problems) - _MOST_LINES} more" if len(problems) > _MOST_LINES else ""
    return "; ".join(problems[:_MOST_LINES]) + more


def _misfit(part: ShardedRegion, step: TraceStep, numbers: Mapping[str, PerRank]) -> str:
    """Return why a step does not request the required shape on every rank; "" if it does."""
    for number, dim in _misfits(part, step, numbers):
        if step.kind == "split":
            return f"{step.at} splits features into {list(step.requested)}: pass the number of pieces instead"
        if step.kind == "piece":
            first, last = step.requested
            return f"{step.at} picks features {first}:{last}, but on a rank {number} is a different one"
        shape = f"{step.at} requests the shape {list(step.requested)}"
        return f"{shape}, but a rank has less than {int(number)} in dimension {dim}: use -1"
    return ""


def _misfits(part: ShardedRegion, step: TraceStep, numbers: Mapping[str, PerRank]) -> Iterator[tuple[int, int]]:
    """Yield the numbers that a step requests, and their dimensions, if they are wrong on a rank."""
    for rank in range(part.size if step.requested and step.outputs else 0):
        for dim, number, expected in _expected(part, step, rank):
            try:
                own = length_at(number, _rank_values(part, number, numbers, rank))
            except ZeroDivisionError:  # by a number of heads that is 0 on a rank
                own = UNKNOWN_LENGTH
            if own != expected:
                yield number, dim


def _is_elsewhere(part: ShardedRegion, step: TraceStep, names: tuple[str, ...]) -> bool:
    return bool(step.requested) and not _attributes(step).isdisjoint(names) and step not in part.trace.steps


def _expected(part: ShardedRegion, step: TraceStep, rank: int) -> Iterator[tuple[int, int, int]]:
    """Yield the dimension, the number that a step requests, and the number required on a rank."""
    if step.kind == "split":
        dim = step.dim % len(part.model.shapes[step.inputs[0]])
        for number, value in zip(step.requested, step.outputs, strict=False):
            if dim < len(part.model.shapes[value]) and part.model.shapes[value][dim] == number:
                yield dim, number, part.own(value, dim, rank)
        return
    if step.kind == "piece":
        yield from ((step.dim, number, own) for number, own in zip(step.requested, part.ends(step, rank), strict=True))
        return
    shape = part.model.shapes[step.outputs[0]]
    for dim, number in enumerate(step.requested if len(step.requested) == len(shape) else ()):
        if number != -1 and shape[dim] != UNKNOWN_LENGTH:
            yield dim, number, part.own(step.outputs[0], dim, rank)


def _rank_values(part: ShardedRegion, length: int, numbers: Mapping[str, PerRank], rank: int) -> dict[Source, int]:
    known: dict[Source, int] = {}
    for source in sources_of(length):
        first, second = source
        if isinstance(first, int) and isinstance(second, int):
            known[source] = part.own(first, second, rank)
        elif (name := attribute(source)) in numbers:
            known[source] = numbers[name].own(part.model.numbers[name], rank, part.size)
    return known


def _attributes(step: TraceStep) -> set[str]:
    """Return the module attributes from which a step's numbers were computed."""
    return {one for number in step.requested for one in _attributes_of(number)}


def _attributes_of(length: int) -> set[str]:
    return {attribute(one) for one in sources_of(length) if isinstance(one[0], str)}


def _used_attributes(trace: ModelTrace) -> set[str]:
    return {attribute(one) for one in trace.used if isinstance(one[0], str)}
