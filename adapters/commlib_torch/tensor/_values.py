"""Tensor values: all ranks of a communicator take rank 0's values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from commlib.communicator import Communicator
from commlib.sharding.shards import others_of, world_ranks
from commlib_torch._bridge import array_of, to_host
from commlib_torch._shards import shard_of


@contextmanager
def values_of_rank_0(tensors: Iterable[Tensor], comm: Communicator) -> Iterator[None]:
    """Overwrite tensors with the values of rank 0, and restore them if the caller's code then raises. Collective.

    Parameters that are already sharded among ranks of `comm` do not change: each rank has another shard.
    """
    own, ranks = [], world_ranks(comm)
    with torch.no_grad():
        for tensor in tensors:
            shard = shard_of(tensor)
            if tensor.numel() and (shard is None or not others_of(shard, ranks)):
                values = to_host(tensor).clone()
                comm.broadcast(array_of(values))
                values = values.to(tensor.device)
                if not torch.equal(values, tensor):
                    own.append((tensor, tensor.detach().clone()))
                    tensor.copy_(values)
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, values in own:
                tensor.copy_(values)
        raise
