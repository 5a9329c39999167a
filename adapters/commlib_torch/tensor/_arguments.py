"""Arguments of modules that a plan with `Slice` shards, such as biases of all heads."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.schedule.layout import even
from commlib.sharding.axis import ParallelAxis
from commlib.tensor_parallel.styles import Slice
from commlib_torch.tensor._leaves import is_leaf

_DIVIDED = "commlib_arguments"


class SliceHook:
    """A hook of a module that slices an argument for this rank. name: of the module and the argument."""

    def __init__(self, axis: ParallelAxis, name: str, argument: str, style: Slice) -> None:
        self.axis, self.name, self.argument, self.style = axis, name, argument, style

    def __call__(self, module: nn.Module, args: Any, options: Any) -> Any:
        """Return the module's arguments with the slice."""
        return replace_arguments(module, args, options, {self.argument: lambda value: part_of(value, self)})


def part_of(value: Tensor, slicing: SliceHook) -> Tensor:
    """Return this rank's slice. During a trace, another function replaces this one."""
    axis = slicing.axis
    return own_part(value, slicing.style, axis.rank, axis.size, slicing.name)


def own_part(value: Tensor, style: Slice, rank: int, size: int, name: str) -> Tensor:
    """Return the slice of one of `size` ranks. Raises UsageError if the number of heads is not the style's."""
    dim = style.dim % max(1, value.dim())
    if value.dim() <= dim or value.shape[dim] == 1:
        return value
    if value.shape[dim] % style.units:
        raise UsageError(f"{name} has the shape {list(value.shape)}, expected {style.units} heads along {style.dim}")
    layout = even(style.units, size)
    heads: Tensor = value.unflatten(dim, (-1, style.units))
    first, last = layout.slice_of(rank)
    return heads.narrow(dim + 1, first, last - first).flatten(dim, dim + 1)


def replace_arguments(module: nn.Module, args: Any, options: Any, change: Mapping[str, Any]) -> Any:
    """Return a module's arguments, with tensors changed by functions, which are given by argument name."""
    own, named = list(args), dict(options)
    for at, name in enumerate(_names(module)[: len(own)]):
        if name in change and isinstance(own[at], Tensor):
            own[at] = change[name](own[at])
    for name in options:  # in the same order on all ranks, which record what they see
        if name in change and isinstance(named[name], Tensor):
            named[name] = change[name](named[name])
    return tuple(own), named


def tensor_arguments(module: nn.Module, args: Any, options: Any) -> dict[str, Tensor]:
    """Return the tensors among a module's arguments, by argument name."""
    arguments = {**dict(zip(_names(module), args, strict=False)), **options}
    return {name: value for name, value in arguments.items() if isinstance(value, Tensor)}


def arguments_in(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the arguments of modules that are not single layers, by names such as "h.0.attn.alibi"."""
    return {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        if not is_leaf(module)
        for name in _names(module, keywords=True)
    }


def divide_arguments(arguments: Mapping[str, tuple[tuple[nn.Module, str], Slice]], axis: ParallelAxis) -> None:
    """Slice arguments of modules for this rank from now on."""
    for name, ((module, argument), style) in arguments.items():
        given = vars(module).get(_DIVIDED, {})
        if argument not in given:  # it may have several names
            slicing = SliceHook(axis, name, argument, style)
            setattr(module, _DIVIDED, {**given, argument: slicing})
            module.register_forward_pre_hook(slicing, with_kwargs=True)


def slicings_in(model: nn.Module) -> dict[str, SliceHook]:
    """Return the existing slice hooks, by argument name."""
    return {
        f"{path}.{name}" if path else name: slicing
        for path, module in model.named_modules()
        for name, slicing in vars(module).get(_DIVIDED, {}).items()
    }


def _names(module: nn.Module, *, keywords: bool = False) -> list[str]:
    """Return the names of arguments that may be positional. keywords: add those that may not."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    more = (inspect.Parameter.KEYWORD_ONLY,) if keywords else ()
    return [one.name for one in parameters if one.kind in (*kinds, *more)]
