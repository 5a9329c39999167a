"""Numbers: which of a model's own numbers, such as heads, must be a rank's, so that the shapes it asks for are. [pure]

Each number in a shape is held against what it has to be on every rank, where some dimensions are shorter. Where it
would be that of the whole, the attributes that it was computed of are tried: each gets the rank's part of its value, as
few of them as do, so that all shapes that the model asks for are right, those which are whole included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, combinations, product

from commlib.schedule.layout import even
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel.equations import UNKNOWN_LENGTH
from commlib.tensor_parallel.lengths import Source, attribute, length_at, sources_of
from commlib.tensor_parallel.states import State
from commlib.tensor_parallel.styles import Column, PerRank, Style
from commlib.tensor_parallel.trace import Step, Trace

_MOST = 6
"""How many attributes are tried."""

_TOLD = 4
"""How many lines of a model are told that keep layers whole."""


class NotPossible(Exception):
    """The reason why layers stay whole."""


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a model that are divided, with the steps between them, the states of values there, styles, and units.

    model: the trace of all of it.
    """

    model: Trace
    trace: Trace
    states: Mapping[int, State]
    styles: Mapping[str, Style]
    units: int
    size: int

    @property
    def shared(self) -> set[int]:
        """Numbers of heads that are fewer than the ranks."""
        divided = [state for state in self.states.values() if state.is_divided]
        found = {state.units for state in divided} | {units for state in divided for _, units in state.fused}
        return {units for units in found if 1 < units < self.size and self.size % units == 0}

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

    def _spans(self, state: State, rank: int) -> tuple[tuple[int, int], ...]:
        """Return where the pieces of a rank begin and end in the whole, along what is fused."""
        parts, units = zip(*state.fused, strict=True)
        whole = Sharding((sum(parts),), 0, parts, tuple(count or self.units for count in units), shared=True)
        return whole.spans(rank, self.size)

    def ends(self, step: Step, rank: int) -> tuple[int, int]:
        """Return what a piece has to ask for on a rank, as it says that in the whole: from the end, too."""
        (first, last), state = step.asked, self.states.get(step.inputs[0])
        if state is None or not (state.fused and state.is_divided and state.dim == step.dim):
            return int(first), int(last)
        parts = [0, *accumulate(part for part, _ in state.fused)]
        own = [0, *accumulate(stop - start for start, stop in self._spans(state, rank))]

        def at(place: int) -> int:
            if place > parts[-1]:
                return place
            return own[parts.index(place % parts[-1] if place < 0 else place)] - (own[-1] if place < 0 else 0)

        return at(int(first)), at(int(last))


def numbers_per_rank(part: Part, given: Mapping[str, PerRank]) -> dict[str, PerRank]:
    """Return the attributes that must be those of a rank. given: those that have been found to be.

    Raises NotPossible where no change of attributes makes all shapes right.
    """
    for source, line in part.trace.used.items():
        value, dim = source
        if isinstance(value, int) and isinstance(dim, int):
            state = part.states.get(value)
            if state is not None and state.is_divided and state.dim == dim:
                raise NotPossible(
                    f"{line}: the length of what is {state} is used as a number, and is another on a rank"
                )
    wrong = [step for step in part.trace.steps if _misfit(part, step, given)]
    if not wrong:
        return {}
    first = {one for step in wrong for asked, _ in _misfits(part, step, given) for one in _attributes_of(asked)}
    able = {one for step in part.trace.steps for one in _attributes(step)}.difference(given, _used(part.trace))
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
    raise NotPossible(_fixed(part, given, tried, options))


def _fixed(part: Part, given: Mapping[str, PerRank], tried: list[str], options: list[PerRank]) -> str:
    """Return what keeps shapes to those of the whole, line by line, whichever numbers are a rank's."""

    def left(numbers: Mapping[str, PerRank]) -> list[str]:
        return [said for step in part.trace.steps if (said := _misfit(part, step, numbers))]

    best, numbers = left(given), dict(given)
    for name, style in product(tried, options):
        if len(fewer := left({**numbers, name: style})) < len(best):
            best, numbers = fewer, {**numbers, name: style}
    said = list(dict.fromkeys(best))
    more = f"; and {len(said) - _TOLD} more" if len(said) > _TOLD else ""
    return "; ".join(said[:_TOLD]) + more


def _misfit(part: Part, step: Step, numbers: Mapping[str, PerRank]) -> str:
    """Return why a step does not ask for what it has to on every rank; "" if it does."""
    for asked, dim in _misfits(part, step, numbers):
        if step.kind == "split":
            return f"{step.at} splits features into {list(step.asked)}: let it say how many pieces"
        if step.kind == "piece":
            return f"{step.at} picks features {step.asked[0]}:{step.asked[1]}, and on a rank {asked} is another one"
        shape = f"{step.at} asks for the shape {list(step.asked)}"
        return f"{shape}: let it say -1 for dimension {dim}, of which a rank has less than {int(asked)}"
    return ""


def _misfits(part: Part, step: Step, numbers: Mapping[str, PerRank]) -> Iterator[tuple[int, int]]:
    """Yield the numbers that a step asks for, and their dimensions, which are not those of a rank."""
    for rank in range(part.size if step.asked and step.outputs else 0):
        for dim, asked, expected in _expected(part, step, rank):
            try:
                own = length_at(asked, _known(part, asked, numbers, rank))
            except ZeroDivisionError:  # by heads of which a rank would have none
                own = UNKNOWN_LENGTH
            if own != expected:
                yield asked, dim


def _is_elsewhere(part: Part, step: Step, names: tuple[str, ...]) -> bool:
    return bool(step.asked) and not _attributes(step).isdisjoint(names) and step not in part.trace.steps


def _expected(part: Part, step: Step, rank: int) -> Iterator[tuple[int, int, int]]:
    """Yield the dimension, the number that a step asks for, and what that has to be on a rank."""
    if step.kind == "split":
        dim = step.dim % len(part.model.shapes[step.inputs[0]])
        for asked, value in zip(step.asked, step.outputs, strict=False):
            if dim < len(part.model.shapes[value]) and part.model.shapes[value][dim] == asked:
                yield dim, asked, part.own(value, dim, rank)
        return
    if step.kind == "piece":
        yield from ((step.dim, asked, own) for asked, own in zip(step.asked, part.ends(step, rank), strict=True))
        return
    shape = part.model.shapes[step.outputs[0]]
    for dim, asked in enumerate(step.asked if len(step.asked) == len(shape) else ()):
        if asked != -1 and shape[dim] != UNKNOWN_LENGTH:
            yield dim, asked, part.own(step.outputs[0], dim, rank)


def _known(part: Part, length: int, numbers: Mapping[str, PerRank], rank: int) -> dict[Source, int]:
    known: dict[Source, int] = {}
    for source in sources_of(length):
        first, second = source
        if isinstance(first, int) and isinstance(second, int):
            known[source] = part.own(first, second, rank)
        elif (name := attribute(source)) in numbers:
            known[source] = numbers[name].own(part.model.numbers[name], rank, part.size)
    return known


def _attributes(step: Step) -> set[str]:
    """Return the attributes of modules of which the numbers that a step asks for were computed."""
    return {one for asked in step.asked for one in _attributes_of(asked)}


def _attributes_of(length: int) -> set[str]:
    return {attribute(one) for one in sources_of(length) if isinstance(one[0], str)}


def _used(trace: Trace) -> set[str]:
    return {attribute(one) for one in trace.used if isinstance(one[0], str)}
