"""Sharded parameters and buffers: marks for parameters, their copies, and their modules.

A module records the shards of its parameters; each parameter also has a mark, for code that gets parameters only. If
PyTorch replaces a parameter, the module renews the mark.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from commlib.errors import UsageError
from commlib.sharding.shards import Shard
from commlib_torch._shard_marks import MARK as _MARK
from commlib_torch._shard_marks import ShardMark, mark_part

_SHARDS = "commlib_shards"
_MADE_OF = ("_orig", "_g", "_v")
"""The names that pruning and weight normalisation give to the parameters they derive from one."""


_DIVIDED: dict[int, weakref.ref[Tensor]] = {}
"""All sharded parameters, by id: a gradient does not identify its parameter."""


def sharded_parameters() -> Iterator[Tensor]:
    """Yield all sharded parameters of this process."""
    for reference in list(_DIVIDED.values()):
        if (parameter := reference()) is not None:
            yield parameter


def shard_of(parameter: Tensor) -> Shard | None:
    """Return the shard that a parameter holds; None if it is unsharded.

    Args:
        parameter: A parameter.

    Examples:
        >>> from commlib_torch.tensor import shard_of
        >>> model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
        >>> model = ct.parallelize(model, comm, {"0": ct.Column(), "1": ct.Row()})
        >>> shard_of(model[0].weight).sharding.shape
        (6, 4)
    """
    shard = getattr(parameter, _MARK, None)
    return shard.shard if type(shard) is ShardMark else shard if type(shard) is Shard else None


def sharded_parameter_of(tensor: Tensor) -> Tensor | None:
    """Return the sharded parameter whose memory a tensor shares; None if there is none."""
    if not _DIVIDED or tensor.layout is not torch.strided or not (memory := tensor.untyped_storage().data_ptr()):
        return None
    known = (own for reference in list(_DIVIDED.values()) if (own := reference()) is not None)
    return next((one for one in known if not one.is_meta and one.untyped_storage().data_ptr() == memory), None)


def shards_of(module: nn.Module) -> Mapping[str, Shard]:
    """Return the shards of a module's own parameters and buffers, by their names."""
    shards: Mapping[str, Shard] = vars(module).get(_SHARDS, {})
    return shards


def describe(module: nn.Module, name: str, shard: Shard) -> None:
    """Record that a module's own parameter or buffer of this name holds a shard."""
    if not shards_of(module):
        setattr(module, _SHARDS, {})
        module.register_state_dict_post_hook(mark_in_state)
        module.register_load_state_dict_post_hook(_loaded)
    change_shard(module, name, shard)
    _watch()


def renew(module: nn.Module) -> None:
    """Renew the marks of parameters that PyTorch may have replaced. Raises UsageError for impossible shards."""
    for name, shard in shards_of(module).items():
        parameter = _get_held(module, name)
        if parameter is None and name in vars(module)["_buffers"]:
            continue  # a norm may be configured without running moments
        if parameter is None:
            raise UsageError(
                f"{type(module).__name__} on rank {shard.axis.rank} of {shard.axis.comm.name} has lost its parameter "
                f"{name}, a shard of {list(shard.sharding.shape)}: apply functions that derive a weight from another "
                "(weight_norm, pruning) to the unsharded model, before it is sharded"
            )
        _renew(type(module).__name__, name, parameter, shard)


def change_shard(module: nn.Module, name: str, shard: Shard) -> None:
    """Record that a parameter of a module holds another shard from now on."""
    getattr(module, _SHARDS)[name] = shard
    held = _get_held(module, name)
    assert held is not None
    _mark(held, shard)


