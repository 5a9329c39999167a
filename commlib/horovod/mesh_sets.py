"""Process sets of communicators and of the axes of a mesh, for reductions by name over one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from commlib.errors import UsageError
from commlib.horovod.process_sets import ProcessSet, global_process_set, registry, require_world
from commlib.ranks import Ranks, communicator_of

if TYPE_CHECKING:
    from commlib.mesh_groups import Mesh


def process_set_along(mesh: Mesh, axes: Sequence[str], what: str) -> ProcessSet:
    """Return the process set of this rank's group along axes: of this rank alone if there are none.

    The set stays valid without the mesh. Collective over all ranks.

    The sets of all groups are registered, unless they already are; users may add sets of the same ranks. Raises
    UsageError on all ranks if the mesh is not over all ranks, MismatchError on all ranks if their meshes have different
    groups.
    """
    world = require_world()
    ranks = mesh.comm.all_gather_object(world.rank)  # the mesh may order the ranks differently
    if len(ranks) < world.size:
        raise UsageError(
            f"{what}: {mesh.shape} is over {len(ranks)} of {world.size} ranks, but all ranks must register its groups "
            "as process sets together: make a mesh over all ranks, or pass process_set="
        )
    groups = mesh.shape.groups(*axes) if axes else [(place,) for place in range(len(ranks))]
    return _register([[ranks[place] for place in group] for group in groups], what)


def process_set_over(ranks: Ranks, what: str) -> ProcessSet:
    """Return the process set of `ranks`. Collective over all ranks, each with its own group, unless `ranks` is a set.

    Raises UsageError for other values, MismatchError on all ranks if their groups overlap.
    """
    if isinstance(ranks, ProcessSet):
        return ranks
    comm, world = communicator_of(ranks, what), require_world()
    if comm is world:
        return global_process_set
    groups = world.all_gather_object(sorted(comm.all_gather_object(world.rank)))
    return _register(sorted({tuple(group) for group in groups}), what)


def _register(groups: Iterable[Sequence[int]], what: str) -> ProcessSet:
    """Register the process sets of groups of ranks, and return this rank's. Collective over all ranks."""
    sets = [ProcessSet(group) for group in groups]
    for each in sets:
        each.is_implied = True
    registry().add_missing(sets, what)
    return next(each for each in sets if each.included())
