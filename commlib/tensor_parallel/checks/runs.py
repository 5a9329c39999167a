"""Runs: one forward and backward of a model, value by value, and two of them held against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.differences import Pair, compare
from commlib.tensor_parallel.rules import check
from commlib.tensor_parallel.states import COMPUTED, UNKNOWN, State
from commlib.tensor_parallel.styles import Style
from commlib.tensor_parallel.trace import Step, Trace

FROM_OUTSIDE = ("given", "constant", "weight", "unseen", "shape")
"""Kinds of steps that compute nothing which could be compared."""


@dataclass(frozen=True, slots=True)
class Run:
    """A trace, its values by their numbers, and the gradients of inputs ("input 0") and of weights, by name.

    shards: of the weights that are divided. shardings: of the outputs of layers that divide them, by name. draws: it
    has drawn random numbers. results: the numbers of Python that it returned. communicates: ranks did so outside of
    layers. hides: divided layers ran where they could not be seen. error: what it failed with, after its trace.
    is_custom: it has functions between layers with a backward of their own. arriving: gradients of layers' results, by
    the numbers of these, made by what lies between those layers and the next ones; None if nobody asked, or none is.
    zeros: weights for which others stood in, see `stand_in`.
    """

    trace: Trace
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
        """Whether it came to its end, and all results of the model are numbers."""
        floats = [self.values[value] for value in self.trace.outputs if self.values[value].dtype.kind == "f"]
        return self.error is None and all(bool(np.isfinite(one).all()) for one in floats)


@dataclass(frozen=True, slots=True)
class Outputs:
    """How the outputs of a model lie on the ranks, and the shapes of the whole.

    zeros: weights that are zeros in the whole, and others stand in for them; None: nobody has looked.
    """

    axis: Axis | None
    states: Sequence[State]
    shapes: Sequence[tuple[int, ...]]
    zeros: frozenset[str] | None = None

    def weights(self, at: int, shape: tuple[int, ...]) -> Array:
        """Return numbers by which the elements of an output are multiplied in the loss: the same in every run.

        shape: of the output here. Collective over the axis for an output that is divided.
        """
        whole = self.shapes[at] if self.shapes else shape
        found = np.random.default_rng(at).standard_normal(whole)
        if self.axis is None or not self.states[at].is_divided:
            return found
        dim = self.states[at].dim
        lengths = self.axis.comm.all_gather_object(shape[dim])
        start = sum(lengths[: self.axis.rank])
        return found[(slice(None),) * dim + (slice(start, start + shape[dim]),)]


WHOLE = Outputs(None, (), ())


def outputs_of(whole: Run, styles: Mapping[str, Style], axis: Axis) -> Outputs:
    """Return how the outputs of a model with these styles lie, by a run of the model that is not divided."""
    states = check(whole.trace, styles, divided_output=True, size=axis.size).states
    places = whole.trace.outputs
    shapes = [whole.trace.shapes[value] for value in places]
    return Outputs(axis, [states[value] for value in places], shapes, whole.zeros)


def compare_runs(
    axis: Axis,
    whole: Run,
    own: Run,
    styles: Mapping[str, Style],
    tolerance: float | None = None,
    *,
    divided_output: bool = False,
) -> None:
    """Raise UsageError on all ranks if a divided model computed something else than the undivided one. Collective.

    What is compared, in this order: the results of layers, and of operations between them if the same ones ran, then
    gradients of inputs and of weights. Of what is unknown nothing is claimed, but that it is whole where it is kept
    after the call, unless divided_output is given.
    """
    states = check(whole.trace, styles, divided_output=True, size=axis.size).states
    kept = set() if divided_output else set(whole.trace.kept) - whole.trace.detached
    ends = {value: COMPUTED for value in kept if states[value] == UNKNOWN and whole.trace.maker(value).inputs}
    compare(axis, [*_values(axis, whole, own, {**states, **ends}), *_gradients(whole, own)], tolerance)


def _values(axis: Axis, whole: Run, own: Run, states: Mapping[int, State]) -> Iterator[Pair]:
    for step, local in _aligned(axis, whole.trace, own.trace):
        for value, part in zip(step.outputs, local.outputs, strict=False):
            state, arrays = states[value], (own.values[part], whole.values[value])
            is_outside = step.kind in FROM_OUTSIDE and not step.inputs
            if is_outside or state.name in ("unknown", "partial") or state.inner:
                continue
            if not state.is_divided:
                yield Pair(step.where, *arrays)
            elif state.copies(axis.size) > 1:
                heads = Sharding(arrays[1].shape, state.dim, (), state.units, shared=True)
                if arrays[0].shape == heads.local(axis.rank, axis.size):  # else each rank has repeated it for its own
                    yield Pair(step.where, *arrays, shard=Shard(axis, heads))
            elif state.parts == 1:
                yield Pair(step.where, *arrays, dim=state.dim)
            elif given := own.shardings.get(step.layer):
                features = Sharding(arrays[1].shape, state.dim, given.parts, given.units, shared=given.shared)
                yield Pair(step.where, *arrays, shard=Shard(axis, features))


def _aligned(axis: Axis, whole: Trace, own: Trace) -> Iterator[tuple[Step, Step]]:
    """Yield the steps of two runs that belong together: all, or if they differ on any rank the calls of layers."""
    both = [[step for step in trace.steps if step.kind not in FROM_OUTSIDE] for trace in (whole, own)]
    lines = [[(step.layer, step.kind) for step in steps] for steps in both]
    if not all(axis.comm.all_gather_object(lines[0] == lines[1])):
        both = [[step for step in steps if step.layer] for steps in both]
    yield from ((step, part) for step, part in zip(*both, strict=False) if step.layer == part.layer)


def _gradients(whole: Run, own: Run) -> Iterator[Pair]:
    largest = max(
        (float(np.abs(each).max()) for each in whole.gradients.values() if each is not None and each.size), default=0.0
    )
    for name, expected in whole.gradients.items():
        came, what = own.gradients[name], f"the gradient of {name}"
        if came is None and expected is None:
            continue
        if came is None or expected is None:
            raise UsageError(f"verify: {what} is there in one of the two models alone")
        yield Pair(what, came, expected, shard=own.shards.get(name), floor=largest / 100)
