"""Optimizers that look at whole weights, and so cannot have a rank's part of one."""

from __future__ import annotations

from collections.abc import Iterable

from commlib.errors import UsageError
from commlib.sharding.shards import Shard

LOOK_AT_WHOLE_WEIGHTS = frozenset({"Adafactor", "LAMB", "LARS", "LBFGS", "Lamb", "Lars", "Muon"})
"""Classes of PyTorch, Keras and others by their names: theirs are norms, factors or products of a whole weight."""


def check_optimizer(optimizer: object, weights: Iterable[tuple[str, Shard | None]]) -> None:
    """Raise UsageError if an optimizer, or what it derives from, looks at whole weights and one has a shard.

    weights: (name, shard or None) of each; not looked at for other optimizers. An axis of one rank is no exception: a
    program does not depend on the number of ranks.
    """
    looks = LOOK_AT_WHOLE_WEIGHTS.intersection(kind.__name__ for kind in type(optimizer).__mro__)
    if not looks:
        return
    for name, shard in weights:
        if shard is not None:
            axis, sharding = shard.axis, shard.sharding
            raise UsageError(
                f"{min(looks)} looks at whole weights, but {name} is divided among ranks: rank {axis.rank} of "
                f"{axis.comm.name} has {sharding.local(axis.rank, axis.size)} of {sharding.shape}. Use an optimizer "
                "that treats each element by itself, such as Adam or SGD"
            )
