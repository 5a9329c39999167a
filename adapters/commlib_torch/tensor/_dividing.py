"""Divide a parameter: it is the same object from then on, with one rank's part, and loads its part of whole state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.functional.axis import Axis
from commlib.functional.shards import Shard
from commlib.tensor.sharding import Sharding
from commlib_torch._bridge import array_of, on_host, packed, to_tensor
from commlib_torch._fast_path import keep_unfused
from commlib_torch._shards import mark, shard_of
from commlib_torch.tensor.optimizing import watch_optimizers

_TAKES = "commlib_takes_own"


def divide(what: str, module: nn.Module, name: str, axis: Axis, sharding: Sharding) -> None:
    """Let a parameter of a module hold this rank's part of its values: the same object, with a smaller tensor.

    An optimizer that has it already goes on with it. A parameter that several modules share is divided once. Raises
    UsageError if it is divided otherwise already.
    """
    watch_optimizers()
    keep_unfused(module)
    parameter = getattr(module, name)
    if not getattr(module, _TAKES, False):
        setattr(module, _TAKES, True)
        module.register_load_state_dict_pre_hook(_take_own)
    shard = Shard(axis, sharding)
    before = shard_of(parameter)
    if before is not None:
        if before.axis is axis and before.sharding == sharding:
            return  # tied
        raise UsageError(f"{what}.{name} is divided already, as {before.sharding}: tied weights need one style")
    sharding.check(f"{what}.{name}", axis.size)
    with torch.no_grad():
        parameter.data = to_tensor(shard.own(array_of(packed(parameter))))
        parameter.grad = None
    mark(parameter, shard)


def _take_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take this rank's parts of what is loaded, where that is whole."""
    for name, parameter in module.named_parameters(recurse=False):
        shard, value = shard_of(parameter), state.get(prefix + name)
        if shard is not None and isinstance(value, Tensor) and tuple(value.shape) == shard.sharding.shape:
            state[prefix + name] = to_tensor(shard.own(array_of(on_host(value))))
