"""Placeholders: replace weights that are zeros in a PyTorch model temporarily."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._C import DisableTorchFunction

from commlib.tensor_parallel.checks.placeholders import make_placeholder
from commlib_torch._shards import shard_of


@contextmanager
def substitute_weights(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Replace the values of these parameters within the context; of a sharded one, with this rank's shard.

    A tensor saved for a backward keeps its old values.
    """
    weights = [(name, parameter) for name, parameter in model.named_parameters() if name in names]
    with DisableTorchFunction():  # another trace may be recording
        before = [parameter.data for _, parameter in weights]
    try:
        with DisableTorchFunction():
            for name, parameter in weights:
                shard = shard_of(parameter)
                whole = make_placeholder(name, parameter.shape if shard is None else shard.sharding.shape)
                parameter.data = torch.from_numpy(whole if shard is None else shard.own(whole)).to(parameter.data)
        yield
    finally:
        with DisableTorchFunction():
            for (_, parameter), data in zip(weights, before, strict=True):
                parameter.data = data


def zeros_in(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that are all zeros on this rank."""
    with DisableTorchFunction():
        return frozenset(
            name
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point() and parameter.numel() and not parameter.detach().any()
        )
