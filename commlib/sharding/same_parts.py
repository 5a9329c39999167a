"""Same parts: the ranks among which weights are averaged, or given to one another, as their marks tell.

A weight that is divided along an axis of a mesh knows that mesh, and so which ranks have the same part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import Gathers
from commlib.errors import UsageError
from commlib.mesh_groups import Mesh
from commlib.sharding.data_axes import DATA_AXES, data_axes
from commlib.sharding.shards import Shard, world_ranks

_ALONE = "ranks alone"


@dataclass(frozen=True, slots=True)
class SameParts:
    """The ranks of a mesh that have the same parts as this one, and other data. axes: along which they are."""

    mesh: Mesh
    axes: tuple[str, ...]
    comm: Communicator

    def root(self, rank: int) -> int:
        """Return which of them stands for a rank of the world."""
        return place_of_root(self.mesh, self.axes, rank)


def same_parts(what: str, shards: Iterable[tuple[str, Shard | None]], everyone: Gathers) -> SameParts | None:
    """Return the ranks that have the same parts of weights; None where nothing is divided, or no mesh is known.

    shards: by names. everyone: all ranks of the world, over which this is collective: one message. Raises UsageError
    on all ranks if some have divided weights of a mesh, and others have not.
    """
    given = list(shards)
    mesh = mesh_of(given, everyone.size)
    own = "" if not _axes_of(given) else "?" if mesh is None else str(mesh.shape)
    said: list[Any] = everyone.all_gather_object(own)
    if len(set(said)) > 1:
        alike = [rank for rank, text in enumerate(said) if text == said[0]]
        raise UsageError(
            f"{what}: ranks {alike} have {'weights that are' if said[0] else 'no weights that are'} divided along an "
            "axis of a mesh, and others are not like them: say among which ranks, by mesh= or comm=mesh['dp']"
        )
    if mesh is None:
        return None
    axes = axes_of_data(mesh)
    return SameParts(mesh, axes, mesh[axes] if axes else _alone(mesh))


def mesh_of(shards: Iterable[tuple[str, Shard | None]], size: int) -> Mesh | None:
    """Return the one mesh along whose axes weights are divided, if there is one, and it has all ranks of the world."""
    found = {id(mesh): mesh for comm in _axes_of(shards) for mesh in [comm.kept.get("mesh")]}
    if len(found) != 1:
        return None
    (mesh,) = found.values()
    return mesh if isinstance(mesh, Mesh) and mesh.comm.size == size else None


def axes_of_data(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes of a mesh along which ranks have other data; none where each rank trains by itself."""
    return data_axes(mesh) if any(axis in mesh for axis in DATA_AXES) else ()


def place_of_root(mesh: Mesh, axes: tuple[str, ...], rank: int) -> int:
    """Return which rank of a group along axes stands for one of the world: that with its place along them.

    Raises UsageError for what is no rank.
    """
    ranks = world_ranks(mesh.comm)
    if rank not in ranks:
        raise UsageError(f"root must be one of the ranks {list(ranks)} of the mesh, got {rank}")
    return mesh.shape.coordinate(ranks.index(rank), *axes) if axes else 0


def stands_for(mesh: Mesh, axes: tuple[str, ...], rank: int) -> int:
    """Return the rank of the world, among those along axes, that stands for another one: see `place_of_root`."""
    place, ranks = place_of_root(mesh, axes, rank), world_ranks(mesh.comm)
    return ranks[mesh.shape.group(mesh.comm.rank, *axes)[place] if axes else mesh.comm.rank]


def _axes_of(shards: Iterable[tuple[str, Shard | None]]) -> list[Communicator]:
    return [shard.axis.comm for _, shard in shards if shard is not None and not shard.is_local]


def _alone(mesh: Mesh) -> Communicator:
    """Return a group of this rank. Collective over the mesh when first asked for."""
    if _ALONE not in mesh.kept:
        (mesh.kept[_ALONE],) = mesh.comm.split_all([(mesh.comm.rank, 0, f"{mesh.comm.name}.alone")])
    found: Communicator = mesh.kept[_ALONE]
    return found
