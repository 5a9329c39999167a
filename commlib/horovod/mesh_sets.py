"""Process sets of the groups along the axes of a mesh, for reductions by name over one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from commlib.errors import UsageError
from commlib.horovod.process_sets import ProcessSet, registry, require_world

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
    sets = [ProcessSet(ranks[place] for place in group) for group in groups]
    for each in sets:
        each.is_implied = True
    registry().add_missing(sets, what)
    return next(each for each in sets if each.included())
