"""Order: tell where parts of sequences that are balanced come to layers that put them together rank by rank."""

from __future__ import annotations

import warnings

from commlib.communicator import Communicator

_LAYOUT, _JOINED, _TOLD = "layout of sequences", "sequences joined by rank", "order of sequences told"


def note_layout(comm: Communicator, layout: str) -> None:
    """Note in which layout sequences are divided among the ranks of a group."""
    comm.kept[_LAYOUT] = layout
    _tell(comm)


def note_joined(comm: Communicator) -> None:
    """Note that layers of a model that is called with parts of sequences put them together rank by rank."""
    comm.kept[_JOINED] = True
    _tell(comm)


def _tell(comm: Communicator) -> None:
    kept = comm.kept
    if kept.get(_LAYOUT) != "balanced" or _JOINED not in kept or _TOLD in kept or comm.size == 1:
        return
    kept[_TOLD] = True
    if comm.rank == 0:
        warnings.warn(
            f"plan: sequences are divided over {comm.name} in the layout 'balanced', and layers with sequence= put the "
            "parts together rank by rank, so that attention, and all that goes by positions, sees tokens in another "
            "order: give shard_sequence, or the SequenceLoader, layout='contiguous'",
            stacklevel=4,
        )
