"""Optimizers that need full weights, and so cannot update a rank's shard of one."""

from __future__ import annotations

from collections.abc import Iterable

from commlib.errors import UsageError
from commlib.sharding.shards import Shard

LOOK_AT_WHOLE_WEIGHTS = frozenset({"Adafactor", "LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon"})
"""Class names of PyTorch, Keras and others: they compute norms, factors or products of a full weight."""


def check_optimizer(optimizer: object, weights: Iterable[tuple[str, Shard | None]]) -> None:
    """Raise UsageError if an optimizer, or a base class of it, needs full weights and one has a shard.

    weights: (name, shard or None) of each; read only for such optimizers. An axis of one rank is no exception: a
    program does not depend on the number of ranks.
    """
    looks = LOOK_AT_WHOLE_WEIGHTS.intersection(kind.__name__ for kind in type(optimizer).__mro__)
    if not looks:
        return
    for name, shard in weights:
        if shard is not None:
            axis, sharding = shard.axis, shard.sharding
            raise UsageError(
                f"{min(looks)} needs full weights, but {name} is sharded among ranks: rank {axis.rank} of "
                f"{axis.comm.name} has {sharding.local(axis.rank, axis.size)} of {sharding.shape}. Use an element-wise "
                "optimizer, such as Adam or SGD"
            )
