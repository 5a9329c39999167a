"""Divisibility: check all weights that a plan shards before any of them is changed."""

from __future__ import annotations

from typing import Any

from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.styles import Style


class Divisibility:
    """The layers and weights to shard among the ranks of an axis. Raises UsageError before the first change."""

    def __init__(self, axis: ParallelAxis) -> None:
        self.axis = axis
        self._layers: dict[int, tuple[str, Style]] = {}
        self._weights: dict[int, tuple[str, Sharding, Any]] = {}  # keeps the weight alive, because its id is the key

    def is_new(self, name: str, layer: Any, style: Style) -> bool:
        """Return whether a layer is new: it may have several names. Raises UsageError."""
        first, known_style = self._layers.setdefault(id(layer), (name, style))
        if known_style != style:
            raise UsageError(f"plan: {name} and {first} are one layer: give them one style")
        return first == name

    def add(self, what: str, weight: Any, before: Shard | None, sharding: Sharding) -> bool:
        """Add a weight to shard; return whether it is not sharded yet. Several layers may share it.

        before: its current shard. Raises UsageError if it is sharded in another way, or has fewer units than there are
        ranks.
        """
        if before is not None and not (before.axis is self.axis and before.sharding == sharding):
            raise UsageError(f"{what} is sharded already, as {before.sharding}: tied weights need one style")
        other, known_sharding, _ = self._weights.setdefault(id(weight), (what, sharding, weight))
        if known_sharding != sharding:
            raise UsageError(
                f"{what} is also {other}, which is sharded as {known_sharding}: tied weights need one style"
            )
        if before is None:
            sharding.check(what, self.axis.size)
        return before is None
