"""Initialization of sharded parameters: `torch.nn.init` makes the full weight, and each rank keeps its shard.

On shards alone, each rank would draw the same numbers, and scale them by a wrong number of inputs. With full weights,
`reset_parameters()` of a sharded layer gives the values of one process, if all ranks have the same seed. Experts are
initialized one by one, each with the shape of a single weight: all ranks make all of them and keep their own.
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
from commlib_torch._bridge import host_array, to_device_of
from commlib_torch._shards import shard_of, sharded_parameter_of

_FAN = "_calculate_fan_in_and_fan_out"


@functools.cache
def watch_initialization() -> None:
    """Make the functions of `torch.nn.init`, and all references to them, initialize full weights from now on."""
    for name, function in list(vars(torch.nn.init).items()):
        if isinstance(function, FunctionType) and function.__module__ == torch.nn.init.__name__:
            if name == _FAN:
                _replace_code(function, _of_whole_shape)
            elif name.endswith("_") and not name.startswith("_"):
                _replace_code(function, _initialize_full)


def _replace_code(function: FunctionType, changed: Callable[[Any], Any]) -> None:
    """Replace a function's code in place: other modules may hold references to the function."""
    plain = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    plain.__kwdefaults__ = function.__kwdefaults__
    called = changed(plain)
    if function.__closure__:  # its code needs its cells
        setattr(torch.nn.init, function.__name__, called)
        return
    function.__code__, function.__defaults__ = _replacement.__code__, None
    function.__kwdefaults__ = {"_called": called}
    function.__wrapped__ = plain  # type: ignore[attr-defined]  # what it takes, for `inspect`


def _replacement(*args: Any, _called: Any = None, **options: Any) -> Any:
    return _called(*args, **options)


def _initialize_full(function: Callable[..., Any]) -> Callable[..., Any]:
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
                error.add_note(f"The weight of one of {len(whole)} experts; the parameter stacks them.")
            raise
        if not tensor.is_meta:
            with torch.no_grad():
                tensor.copy_(to_device_of(shard.own(host_array(whole)), tensor))
        return tensor

    return called


def _shard_of(function: str, tensor: Tensor) -> Shard | None:
    """Return the shard of the parameter that a tensor is, or whose `data` it is, as published code initializes it.

    Raises UsageError for a view of a part of one.
    """
    marked = shard_of(tensor)
    if marked is not None or (parameter := sharded_parameter_of(tensor)) is None:
        return marked
    shard = shard_of(parameter)
    if shard is not None and (tensor.shape, tensor.stride()) != (parameter.shape, parameter.stride()):
        raise UsageError(
            f"torch.nn.init.{function}: this tensor of shape {list(tensor.shape)} is a view of a sharded parameter, "
            f"of which this rank has {list(parameter.shape)} of {list(shard.sharding.shape)}: pass the parameter"
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
