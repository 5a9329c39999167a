"""Initialisation of divided parameters: a function of `torch.nn.init` makes the whole, of which each rank has its part.

With parts alone each rank would draw the same numbers for its own, and scale them by another number of inputs. So
`reset_parameters()` of a divided layer gives what it gives in one process, for the same seed on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commlib_torch._bridge import back, host_array
from commlib_torch._shards import shard_of

_FAN = "_calculate_fan_in_and_fan_out"


@functools.cache
def watch_initialization() -> None:
    """Let the functions of `torch.nn.init` make whole weights, from now on."""
    init = torch.nn.init
    changed = {
        name: _of_whole(function)
        for name, function in vars(init).items()
        if name.endswith("_") and not name.startswith("_") and callable(function)
    }
    if _FAN in vars(init):
        changed[_FAN] = _of_whole_shape(vars(init)[_FAN])
    for module in (init, torch.nn.modules.activation, torch.nn.modules.transformer):  # some have names of their own
        for name in changed.keys() & vars(module).keys():
            setattr(module, name, changed[name])


def _of_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(tensor: Tensor, *args: Any, **options: Any) -> Any:
        shard = shard_of(tensor)
        if shard is None:
            return function(tensor, *args, **options)
        whole = torch.empty(shard.sharding.shape, dtype=tensor.dtype, device=tensor.device)
        function(whole, *args, **options)
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(back(shard.own(host_array(whole)), tensor))
        return tensor

    return called


def _of_whole_shape(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    @functools.wraps(function)
    def called(tensor: Tensor) -> Any:
        shard = shard_of(tensor)
        return function(tensor if shard is None else torch.empty(shard.sharding.shape, device="meta"))

    return called
