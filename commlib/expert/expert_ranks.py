"""Ranks of experts: groups that share experts, replicate them, or have other tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, TypeVar

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.agreement import LayerAgreement
from commlib.errors import UsageError
from commlib.expert.dispatcher import Empty
from commlib.expert.placement import ExpertPlacement
from commlib.mesh_groups import Mesh
from commlib.ranks import Ranks, communicator_of
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.data_axes import data_axes
from commlib.sharding.sharding import NestedSharding, ScatteredRows, Sharding
from commlib.sharding.shards import Shard

_T = TypeVar("_T")

_NOT_DATA = ("tp", "pp")
"""Axes of a mesh along which ranks have the same tokens, or other layers."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRanks:
    """The communicators of one rank's experts. Ranks have different tokens, except along `tensor`.

    axis: ranks among which experts are sharded. replicas: ranks with the same experts as this rank, over which
    gradients are summed; None if there is only this rank. data: all ranks that train together; losses and balance count
    their tokens, and gradients are divided by their number. tensor: ranks with the same tokens, among which each expert
    may be sharded. product: ranks of `axis` and `tensor` together; the index along `tensor` varies fastest.
    """

    axis: ParallelAxis
    replicas: Communicator | None
    data: Communicator
    tensor: ParallelAxis | None = None
    product: ParallelAxis | None = None

    @classmethod
    def of(cls, ranks: MixtureRanks, experts: int, *, empty: Empty = np.empty) -> ExpertRanks:
        """Return the ranks for a mesh: along its axis ep, if it has one, else along a factor of its axis dp.

        A mesh without an axis ep is refactored, dp into edp and ep, which is collective over the mesh: ep is the
        greatest common divisor of the ranks along dp and the experts. Other ranks are the expert axis, and all the
        ranks. empty: allocates result arrays. Raises UsageError.
        """
        if isinstance(ranks, ExpertRanks):
            return ranks
        if isinstance(ranks, ParallelAxis):
            return cls(ranks, None, ranks.comm)
        group = ranks if isinstance(ranks, Mesh) else communicator_of(ranks, "experts")
        # Layers over the same ranks share these communicators.
        key = "experts", _parts(group, experts) if isinstance(group, Mesh) else 0, empty
        if key not in group.cached:
            group.cached[key] = cls._make(group, key[1], empty)
        result: ExpertRanks = group.cached[key]
        return result

    def agree(self, kind: str, name: str, options: Mapping[str, Any]) -> LayerAgreement:
        """Return the agreement on a layer among the expert axis, after comparing it among all ranks that share it.

        Collective. Raises MismatchError on all ranks.
        """
        LayerAgreement(self.data, kind, name).settle("made", options)
        if self.tensor is not None:
            LayerAgreement(self.tensor.comm, kind, name).settle("made", options)
        return LayerAgreement(self.axis.comm, kind, name)

    def first(self, given: _T) -> _T:
        """Return the first rank's value, on all ranks that train together or shard an expert. Collective."""
        result: _T = self.data.all_gather_object(given)[0]
        if self.tensor is not None:
            result = self.tensor.comm.all_gather_object(result)[0]
        return result

    @classmethod
    def _make(cls, ranks: Mesh | Communicator, parts: int, empty: Empty) -> ExpertRanks:
        if isinstance(ranks, Communicator):
            return cls(ParallelAxis(ranks, empty=empty), None, ranks)
        mesh = ranks.refactor({"dp": {"edp": -1, "ep": parts}}) if parts else ranks
        copies = tuple(axis for axis in mesh.axes if axis not in (*_NOT_DATA, "ep"))
        replicas = mesh[copies] if copies and mesh.shape.size(*copies) > 1 else None
        groups = ParallelAxis(mesh["ep"], empty=empty), replicas, mesh[data_axes(mesh)]
        if "tp" not in mesh.axes or mesh.shape.size("tp") == 1:
            return cls(*groups)
        return cls(*groups, ParallelAxis(mesh["tp"], empty=empty), ParallelAxis(mesh["ep", "tp"], empty=empty))


def _parts(mesh: Mesh, experts: int) -> int:
    """Return the factor ep of dp; 0 if the mesh has an axis ep. Raises UsageError."""
    if "ep" in mesh:
        return 0
    if "dp" not in mesh.axes:
        raise UsageError(f"experts are sharded along an axis ep, or a factor of dp; {mesh.shape} has neither axis")
    return gcd(mesh.shape.size("dp"), experts)


MixtureRanks = Ranks | ParallelAxis | ExpertRanks
"""Ranks of experts as users pass them: a mesh of any number of axes, or `Ranks` such as `mesh["ep"]`."""


def place_shard(shard: Shard, owners: tuple[int, ...]) -> Shard:
    """Return this rank's shard of stacks of experts with these owners. The even placement, in contiguous blocks, is
    described as at first, so a state saved at first is recognised.
    """
    shape, is_even = shard.sharding.shape, owners == ExpertPlacement.even(len(owners), max(owners) + 1).owners
    outer: Sharding | ScatteredRows = Sharding(shape, 0) if is_even else ScatteredRows(shape, owners)
    sharding = replace(shard.sharding, outer=outer) if isinstance(shard.sharding, NestedSharding) else outer
    return replace(shard, sharding=sharding)


def shard_for(shape: tuple[int, ...], divided: Sharding | None, ranks: ExpertRanks) -> Shard:
    """Return this rank's shard of stacks of experts, [experts, ...]; divided: sharding of one expert on `tensor`."""
    experts = Sharding(shape, 0)
    if divided is None or ranks.tensor is None or ranks.product is None:
        return Shard(ranks.axis, experts, ranks.replicas, is_local=True)
    inner = Sharding(shape, divided.dim + 1, divided.parts, divided.units)
    return Shard(ranks.product, NestedSharding(experts, inner, ranks.tensor.size), ranks.replicas, is_local=True)
