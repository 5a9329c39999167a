"""Parameters and buffers that hold a shard: how one tells, how copies do, and how modules keep the note anywhere.

A module knows what its parameters are parts of; a parameter has a note of that, for whoever is given parameters alone.
Where PyTorch makes another parameter of one, the module renews the note.
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
from commlib_torch._saved_parts import MARK as _MARK
from commlib_torch._saved_parts import Part, mark_part

_SHARDS = "commlib_shards"
_MADE_OF = ("_orig", "_g", "_v")
"""How pruning and normalisation of weights call the parameters that they make of one."""


_DIVIDED: dict[int, weakref.ref[Tensor]] = {}
"""All parameters that hold a part, by id: a gradient does not say whose it is."""


def divided_parameters() -> Iterator[Tensor]:
    """Yield all parameters of this process that hold a part."""
    for reference in list(_DIVIDED.values()):
        if (parameter := reference()) is not None:
            yield parameter


def shard_of(parameter: Tensor) -> Shard | None:
    """Return what a parameter holds a part of; None if it is whole."""
    found = getattr(parameter, _MARK, None)
    return found.shard if type(found) is Part else found if type(found) is Shard else None


def divided_with(tensor: Tensor) -> Tensor | None:
    """Return the divided parameter whose memory a tensor has; None if there is none."""
    if not _DIVIDED or tensor.layout is not torch.strided or not (memory := tensor.untyped_storage().data_ptr()):
        return None
    known = (found for reference in list(_DIVIDED.values()) if (found := reference()) is not None)
    return next((one for one in known if not one.is_meta and one.untyped_storage().data_ptr() == memory), None)


def shards_of(module: nn.Module) -> Mapping[str, Shard]:
    """Return what a module's own parameters and buffers hold parts of, by their names."""
    found: Mapping[str, Shard] = vars(module).get(_SHARDS, {})
    return found


def describe(module: nn.Module, name: str, shard: Shard) -> None:
    """Let a module know what its own parameter, or buffer, of this name holds, from now on."""
    if not shards_of(module):
        setattr(module, _SHARDS, {})
        module.register_state_dict_post_hook(mark_in_state)
        module.register_load_state_dict_post_hook(_loaded)
    change_shard(module, name, shard)
    _watch()


def renew(module: nn.Module) -> None:
    """Renew the notes of parameters that PyTorch may have made anew. Raises UsageError for what cannot be the part."""
    for name, shard in shards_of(module).items():
        parameter = _held(module, name)
        if parameter is None and name in vars(module)["_buffers"]:
            continue  # a norm may be told to keep no moments
        if parameter is None:
            raise UsageError(
                f"{type(module).__name__} on rank {shard.axis.rank} of {shard.axis.comm.name} has lost its parameter "
                f"{name}, a part of {list(shard.sharding.shape)}: what makes a weight of something else (weight_norm, "
                "pruning) is to be put on the whole model, before that is divided"
            )
        _renew(type(module).__name__, name, parameter, shard)


def change_shard(module: nn.Module, name: str, shard: Shard) -> None:
    """Let a module know that its parameter holds another part by now."""
    getattr(module, _SHARDS)[name] = shard
    held = _held(module, name)
    assert held is not None
    _mark(held, shard)


def _held(module: nn.Module, name: str) -> Tensor | None:
    """Return a module's own parameter, or buffer, of a name."""
    found: Tensor | None = vars(module)["_parameters"].get(name)
    return vars(module)["_buffers"].get(name) if found is None else found


class KeepsShards(nn.Module):
    """A module that is divided, or has parts that are: what is made of its parameters by `.to` and the like is, too."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        if torch.__future__.get_swap_module_params_on_conversion():
            for module in self.modules():
                _forget(module)
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
            f"{what}.{name} on rank {rank} of {shard.axis.comm.name} is now of shape {list(parameter.shape)}, expected "
            f"{list(expected)}, this rank's part of {list(shard.sharding.shape)}: give whole values by load_state_dict"
        )
    _mark(parameter, shard)


def _mark(parameter: Tensor, shard: Shard) -> None:
    """Note what a parameter holds. Copies that `copy.deepcopy` makes have the note, too: PyTorch's would not.

    Those of a buffer have it anyway.
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
        found: nn.Parameter = nn.Parameter.__deepcopy__(original, memo)
        _mark(found, shard)
        return found

    setattr(parameter, _MARK, shard)
    setattr(parameter, "__deepcopy__", copied)  # noqa: B010  # of this object, not of its class


def _forget(module: nn.Module) -> None:
    """Take the notes away for a while: PyTorch exchanges no tensors to which there are weak references."""
    for name in shards_of(module):
        parameter = vars(module)["_parameters"].get(name)
        if parameter is not None and shard_of(parameter) is not None:
            _DIVIDED.pop(id(parameter), None)
            delattr(parameter, _MARK)
            delattr(parameter, "__deepcopy__")


def before_loading(module: nn.Module) -> None:
    """Prepare a module for values that are loaded, whichever way PyTorch takes them."""
    if torch.__future__.get_swap_module_params_on_conversion():
        _forget(module)


def _loaded(module: nn.Module, _: Any) -> None:
    renew(module)


def mark_in_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let tensors of a state dict know what they hold, as parameters do: a hook for `register_state_dict_post_hook`."""
    for name, shard in shards_of(module).items():
        value = state.get(prefix + name)
        if value is not None and shard_of(value) is None:
            mark_part(value, shard)


@functools.cache
def _watch() -> None:
    """Look at what is registered with modules that are divided, from now on."""
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
    "{what} is put on a {kind} that is divided among ranks: pruning, normalisation and parametrization look at whole "
    "weights, of which this rank has a part; do it before the layer is divided, if it leaves a plain weight"
)


def shards_in(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Shard]]:
    """Yield (name, parameter, shard) of each parameter that is divided, once. Raises UsageError for a lost one."""
    renew_all(model)
    for name, parameter in model.named_parameters():
        if (shard := shard_of(parameter)) is not None:
            yield name, parameter, shard


def renew_all(model: nn.Module) -> None:
    """Renew the notes of all parameters of a model."""
    for module in model.modules():
        renew(module)
