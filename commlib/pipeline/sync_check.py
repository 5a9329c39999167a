"""Synchronized layers: refuse layers that wait for ranks of other stages, which never call them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from commlib.communicator import Communicator
from commlib.errors import UsageError


def check_synchronized(comm: Communicator, layers: Mapping[str, Collection[int]], ranks: Sequence[int]) -> None:
    """Raise UsageError on all ranks of a pipeline if a layer synchronizes several of them in one batch. Collective.

    layers: the ranks over which each layer computes its statistics, by its description for errors. ranks: the ranks of
    `comm`, numbered in the same group.

            check_synchronized(comm, {"layer 'norm' (SyncBatchNorm)": [0, 1]}, ranks=[0, 1])
    """
    own = ""
    for what, group in layers.items():
        together = sorted(set(group) & set(ranks))
        if len(together) > 1:
            own = (
                f"pipeline: {what} computes statistics over ranks {sorted(group)}, but ranks {together} run different "
                f"stages of this pipeline: one of them would wait for the others forever. Pass process_set= with the "
                "ranks that run the same stage (those along dp), or use a batch norm that does not communicate"
            )
            break
    faults = comm.all_gather_object(own)
    if fault := next((text for text in faults if text), ""):
        raise UsageError(fault)
