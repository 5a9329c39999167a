"""Weight shapes in a run: shapes that a model's own code reads from a sharded weight, as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.checks.guided_run import GuidedRun


class WeightShape(NamedTuple):
    """A weight, its layer, and the shape that the model's code reads; None for the weight's actual shape."""

    weight: Any
    layer: str
    shape: tuple[int, ...] | None = None


SeenWeights = Mapping[int, WeightShape]
"""Weights that are or will be sharded, by id."""


def list_weight_shapes(
    weights: Iterable[tuple[str, Any, Sharding]], axis: ParallelAxis | None = None, guide: GuidedRun | None = None
) -> SeenWeights:
    """Return the shapes of weights in an unsharded run, or with a guide in one rank's run; without an axis, no shapes.

    weights: (layer, weight, its current or future sharding). A comparison is always between an unsharded and a sharded
    model, whichever of the two runs.
    """
    if axis is None:
        return {id(weight): WeightShape(weight, layer) for layer, weight, _ in weights}
    return {
        id(weight): WeightShape(
            weight, layer, sharding.shape if guide is None else sharding.local(axis.rank, axis.size)
        )
        for layer, weight, sharding in weights
    }
