"""Copies of an MLP as experts: of all that it computes by, or it is refused."""

from __future__ import annotations

import copy
import dis
import functools
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.functional.unnoticed import is_users
from commlib_torch._copies import HOOKS, OF_MODULES

_LIBRARIES = ("torch", "commlib", "commlib_torch")


def check_copies(what: str, name: str, module: nn.Module) -> None:
    """Raise UsageError for an MLP whose copies would compute by its own weights, or that cannot be copied.

    Functions are not copied: what one has closed over, or names, stays what it is. Methods that are bound, partial
    functions and objects are. what: who copies it.
    """
    own = {
        id(one) for layer in module.modules() for one in (layer, *layer._parameters.values(), *layer._buffers.values())
    }
    own.discard(id(None))
    for inner, layer in module.named_modules():
        if hasattr(type(layer), "__deepcopy__"):
            continue
        where = f"{name}.{inner}" if inner else name
        for key, value in _attributes(layer):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise UsageError(
                    f"{what}: {where} has a {key} that is computed of other parameters, as nn.utils.weight_norm does, "
                    "and cannot be copied: use nn.utils.parametrizations with copy=True, or give hidden= for built-in "
                    "MLPs"
                )
            if _leads_to(own, value):
                raise UsageError(
                    f"{what}: {where} has a {key} of its own, which calls what is no copy: experts would compute by "
                    "the MLP that they are copies of: let a class have it as a method, or put a MoE(width, "
                    "experts, ranks, expert=...) in its place"
                )
    try:
        copy.deepcopy(module, {id(one): one for one in module.parameters()})
    except Exception as error:
        raise UsageError(
            f"{what}: {name} cannot be copied ({type(error).__name__}: {error}): give hidden= for built-in MLPs, or "
            "put a MoE(width, experts, ranks, expert=...) in its place"
        ) from error


def _attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a layer has that it may compute by, but for weights and layers: as its copies get it."""
    state = layer.__getstate__()
    for key, value in (state if isinstance(state, dict) else vars(layer)).items():
        if key in HOOKS:
            yield "hook", value
        elif key not in OF_MODULES:
            yield key, value


def _leads_to(own: set[int], root: Any) -> bool:
    """Return whether a function has one of some objects, by their ids, or leads to it. root: that function, or more."""
    waiting, known = [(root, False)], set[tuple[int, bool]]()
    while waiting:
        value, is_of_function = waiting.pop()
        if (id(value), is_of_function) in known:
            continue
        known.add((id(value), is_of_function))
        if isinstance(value, nn.Module | Tensor):
            inside = value.modules() if isinstance(value, nn.Module) else [value]
            if is_of_function and any(id(one) in own for one in inside):
                return True
        elif isinstance(value, FunctionType):
            waiting += [(one, True) for one in _kept_by(value)]
        else:
            waiting += [(one, is_of_function) for one in _inside(value)]
    return False


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, MethodType):
        return value.__self__, value.__func__
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    has_more = hasattr(value, "__dict__") and is_users(value) and not isinstance(value, type)
    return vars(value).values() if has_more else ()


def _kept_by(function: FunctionType) -> list[Any]:
    """Return what a function has closed over, its defaults, and the variables of its module that it names."""
    if function.__module__ is not None and function.__module__.partition(".")[0] in _LIBRARIES:
        return []
    named = [function.__globals__[name] for name in _names_in(function.__code__) if name in function.__globals__]
    return [*map(_contents, function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, *named]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _names_in(code: CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(one.argval)
        elif isinstance(one.argval, CodeType):
            yield from _names_in(one.argval)
