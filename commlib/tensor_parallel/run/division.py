"""Division: the weights that a plan divides, looked at before any of them is changed."""

from __future__ import annotations

from typing import Any

from commlib.errors import UsageError
from commlib.sharding.axis import Axis
from commlib.sharding.sharding import Sharding
from commlib.sharding.shards import Shard
from commlib.tensor_parallel.styles import Style


class Division:
    """What is to be divided among the ranks of an axis: all of it can be, or UsageError is raised before it begins."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._layers: dict[int, tuple[str, Style]] = {}
        self._weights: dict[int, tuple[str, Sharding, Any]] = {}  # with the weight: its id is taken for so long

    def is_new(self, name: str, layer: Any, style: Style) -> bool:
        """Return whether a layer comes for the first time: it may have several names. Raises UsageError."""
        first, given = self._layers.setdefault(id(layer), (name, style))
        if given != style:
            raise UsageError(f"plan: {name} and {first} are one layer: give them one style")
        return first == name

    def add(self, what: str, weight: Any, before: Shard | None, sharding: Sharding) -> bool:
        """Note that a weight is to be divided; return whether it is not yet. Several layers may share it.

        before: how it is divided already. Raises UsageError if it is divided otherwise, or has fewer units than there
        are ranks.
        """
        if before is not None and not (before.axis is self.axis and before.sharding == sharding):
            raise UsageError(f"{what} is divided already, as {before.sharding}: tied weights need one style")
        other, given, _ = self._weights.setdefault(id(weight), (what, sharding, weight))
        if given != sharding:
            raise UsageError(f"{what} is {other}, too, which is divided as {given}: tied weights need one style")
        if before is None:
            sharding.check(what, self.axis.size)
        return before is None
