"""ShardedLayer: what layers with sharded weights have in common."""

from __future__ import annotations

from typing import Any

from commlib.sharding.axis import ParallelAxis
from commlib.sharding.shard_sharing import Sharers, sharers_of
from commlib.sharding.sharding import Sharding
from commlib_torch._shards import ShardedModule
from commlib_torch.tensor._sharding import shard_parameters


class ShardedLayer(ShardedModule):
    """A layer that holds this rank's shards of its weights."""

    axis: ParallelAxis
    style: Any
    sharding: Sharding
    """The sharding of the weight."""
    sharers: Sharers
    """The ranks that share parts of the weight."""

    def shardings(self, what: str, style: Any) -> dict[str, Sharding]:
        """Return the shardings of its weights; `self` may be a plain layer. Raises UsageError if there are none."""
        raise NotImplementedError

    def become(self, what: str, axis: ParallelAxis, style: Any) -> None:
        """Shard a plain layer in place."""
        shardings = self.shardings(what, style)
        shard_parameters(what, self, axis, shardings)
        self.axis, self.style, self.sharding = axis, style, shardings["weight"]
        self.sharers = sharers_of(axis, self.sharding)

    def extra_repr(self) -> str:
        """Describe the sharding."""
        return f"{super().extra_repr()}, {self.style}, {self.axis!r}"
