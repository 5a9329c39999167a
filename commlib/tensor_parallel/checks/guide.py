"""Guide: how each layer is called in the run of one rank that is held against a run of the whole, value by value."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel.checks.runs import Run
from commlib.tensor_parallel.rules import Checked
from commlib.tensor_parallel.states import COMPUTED, State
from commlib.tensor_parallel.styles import Column, Row, Sequence, Style, Vocabulary
from commlib.tensor_parallel.trace import Step

_GUIDED = ("product", "table", "attention")
"""Kinds of layers that take what is whole, or what a style makes of it; see `is_guided` for others."""


def is_guided(step: Step) -> bool:
    """Return whether a step is a layer of these kinds, or one whose weights are divided with the features it takes."""
    return bool(step.layer) and (step.kind in _GUIDED or (step.weights and step.dims[0] >= 0))


class Guide:
    """Tells an adapter with what to call a layer, and what to keep of its result, call by call.

    Layers are called with what the whole run gave them, so that what differs within one stretch of the model does not
    spread, and rounding does not grow. cuts: the model is not divided, and layers that a plan divides give the whole,
    of which the run goes on with this rank's part: it needs no other rank.
    """

    def __init__(self, axis: Axis, whole: Run, styles: Mapping[str, Style], checked: Checked, *, cuts: bool) -> None:
        self.whole, self.cuts, self._axis = whole, cuts, axis
        self._styles, self._checked = styles, checked
        self._calls: dict[str, list[Step]] = {}
        for step in whole.trace.steps:
            if is_guided(step):
                self._calls.setdefault(step.layer, []).append(step)
        self._made: dict[str, int] = {}

    def begin(self) -> None:
        """Begin a run: no layer has been called."""
        self._made.clear()

    def called(self, layer: str) -> Step | None:
        """Return the whole run's step of the next call of a layer; None for other layers, or if there is none."""
        calls, at = self._calls.get(layer, ()), self._made.get(layer, 0)
        self._made[layer] = at + 1
        return calls[at] if at < len(calls) else None

    def inputs(self, step: Step) -> tuple[int, ...]:
        """Return the numbers of values of the whole run that the layer is to take for its own; () if it keeps them."""
        takes_whole = taken(step, self._styles.get(step.layer), len(self._shape(step.inputs[0]))) == COMPUTED
        return step.inputs if self.cuts or takes_whole else ()

    def part(self, step: Step) -> tuple[int, Items[tuple[int, int]]] | None:
        """Return the part of its first result that the run goes on with: a dimension, and where its pieces begin and
        end; None for all of it.
        """
        state = self._checked.states[step.outputs[0]]
        if not (self.cuts and state.is_divided):
            return None
        found = sharding_of(self._shape(step.outputs[0]), state, self._styles.get(step.layer))
        return state.dim, found.spans(self._axis.rank, self._axis.size)

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.whole.trace.shapes[value]


def taken(step: Step, style: Style | None, rank: int) -> State:
    """Return how a layer that is guided must find its input, of `rank` dimensions, on the ranks."""
    if isinstance(style, Sequence) and step.weights and step.dims[0] >= 0:
        return State("features", style.dim % max(1, rank))
    if isinstance(style, Row):
        return COMPUTED if style.split else State("features", step.dims[0] % max(1, rank))
    sequence = style.sequence if isinstance(style, Column | Vocabulary) and step.kind != "table" else None
    if isinstance(style, Column) and step.kind == "table":
        sequence = style.sequence
    return COMPUTED if sequence is None else State("sequence", sequence % max(1, rank))


def sharding_of(shape: tuple[int, ...], state: State, style: Style | None) -> Sharding:
    """Return which parts of a divided value ranks have; style: of the layer that has made it."""
    if state.fused and sum(length for length, _ in state.fused) == shape[state.dim]:  # they may be heads by now
        lengths, units = zip(*state.fused, strict=True)
        return Sharding(shape, state.dim, lengths, units, shared=isinstance(style, Column) and style.shares)
    if state.name == "features" and isinstance(style, Column):
        parts = parts_of(state.by, style.parts, shape[state.dim])
        return Sharding(shape, state.dim, parts, style.units, shared=style.shares)
    return Sharding(shape, state.dim)
