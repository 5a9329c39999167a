"""Seen weights: the shapes that a model's own code finds where it asks a divided weight for one, as a number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel.checks.guide import Guide


class Seen(NamedTuple):
    """A weight, the layer that has it, and the shape that it is to have for who asks; None for that which it has."""

    weight: Any
    layer: str
    shape: tuple[int, ...] | None = None


SeenWeights = Mapping[int, Seen]
"""Weights that are divided, or will be, by their ids."""


def seen_weights(
    found: Iterable[tuple[str, Any, Sharding]], axis: Axis | None = None, guide: Guide | None = None
) -> SeenWeights:
    """Return how weights are seen in a run of the whole, or with a guide of one rank; without an axis, as they are.

    found: (layer, weight, how it is or will be divided). What is compared is what a model does that is not divided with
    what it does once it is, whichever of both is run.
    """
    if axis is None:
        return {id(weight): Seen(weight, layer) for layer, weight, _ in found}
    return {
        id(weight): Seen(weight, layer, sharding.shape if guide is None else sharding.local(axis.rank, axis.size))
        for layer, weight, sharding in found
    }
