"""Verification: compare experts sharded among ranks with a dense mixture of the gathered experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from commlib.comparison.agreement import run_together
from commlib.dtypes import Array
from commlib.expert.expert_ranks import ExpertRanks
from commlib.expert.routing import Routing
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.compare import TOLERANCES, ComparedPair, compare

ROUTERS = TOLERANCES["float32"]
"""Tolerance of routers, which compute in float32 whatever the dtype of the model."""


@dataclass(slots=True)
class DenseRun:
    """One forward and backward of a model: outputs of its mixtures and of the model, in order, and gradients by name.

    experts: gradients of stacks: of this rank's experts, or of all experts from this rank's tokens. scale: of the terms
    of a router's gradient, which cancel if all experts are the same; 0 if gradients are complete.
    """

    values: list[tuple[str, Array]] = field(default_factory=list)
    gradients: dict[str, Array] = field(default_factory=dict)
    experts: dict[str, Array] = field(default_factory=dict)
    scale: float = 0.0

    def scale_by(self, inputs: Array, outputs: Array, gradients: Array) -> None:
        """Set the scale from the inputs and outputs of a mixture and the gradients of the outputs."""
        own = np.abs((np.asarray(outputs, np.float64) * gradients).sum(-1))
        self.scale = float((own * np.abs(np.asarray(inputs, np.float64)).max(-1, initial=0.0)).sum())


def compare_dense(
    ranks: ExpertRanks,
    own: DenseRun,
    dense: DenseRun,
    shards: Mapping[str, tuple[Shard, ExpertRanks]],
    tolerance: float | None = None,
) -> None:
    """Raise UsageError on all ranks if the sharded experts differ from a dense mixture on each rank.

    ranks: of the first mixture. shards: by the names of the stacks of experts, with the ranks that share them.
    Collective.
    """
    pairs = [
        ComparedPair(what, value, whole) for (what, value), (_, whole) in zip(own.values, dense.values, strict=True)
    ]
    every = [*dense.gradients.values(), *dense.experts.values()]
    largest = max((float(np.abs(one).max()) for one in every if one.size), default=0.0)
    floor = max(largest, dense.scale) / 100
    for name, gradient in own.gradients.items():
        pairs.append(ComparedPair(f"the gradient of {name}", gradient, dense.gradients[name], floor=floor))
    for name, gradient in own.experts.items():
        shard, among = shards[name]
        whole: Array = among.axis.comm.all_reduce(dense.experts[name])  # over the tokens of all ranks
        pairs.append(ComparedPair(f"the gradient of {name}", gradient, whole, shard=shard, floor=floor))
    if tolerance is None:
        names = {pair.own.dtype.name for pair in pairs}
        tolerance = max(ROUTERS, *(TOLERANCES.get(name, 0.0) for name in names))

    def compared() -> None:
        compare(ParallelAxis(ranks.data), pairs, tolerance, against="a dense mixture's")

    if ranks.tensor is None:
        compared()
    else:
        run_together(ranks.tensor.comm, compared)


def mask_of(routing: Routing, tokens: int) -> Array:
    """Return a mask of the assignments, bool [tokens, experts]."""
    mask = np.zeros((tokens, len(routing.counts)), np.bool_)
    mask[routing.tokens, np.repeat(np.arange(len(routing.counts)), routing.counts)] = True
    return mask
