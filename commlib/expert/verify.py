"""Verify: hold what experts among ranks compute against a dense mixture, without any exchange, of the gathered ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from commlib.comparison.agreement import together
from commlib.dtypes import Array
from commlib.expert.ranks import ExpertRanks
from commlib.expert.routing import Routing
from commlib.sharding.axis import Axis
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.checks.differences import TOLERANCES, Pair, compare

ROUTERS = TOLERANCES["float32"]
"""Routers compute in float32 whatever else is computed in."""


@dataclass(slots=True)
class DenseRun:
    """One forward and backward of a model: outputs of its mixtures and its own, in order, and gradients by name.

    experts: gradients of stacks: of this rank's experts, or of all experts by this rank's tokens. scale: of the terms
    of a router's gradient, which cancel where all experts are the same; 0 if all gradients are there.
    """

    values: list[tuple[str, Array]] = field(default_factory=list)
    gradients: dict[str, Array] = field(default_factory=dict)
    experts: dict[str, Array] = field(default_factory=dict)
    scale: float = 0.0

    def scale_by(self, inputs: Array, outputs: Array, gradients: Array) -> None:
        """Take it from what a mixture was given and gave, and the gradients of that."""
        own = np.abs((np.asarray(outputs, np.float64) * gradients).sum(-1))
        self.scale = float((own * np.abs(np.asarray(inputs, np.float64)).max(-1, initial=0.0)).sum())


def compare_dense(
    ranks: ExpertRanks,
    own: DenseRun,
    dense: DenseRun,
    shards: Mapping[str, tuple[Shard, ExpertRanks]],
    tolerance: float | None = None,
) -> None:
    """Raise UsageError on all ranks if experts among ranks computed something else than all of them on each rank.

    ranks: of the first mixture. shards: of the stacks of experts by their names, and who shares them. Collective.
    """
    pairs = [Pair(what, value, whole) for (what, value), (_, whole) in zip(own.values, dense.values, strict=True)]
    every = [*dense.gradients.values(), *dense.experts.values()]
    largest = max((float(np.abs(one).max()) for one in every if one.size), default=0.0)
    floor = max(largest, dense.scale) / 100
    for name, gradient in own.gradients.items():
        pairs.append(Pair(f"the gradient of {name}", gradient, dense.gradients[name], floor=floor))
    for name, gradient in own.experts.items():
        shard, among = shards[name]
        whole: Array = among.axis.comm.all_reduce(dense.experts[name])  # by the tokens of all of them
        pairs.append(Pair(f"the gradient of {name}", gradient, whole, shard=shard, floor=floor))
    if tolerance is None:
        names = {pair.own.dtype.name for pair in pairs}
        tolerance = max(ROUTERS, *(TOLERANCES.get(name, 0.0) for name in names))

    def compared() -> None:
        compare(Axis(ranks.data), pairs, tolerance, against="a dense mixture's")

    if ranks.tensor is None:
        compared()
    else:
        together(ranks.tensor.comm, compared)


def mask_of(routing: Routing, tokens: int) -> Array:
    """Return which token has which expert, bool [tokens, experts]."""
    found = np.zeros((tokens, len(routing.counts)), np.bool_)
    found[routing.tokens, np.repeat(np.arange(len(routing.counts)), routing.counts)] = True
    return found
