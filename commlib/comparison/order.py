"""Sequence order: warn if layers gather balanced sequences rank by rank, which permutes tokens."""

from __future__ import annotations

import warnings

from commlib.communicator import Communicator

_LAYOUT, _JOINED, _WARNED = "layout of sequences", "sequences joined by rank", "warned of the order of sequences"


def note_layout(comm: Communicator, layout: str) -> None:
    """Record the layout of the sequences that are sharded among the ranks of a group."""
    comm.cached[_LAYOUT] = layout
    _warn_once(comm)


def note_joined(comm: Communicator) -> None:
    """Record that layers gather the model's sequence inputs rank by rank."""
    comm.cached[_JOINED] = True
    _warn_once(comm)


def _warn_once(comm: Communicator) -> None:
    cache = comm.cached
    if cache.get(_LAYOUT) != "balanced" or _JOINED not in cache or _WARNED in cache or comm.size == 1:
        return
    cache[_WARNED] = True
    if comm.rank == 0:
        warnings.warn(
            f"plan: sequences are sharded over {comm.name} in the layout 'balanced', but layers with sequence= gather "
            "them rank by rank, so attention and all other position-dependent layers see tokens in another "
            "order. Give shard_sequence, or the SequenceLoader, layout='contiguous'",
            stacklevel=4,
        )
