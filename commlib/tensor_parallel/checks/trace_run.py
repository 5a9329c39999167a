"""Traced runs: record one forward and backward of a model, value by value, and compare two of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.compare import ComparedPair, compare
from commlib.tensor_parallel.placements import COMPUTED, UNKNOWN, Placement
from commlib.tensor_parallel.rules import check
from commlib.tensor_parallel.styles import Style
from commlib.tensor_parallel.trace import ModelTrace, TraceStep

FROM_OUTSIDE = ("given", "constant", "weight", "unseen", "shape")
"""Kinds of steps without a result to compare."""


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A trace, its values by number, and the gradients of inputs ("input 0") and of weights, by name.

    shards: of the sharded weights. shardings: of the outputs of sharded layers, by name. draws: whether it has drawn
    random numbers. results: the Python numbers that it returned. communicates: whether ranks communicated outside of
    layers. hides: whether sharded layers ran where they could not be traced. error: the exception that ended it.
    is_custom: whether it has functions between layers with a backward of their own. arriving: gradients of layers'
    results, by value number, from the operations between those layers and the next ones; None if not requested, or if
    there are none. zeros: weights that were replaced by placeholders, see `substitute_weights`.
    """

    trace: ModelTrace
    values: Sequence[Array]
    gradients: Mapping[str, Array | None]
    shards: Mapping[str, Shard]
    shardings: Mapping[str, Sharding]
    draws: bool = False
    results: tuple[float, ...] = ()
    communicates: bool = False
    hides: bool = False
    error: Exception | None = None
    is_custom: bool = False
    arriving: Mapping[int, Array] | None = None
    zeros: frozenset[str] = frozenset()

    @property
    def is_finite(self) -> bool:
        """Whether it ended without an error, and all results of the model are finite."""
        floats = [self.values[value] for value in self.trace.outputs if self.values[value].dtype.kind == "f"]
        return self.error is None and all(bool(np.isfinite(one).all()) for one in floats)


@dataclass(frozen=True, slots=True)
class OutputPlacements:
    """Placement of the outputs of a model, and their unsharded shapes.

    zeros: weights that are zeros in the unsharded model, and are replaced by placeholders; None: not checked.
    """

    axis: ParallelAxis | None
    states: Sequence[Placement]
    shapes: Sequence[tuple[int, ...]]
    zeros: frozenset[str] | None = None

    def weights(self, at: int, shape: tuple[int, ...]) -> Array:
        """Return the factors on the elements of an output in the loss, which are the same in every run.

        shape: of the output here. Collective over the axis for a sharded output.
        """
        whole = self.shapes[at] if self.shapes else shape
        values = np.random.default_rng(at).standard_normal(whole)
        if self.axis is None or not self.states[at].is_divided:
            return values
        dim = self.states[at].dim
        lengths = self.axis.comm.all_gather_object(shape[dim])
        start = sum(lengths[: self.axis.rank])
        return values[(slice(None),) * dim + (slice(start, start + shape[dim]),)]


WHOLE = OutputPlacements(None, (), ())


def outputs_of(whole: TracedRun, styles: Mapping[str, Style], axis: ParallelAxis) -> OutputPlacements:
    """Return the placement of the outputs of a model with these styles, from an unsharded run of it."""
    states = check(whole.trace, styles, divided_output=True, size=axis.size).states
    places = whole.trace.outputs
    shapes = [whole.trace.shapes[value] for value in places]
    return OutputPlacements(axis, [states[value] for value in places], shapes, whole.zeros)


def compare_runs(
    axis: ParallelAxis,
    whole: TracedRun,
    own: TracedRun,
    styles: Mapping[str, Style],
    tolerance: float | None = None,
    *,
    divided_output: bool = False,
) -> None:
    """Raise UsageError on all ranks if a sharded model's run differs from the unsharded one. Collective.

    Compared are, in this order: the results of layers, and of operations between them if both runs had the same ones,
    then gradients of inputs and of weights. Values of unknown placement are not compared, except those kept after the
    call, which must be unsharded unless divided_output is given.
    """
    states = check(whole.trace, styles, divided_output=True, size=axis.size).states
    saved = set() if divided_output else set(whole.trace.retained) - whole.trace.detached
    ends = {value: COMPUTED for value in saved if states[value] == UNKNOWN and whole.trace.maker(value).inputs}
    compare(axis, [*_values(axis, whole, own, {**states, **ends}), *_gradients(whole, own)], tolerance)


def _values(
    axis: ParallelAxis, whole: TracedRun, own: TracedRun, states: Mapping[int, Placement]
) -> Iterator[ComparedPair]:
    for step, local in _aligned(axis, whole.trace, own.trace):
        for value, part in zip(step.outputs, local.outputs, strict=False):
            state, arrays = states[value], (own.values[part], whole.values[value])
            is_outside = step.kind in FROM_OUTSIDE and not step.inputs
            if is_outside or state.name in ("unknown", "partial") or state.inner:
                continue
            if not state.is_divided:
                yield ComparedPair(step.where, *arrays)
            elif state.copies(axis.size) > 1:
                heads = Sharding(arrays[1].shape, state.dim, (), state.units, shared=True)
                if arrays[0].shape == heads.local(axis.rank, axis.size):  # else repeated for the rank's own heads
                    yield ComparedPair(step.where, *arrays, shard=Shard(axis, heads))
            elif state.parts == 1:
                yield ComparedPair(step.where, *arrays, dim=state.dim)
            elif given := own.shardings.get(step.layer):
                features = Sharding(arrays[1].shape, state.dim, given.parts, given.units, shared=given.shared)
                yield ComparedPair(step.where, *arrays, shard=Shard(axis, features))


def _aligned(axis: ParallelAxis, whole: ModelTrace, own: ModelTrace) -> Iterator[tuple[TraceStep, TraceStep]]:
    """Yield the matching steps of two runs: all, or only the calls of layers if other steps differ on any rank."""
    both = [[step for step in trace.steps if step.kind not in FROM_OUTSIDE] for trace in (whole, own)]
    lines = [[(step.layer, step.kind) for step in steps] for steps in both]
    if not all(axis.comm.all_gather_object(lines[0] == lines[1])):
        both = [[step for step in steps if step.layer] for steps in both]
    yield from ((step, part) for step, part in zip(*both, strict=False) if step.layer == part.layer)


def _gradients(whole: TracedRun, own: TracedRun) -> Iterator[ComparedPair]:
    largest = max(
        (float(np.abs(each).max()) for each in whole.gradients.values() if each is not None and each.size), default=0.0
    )
    for name, expected in whole.gradients.items():
        gradient, what = own.gradients[name], f"the gradient of {name}"
        if gradient is None and expected is None:
            continue
        if gradient is None or expected is None:
            raise UsageError(f"verify: {what} exists in only one of the two models")
        yield ComparedPair(what, gradient, expected, shard=own.shards.get(name), floor=largest / 100)
