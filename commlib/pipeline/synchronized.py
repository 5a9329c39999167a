"""Synchronized: refuse layers that wait for ranks which never call them: one rank of a pipeline runs each stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from commlib.communicator import Communicator
from commlib.errors import UsageError


def check_synchronized(comm: Communicator, layers: Mapping[str, Collection[int]], ranks: Sequence[int]) -> None:
    """Raise UsageError on all ranks of a pipeline if a layer has several of them for one batch. Collective.

    layers: the ranks over which each layer takes its statistics, by what errors call it. ranks: those of `comm`, as
    numbers of the same group.

        check_synchronized(comm, {"layer 'norm' (SyncBatchNorm)": [0, 1]}, ranks=[0, 1])
    """
    own = ""
    for what, group in layers.items():
        together = sorted(set(group) & set(ranks))
        if len(together) > 1:
            own = (
                f"pipeline: {what} takes its statistics over ranks {sorted(group)}, of which {together} run different "
                f"stages of this pipeline: one of them would wait for the others for ever. Give process_set=, the "
                "ranks that run the same stage (those along dp), or take a batch norm that does not communicate"
            )
            break
    told = comm.all_gather_object(own)
    if said := next((text for text in told if text), ""):
        raise UsageError(said)
