"""Initialisation of divided parameters: a function of `torch.nn.init` makes the whole, of which each rank has its part.

With parts alone each rank would draw the same numbers for its own, and scale them by another number of inputs. So
`reset_parameters()` of a divided layer gives what it gives in one process, for the same seed on all ranks. Experts are
made one by one, each as the weight of one: so all ranks make all of them, and keep their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from commlib.errors import UsageError
from commlib.sharding.shards import Shard
from commlib_torch._bridge import back, host_array
from commlib_torch._shards import divided_with, shard_of

_FAN = "_calculate_fan_in_and_fan_out"


@functools.cache
def watch_initialization() -> None:
    """Let the functions of `torch.nn.init` make whole weights, from now on, whoever has taken them from there."""
    for name, function in list(vars(torch.nn.init).items()):
        if isinstance(function, FunctionType) and function.__module__ == torch.nn.init.__name__:
            if name == _FAN:
                _exchange(function, _of_whole_shape)
            elif name.endswith("_") and not name.startswith("_"):
                _exchange(function, _of_whole)


def _exchange(function: FunctionType, changed: Callable[[Any], Any]) -> None:
    """Let a function do something else, in place: many have it by a name of their own, or in a table."""
    plain = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    plain.__kwdefaults__ = function.__kwdefaults__
    called = changed(plain)
    if function.__closure__:  # whose code needs its cells
        setattr(torch.nn.init, function.__name__, called)
        return
    function.__code__, function.__defaults__ = _instead.__code__, None
    function.__kwdefaults__ = {"_called": called}
    function.__wrapped__ = plain  # type: ignore[attr-defined]  # what it takes, for `inspect`


def _instead(*args: Any, _called: Any = None, **options: Any) -> Any:
    return _called(*args, **options)


def _of_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(tensor: Tensor, *args: Any, **options: Any) -> Any:
        shard = _shard_of(function.__name__, tensor)
        if shard is None:
            return function(tensor, *args, **options)
        whole = torch.empty(shard.sharding.shape, dtype=tensor.dtype, device=tensor.device)
        try:
            for one in whole.unbind(0) if shard.is_local else (whole,):
                function(one, *args, **options)
        except ValueError as error:
            if shard.is_local:
                error.add_note(f"This is the weight of one of {len(whole)} experts, of which the parameter is a stack.")
            raise
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(back(shard.own(host_array(whole)), tensor))
        return tensor

    return called


def _shard_of(function: str, tensor: Tensor) -> Shard | None:
    """Return how a parameter is divided that a tensor is, or is the `data` of, as published code initialises it.

    Raises UsageError for a piece of one.
    """
    found = shard_of(tensor)
    if found is not None or (parameter := divided_with(tensor)) is None:
        return found
    shard = shard_of(parameter)
    if shard is not None and (tensor.shape, tensor.stride()) != (parameter.shape, parameter.stride()):
        raise UsageError(
            f"torch.nn.init.{function}: this tensor of shape {list(tensor.shape)} is a view of a divided parameter, of "
            f"which this rank has {list(parameter.shape)} of {list(shard.sharding.shape)}: give it the parameter"
        )
    return shard


def _of_whole_shape(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    @functools.wraps(function)
    def called(tensor: Tensor) -> Any:
        shard = _shard_of(function.__name__, tensor)
        if shard is None:
            return function(tensor)
        return function(torch.empty(shard.sharding.shape[1 if shard.is_local else 0 :], device="meta"))

    return called
