"""ExpertRanks: which ranks share experts, which have copies of them, and which have other tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, TypeVar

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.agreement import Agreement
from commlib.errors import UsageError
from commlib.expert.exchange import Empty
from commlib.expert.placement import Placement
from commlib.mesh_groups import Mesh
from commlib.sharding.axis import Axis
from commlib.sharding.data_axes import data_axes
from commlib.sharding.sharding import Nested, Scattered, Sharding
from commlib.sharding.shards import Shard

_T = TypeVar("_T")

_NOT_DATA = ("tp", "pp")
"""Axes of a mesh along which ranks have the same tokens, or other layers."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRanks:
    """The ranks of one rank's experts. All of them have other tokens, but those of `tensor`.

    axis: those among which the experts are divided. replicas: those that have the same experts as this rank, over which
    their gradients are added up; None if there is no other. data: all ranks that train together, whose tokens count in
    losses and balance; gradients are divided by their number. tensor: those, with the same tokens, among which each
    expert may be divided. product: these and those of `axis` together, those of `tensor` the faster.
    """

    axis: Axis
    replicas: Communicator | None
    data: Communicator
    tensor: Axis | None = None
    product: Axis | None = None

    @classmethod
    def of(cls, ranks: Ranks, experts: int, *, empty: Empty = np.empty) -> ExpertRanks:
        """Return those of a mesh: along its axis ep, if it has one, else along its axis dp as far as experts go.

        A mesh whose axis dp has no part ep is refactored, dp into edp and ep, which is collective over the mesh: ep is
        the largest number that divides both the ranks along dp and the experts. A communicator or an axis is that of
        the experts, and all ranks. empty: makes the arrays of results. Raises UsageError.
        """
        if isinstance(ranks, ExpertRanks):
            return ranks
        if isinstance(ranks, Axis):
            return cls(ranks, None, ranks.comm)
        if not isinstance(ranks, Mesh | Communicator):
            raise UsageError(f"experts: expected a mesh, or the communicator of an axis, got {type(ranks).__name__}")
        # Layers of the same ranks share what lies between these.
        key = "experts", 0 if isinstance(ranks, Communicator) else _parts(ranks, experts), empty
        if key not in ranks.kept:
            ranks.kept[key] = cls._found(ranks, key[1], empty)
        found: ExpertRanks = ranks.kept[key]
        return found

    def agree(self, kind: str, name: str, options: Mapping[str, Any]) -> Agreement:
        """Return the agreement on a layer among the ranks of the experts, compared among all that share it. Collective.

        Raises MismatchError on all ranks.
        """
        Agreement(self.data, kind, name).settle("made", options)
        if self.tensor is not None:
            Agreement(self.tensor.comm, kind, name).settle("made", options)
        return Agreement(self.axis.comm, kind, name)

    def first(self, given: _T) -> _T:
        """Return what the first rank gives, on all that train together or divide an expert. Collective."""
        found: _T = self.data.all_gather_object(given)[0]
        if self.tensor is not None:
            found = self.tensor.comm.all_gather_object(found)[0]
        return found

    @classmethod
    def _found(cls, ranks: Mesh | Communicator, parts: int, empty: Empty) -> ExpertRanks:
        if isinstance(ranks, Communicator):
            return cls(Axis(ranks, empty=empty), None, ranks)
        mesh = ranks.refactor({"dp": {"edp": -1, "ep": parts}}) if parts else ranks
        copies = tuple(axis for axis in mesh.axes if axis not in (*_NOT_DATA, "ep"))
        replicas = mesh[copies] if copies and mesh.shape.size(*copies) > 1 else None
        found = Axis(mesh["ep"], empty=empty), replicas, mesh[data_axes(mesh)]
        if "tp" not in mesh.axes or mesh.shape.size("tp") == 1:
            return cls(*found)
        return cls(*found, Axis(mesh["tp"], empty=empty), Axis(mesh["ep", "tp"], empty=empty))


def _parts(mesh: Mesh, experts: int) -> int:
    """Return into how many parts dp is to be divided; 0 if the mesh has an axis ep. Raises UsageError."""
    if "ep" in mesh:
        return 0
    if "dp" not in mesh.axes:
        raise UsageError(f"experts are divided along an axis ep, or a part of dp; {mesh.shape} has neither")
    return gcd(mesh.shape.size("dp"), experts)


Ranks = Mesh | Communicator | Axis | ExpertRanks
"""What users give: a mesh, or the communicator of an axis."""


def placed(shard: Shard, owners: tuple[int, ...]) -> Shard:
    """Return what a rank has of stacks of experts that have these owners. Where neighbours are together, as at first,
    it is said as at first: a state that was saved then is known by that.
    """
    shape, is_even = shard.sharding.shape, owners == Placement.even(len(owners), max(owners) + 1).owners
    outer: Sharding | Scattered = Sharding(shape, 0) if is_even else Scattered(shape, owners)
    sharding = replace(shard.sharding, outer=outer) if isinstance(shard.sharding, Nested) else outer
    return replace(shard, sharding=sharding)


def shard_for(shape: tuple[int, ...], divided: Sharding | None, ranks: ExpertRanks) -> Shard:
    """Return what a rank has of the stacks of all experts, [experts, ...]; divided: how one is, along `tensor`."""
    experts = Sharding(shape, 0)
    if divided is None or ranks.tensor is None or ranks.product is None:
        return Shard(ranks.axis, experts, ranks.replicas, is_local=True)
    inner = Sharding(shape, divided.dim + 1, divided.parts, divided.units)
    return Shard(ranks.product, Nested(experts, inner, ranks.tensor.size), ranks.replicas, is_local=True)
