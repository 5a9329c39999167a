"""Same parts: the ranks among which weights are averaged, or given to one another, as their marks tell.

A weight that is divided along an axis of a mesh knows that mesh, and so which ranks have the same part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from commlib.communicator import Communicator
from commlib.data_parallel.mesh_axes import DATA_AXES, data_axes
from commlib.data_parallel.parameter_check import Gathers
from commlib.errors import UsageError
from commlib.functional.shards import Shard, world_ranks
from commlib.mesh_groups import Mesh

_ALONE = "ranks alone"


@dataclass(frozen=True, slots=True)
class SameParts:
    """The ranks of a mesh that have the same parts as this one, and other data. axes: along which they are."""

    mesh: Mesh
    axes: tuple[str, ...]
    comm: Communicator

    def root(self, rank: int) -> int:
        """Return which of them stands for a rank of the world: that with its place along the axes."""
        ranks = world_ranks(self.mesh.comm)
        if rank not in ranks:
            raise UsageError(f"root must be one of the ranks {list(ranks)} of the mesh, got {rank}")
        return self.mesh.shape.coordinate(ranks.index(rank), *self.axes) if self.axes else 0


def same_parts(what: str, shards: Iterable[tuple[str, Shard | None]], everyone: Gathers) -> SameParts | None:
    """Return the ranks that have the same parts of weights; None where nothing is divided, or no mesh is known.

    shards: by names. everyone: all ranks of the world, over which this is collective: one message. Raises UsageError
    on all ranks if some have divided weights of a mesh, and others have not.
    """
    comms = [shard.axis.comm for _, shard in shards if shard is not None and not shard.is_local]
    mesh = _mesh_of(comms, everyone)
    own = "" if not comms else "?" if mesh is None else str(mesh.shape)
    said: list[Any] = everyone.all_gather_object(own)
    if len(set(said)) > 1:
        alike = [rank for rank, text in enumerate(said) if text == said[0]]
        raise UsageError(
            f"{what}: ranks {alike} have {'weights that are' if said[0] else 'no weights that are'} divided along an "
            "axis of a mesh, and others are not like them: say among which ranks, by mesh= or comm=mesh['dp']"
        )
    if mesh is None:
        return None
    if not any(axis in mesh for axis in DATA_AXES):
        return SameParts(mesh, (), _alone(mesh))
    axes = data_axes(mesh)
    return SameParts(mesh, axes, mesh[axes])


def _mesh_of(comms: Iterable[Communicator], everyone: Gathers) -> Mesh | None:
    """Return the one mesh that communicators are of, if it has all ranks."""
    found = {id(mesh): mesh for comm in comms for mesh in [comm.kept.get("mesh")]}
    if len(found) != 1:
        return None
    (mesh,) = found.values()
    return mesh if isinstance(mesh, Mesh) and mesh.comm.size == everyone.size else None


def _alone(mesh: Mesh) -> Communicator:
    """Return a group of this rank. Collective over the mesh when first asked for."""
    if _ALONE not in mesh.kept:
        (mesh.kept[_ALONE],) = mesh.comm.split_all([(mesh.comm.rank, 0, f"{mesh.comm.name}.alone")])
    found: Communicator = mesh.kept[_ALONE]
    return found
