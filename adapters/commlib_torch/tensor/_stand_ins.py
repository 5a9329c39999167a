"""Stand-ins: give a model of PyTorch other numbers for weights that are zeros, for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._C import DisableTorchFunction

from commlib.tensor_parallel.checks.stand_ins import stand_in
from commlib_torch._shards import shard_of


@contextmanager
def standing_in(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Let parameters of these names be something else for a while: of one that is divided, this rank's part of it.

    Whoever has saved one for a backward finds it as it was.
    """
    found = [(name, parameter) for name, parameter in model.named_parameters() if name in names]
    with DisableTorchFunction():  # another look may be listening
        before = [parameter.data for _, parameter in found]
    try:
        with DisableTorchFunction():
            for name, parameter in found:
                shard = shard_of(parameter)
                whole = stand_in(name, parameter.shape if shard is None else shard.sharding.shape)
                parameter.data = torch.from_numpy(whole if shard is None else shard.own(whole)).to(parameter.data)
        yield
    finally:
        with DisableTorchFunction():
            for (_, parameter), data in zip(found, before, strict=True):
                parameter.data = data


def zeros_in(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that have zeros alone, on this rank."""
    with DisableTorchFunction():
        return frozenset(
            name
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point() and parameter.numel() and not parameter.detach().any()
        )
