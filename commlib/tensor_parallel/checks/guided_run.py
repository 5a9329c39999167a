"""Guided run: inputs and outputs of each layer in one rank's run that is compared with an unsharded run."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding, parts_of
from commlib.tensor_parallel.checks.trace_run import TracedRun
from commlib.tensor_parallel.placements import COMPUTED, Placement
from commlib.tensor_parallel.rules import CheckedPlan
from commlib.tensor_parallel.styles import Column, Row, Sequence, Style, Vocabulary
from commlib.tensor_parallel.trace import TraceStep

_GUIDED = ("product", "table", "attention")
"""Kinds of layers whose inputs are unsharded, or determined by a style; see `is_guided` for others."""


def is_guided(step: TraceStep) -> bool:
    """Return whether a step is a layer of these kinds, or one whose weights are sharded with its input features."""
    return bool(step.layer) and (step.kind in _GUIDED or (step.weights and step.dims[0] >= 0))


class GuidedRun:
    """Gives an adapter the inputs of each layer call, and the part of its result to keep.

    Layers are called with their inputs of the unsharded run, so that a difference in one stretch of the model does not
    spread, and rounding does not grow. cuts: the model is not sharded, layers that a plan shards return full results,
    and the run continues with this rank's part of them: it needs no other rank.
    """

    def __init__(
        self, axis: ParallelAxis, whole: TracedRun, styles: Mapping[str, Style], checked: CheckedPlan, *, cuts: bool
    ) -> None:
        self.whole, self.cuts, self._axis = whole, cuts, axis
        self._styles, self._checked = styles, checked
        self._calls: dict[str, list[TraceStep]] = {}
        for step in whole.trace.steps:
            if is_guided(step):
                self._calls.setdefault(step.layer, []).append(step)
        self._call_counts: dict[str, int] = {}

    def begin(self) -> None:
        """Start a run: reset the counts of layer calls."""
        self._call_counts.clear()

    def called(self, layer: str) -> TraceStep | None:
        """Return the unsharded run's step of a layer's next call; None for other layers, or after the last call."""
        calls, at = self._calls.get(layer, ()), self._call_counts.get(layer, 0)
        self._call_counts[layer] = at + 1
        return calls[at] if at < len(calls) else None

    def inputs(self, step: TraceStep) -> tuple[int, ...]:
        """Return the indices of the unsharded run's values to use as the layer's inputs; () to keep its own."""
        takes_whole = expected_input(step, self._styles.get(step.layer), len(self._shape(step.inputs[0]))) == COMPUTED
        return step.inputs if self.cuts or takes_whole else ()

    def part(self, step: TraceStep) -> tuple[int, Items[tuple[int, int]]] | None:
        """Return the part of the layer's first result that the run keeps: a dimension, and the spans of its pieces;
        None for the full result.
        """
        state = self._checked.states[step.outputs[0]]
        if not (self.cuts and state.is_divided):
            return None
        sharding = sharding_of(self._shape(step.outputs[0]), state, self._styles.get(step.layer))
        return state.dim, sharding.spans(self._axis.rank, self._axis.size)

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.whole.trace.shapes[value]


def expected_input(step: TraceStep, style: Style | None, rank: int) -> Placement:
    """Return the placement that a guided layer expects of its input, of `rank` dimensions."""
    if isinstance(style, Sequence) and step.weights and step.dims[0] >= 0:
        return Placement("features", style.dim % max(1, rank))
    if isinstance(style, Row):
        return COMPUTED if style.split else Placement("features", step.dims[0] % max(1, rank))
    sequence = style.sequence if isinstance(style, Column | Vocabulary) and step.kind != "table" else None
    if isinstance(style, Column) and step.kind == "table":
        sequence = style.sequence
    return COMPUTED if sequence is None else Placement("sequence", sequence % max(1, rank))


def sharding_of(shape: tuple[int, ...], state: Placement, style: Style | None) -> Sharding:
    """Return the sharding of a sharded value; style: of the layer that made it."""
    if state.fused and sum(length for length, _ in state.fused) == shape[state.dim]:  # the pieces may be heads by now
        lengths, units = zip(*state.fused, strict=True)
        return Sharding(shape, state.dim, lengths, units, shared=isinstance(style, Column) and style.shares)
    if state.name == "features" and isinstance(style, Column):
        parts = parts_of(state.by, style.parts, shape[state.dim])
        return Sharding(shape, state.dim, parts, style.units, shared=style.shares)
    return Sharding(shape, state.dim)