def _get_held(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's own parameter or buffer by name."""
    parameter: Tensor | None = vars(module)["_parameters"].get(name)
    return vars(module)["_buffers"].get(name) if parameter is None else parameter


class ShardedModule(nn.Module):
    """A sharded module, or a module with shards: parameters replaced by `.to` and similar methods stay marked."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if torch.__future__.get_swap_module_params_on_conversion():
            for module in self.modules():
                _remove_marks(module)
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for module in self.modules():
                renew(module)


def _renew(what: str, name: str, parameter: Tensor, shard: Shard) -> None:
    if shard_of(parameter) is not None:
        return
    rank, size = shard.axis.rank, shard.axis.size
    expected = shard.sharding.local(rank, size)
    if tuple(parameter.shape) != expected:
        raise UsageError(
            f"{what}.{name} on rank {rank} of {shard.axis.comm.name} now has shape {list(parameter.shape)}, expected "
            f"{list(expected)}, this rank's shard of {list(shard.sharding.shape)}: load full values with "
            "load_state_dict"
        )
    _mark(parameter, shard)


def _mark(parameter: Tensor, shard: Shard) -> None:
    """Mark a parameter with its shard. Copies by `copy.deepcopy` keep the mark, which PyTorch would drop.

    Copies of a buffer keep it without this.
    """
    if not isinstance(parameter, nn.Parameter):
        setattr(parameter, _MARK, shard)
        return
    key = id(parameter)
    reference: weakref.ref[Tensor] = weakref.ref(parameter, lambda _: _DIVIDED.pop(key, None))
    _DIVIDED[key] = reference

    def copied(memo: dict[int, Any]) -> nn.Parameter:
        original = reference()
        assert original is not None  # it is being copied
        copy: nn.Parameter = nn.Parameter.__deepcopy__(original, memo)
        _mark(copy, shard)
        return copy

    setattr(parameter, _MARK, shard)
    setattr(parameter, "__deepcopy__", copied)  # noqa: B010  # set on this object, not on its class


def _remove_marks(module: nn.Module) -> None:
    """Remove the marks temporarily: PyTorch swaps no tensors that have weak references."""
    for name in shards_of(module):
        parameter = vars(module)["_parameters"].get(name)
        if parameter is not None and shard_of(parameter) is not None:
            _DIVIDED.pop(id(parameter), None)
            delattr(parameter, _MARK)
            delattr(parameter, "__deepcopy__")


def prepare_loading(module: nn.Module) -> None:
    """Remove the marks of a module if loading swaps its parameters; they are renewed afterwards."""
    if torch.__future__.get_swap_module_params_on_conversion():
        _remove_marks(module)


def _loaded(module: nn.Module, _: Any) -> None:
    renew(module)


def mark_in_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Mark the tensors of a state dict like parameters: a hook for `register_state_dict_post_hook`."""
    for name, shard in shards_of(module).items():
        value = state.get(prefix + name)
        if value is not None and shard_of(value) is None:
            mark_part(value, shard)


@functools.cache
def _watch() -> None:
    """Check registrations with sharded modules from now on."""
    register_module_parameter_registration_hook(_registered)
    register_module_buffer_registration_hook(_registered)
    register_module_module_registration_hook(_extended)


def _registered(module: nn.Module, name: str, parameter: Any) -> None:
    known = shards_of(module)
    if name in known and parameter is not None:
        _renew(type(module).__name__, name, parameter, known[name])
    elif any(name == inner + end for inner in known for end in _MADE_OF):
        raise UsageError(_TOO_LATE.format(what=name, kind=type(module).__name__))


def _extended(module: nn.Module, name: str, _: Any) -> None:
    if name == "parametrizations" and shards_of(module):
        raise UsageError(_TOO_LATE.format(what="a parametrization", kind=type(module).__name__))


_TOO_LATE = (
    "{what} is applied to a {kind} that is sharded: pruning, normalisation and parametrization need full weights, "
    "and this rank has a shard; apply it before the layer is sharded, if it leaves a plain weight"
)


def shards_in(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard]]:
    """Yield (name, parameter, shard) of each sharded parameter once. Raises UsageError for a lost one."""
    renew_all(model)
    for name, parameter in model.named_parameters():
        if (shard := shard_of(parameter)) is not None:
            yield name, parameter, shard


def renew_all(model: nn.Module) -> None:
    """Renew the marks of all parameters of a model."""
    for module in model.modules():
        renew(module)
