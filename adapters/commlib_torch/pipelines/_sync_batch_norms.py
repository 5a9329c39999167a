"""Synchronized batch norms in a pipeline: the ranks over which each takes its statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from commlib.communicator import Communicator
from commlib.pipeline.sync_check import check_synchronized
from commlib.sharding.shards import world_ranks
from commlib_torch.sync_batch_norm import SyncBatchNorm


def check_batch_norms(comm: Communicator, model: Any) -> None:
    """Raise UsageError on all ranks if a batch norm of a model would wait for ranks of a pipeline's other stages.

    model: a module or a list of layers, the same on all ranks. Collective if it has such layers.
    """
    named = dict(_named_norms(model))
    if ours := {what: layer.ranks for what, layer in named.items() if isinstance(layer, SyncBatchNorm)}:
        check_synchronized(comm, ours, world_ranks(comm))
    theirs = {what: layer for what, layer in named.items() if isinstance(layer, nn.SyncBatchNorm)}
    distributed = torch.distributed
    if theirs and distributed.is_available() and distributed.is_initialized():
        groups = {what: _ranks_of(layer.process_group) for what, layer in theirs.items()}
        check_synchronized(comm, groups, comm.all_gather_object(distributed.get_rank()))


def _named_norms(model: Any) -> Iterator[tuple[str, nn.Module]]:
    for name, module in (model if isinstance(model, nn.Module) else nn.ModuleList(model)).named_modules():
        yield f"layer {name!r} ({type(module).__name__})", module


def _ranks_of(group: Any) -> list[int]:
    """Return torch's global ranks of a process group, by default all."""
    whole = torch.distributed.group.WORLD
    return list(torch.distributed.get_process_group_ranks(whole if group is None else group))
