"""Ranks with the same shards: the group in which weights are averaged or broadcast, found from the weights' shards.

A weight that is sharded along an axis of a mesh refers to that mesh, which determines the ranks with the same shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import GatherRanks
from commlib.errors import UsageError
from commlib.mesh_groups import Mesh
from commlib.sharding.data_axes import DATA_AXES, data_axes
from commlib.sharding.shards import Shard, world_ranks

_ALONE = "ranks alone"


@dataclass(frozen=True, slots=True)
class ShardReplicas:
    """The ranks of a mesh with the same shards as this rank, and other data. axes: the axes that they span."""

    mesh: Mesh
    axes: tuple[str, ...]
    comm: Communicator

    def root(self, rank: int) -> int:
        """Return the root's rank in this group, for a rank of the world."""
        return place_of_root(self.mesh, self.axes, rank)


def find_shard_replicas(
    what: str, shards: Iterable[tuple[str, Shard | None]], everyone: GatherRanks
) -> ShardReplicas | None:
    """Return the ranks that have the same shards of weights; None if nothing is sharded, or no mesh is known.

    shards: by names. everyone: all ranks of the world, over which this is collective: one message. Raises UsageError
    on all ranks if some have weights sharded over a mesh, and others do not.
    """
    own_shards = list(shards)
    mesh = mesh_of(own_shards, everyone.size)
    own = "" if not _axes_of(own_shards) else "?" if mesh is None else str(mesh.shape)
    reports: list[Any] = everyone.all_gather_object(own)
    if len(set(reports)) > 1:
        alike = [rank for rank, text in enumerate(reports) if text == reports[0]]
        raise UsageError(
            f"{what}: ranks {alike} have {'weights' if reports[0] else 'no weights'} that are sharded along an "
            "axis of a mesh, but other ranks differ. Pass mesh=mesh or ranks=mesh['dp']"
        )
    if mesh is None:
        return None
    axes = axes_of_data(mesh)
    return ShardReplicas(mesh, axes, mesh[axes] if axes else _alone(mesh))


def mesh_of(shards: Iterable[tuple[str, Shard | None]], size: int) -> Mesh | None:
    """Return the mesh of the sharded weights, if there is exactly one, and it has all ranks of the world."""
    meshes = {id(mesh): mesh for comm in _axes_of(shards) for mesh in [comm.cached.get("mesh")]}
    if len(meshes) != 1:
        return None
    (mesh,) = meshes.values()
    return mesh if isinstance(mesh, Mesh) and mesh.comm.size == size else None


def axes_of_data(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh along which ranks have other data; none if each rank trains separately."""
    return data_axes(mesh) if any(axis in mesh for axis in DATA_AXES) else ()


def place_of_root(mesh: Mesh, axes: tuple[str, ...], rank: int) -> int:
    """Return the rank of a group along axes that acts for a rank of the world: the one with its coordinates along them.

    Raises UsageError for an invalid rank.
    """
    ranks = world_ranks(mesh.comm)
    if rank not in ranks:
        raise UsageError(f"root must be one of the ranks {list(ranks)} of the mesh, got {rank}")
    return mesh.shape.coordinate(ranks.index(rank), *axes) if axes else 0


def find_acting_rank(mesh: Mesh, axes: tuple[str, ...], rank: int) -> int:
    """Return the rank of the world in this rank's group along axes that acts for `rank`: see `place_of_root`."""
    place, ranks = place_of_root(mesh, axes, rank), world_ranks(mesh.comm)
    return ranks[mesh.shape.group(mesh.comm.rank, *axes)[place] if axes else mesh.comm.rank]


def _axes_of(shards: Iterable[tuple[str, Shard | None]]) -> list[Communicator]:
    return [shard.axis.comm for _, shard in shards if shard is not None and not shard.is_local]


def _alone(mesh: Mesh) -> Communicator:
    """Return a group of this rank only. Collective over the mesh at the first call."""
    if _ALONE not in mesh.cached:
        (mesh.cached[_ALONE],) = mesh.comm.split_all([(mesh.comm.rank, 0, f"{mesh.comm.name}.alone")])
    comm: Communicator = mesh.cached[_ALONE]
    return comm
