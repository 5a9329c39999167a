"""Copies of an MLP as experts: of all that it computes by but layers of others, or it is refused."""

from __future__ import annotations

import copy
import dis
import weakref
from collections.abc import Collection, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.expert.kept import inside_of
from commlib.snapshot.reached import is_users_kind
from commlib_torch._copies import HOOKS, OF_MODULES

_LIBRARIES = ("torch", "commlib", "commlib_torch")
_NOT_CALLED = frozenset(("__init__", "__new__", "__init_subclass__", "__repr__", "reset_parameters", "extra_repr"))
"""Methods that compute nothing of rows."""
_INSTEAD = "or put a MoE(width, experts, ranks, expert=...) in its place"


def check_copies(what: str, name: str, module: nn.Module, model: nn.Module, going: Collection[int]) -> None:
    """Raise UsageError for an MLP whose copies would compute by its own weights, or that cannot be copied.

    Functions and classes are not copied: what a function has closed over, or names, stays what it is. Methods that are
    bound, partial functions and objects are. what: who copies it. going: layers and weights that leave the model, those
    of all MLPs that become experts, by their ids.
    """
    own = {id(one) for one in _of(module)}
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
            for one, is_copied in _reached(value, is_copied=True):
                if id(one) in own and not is_copied:
                    raise UsageError(
                        f"{what}: {where} has a {key} of its own, which calls what is no copy: experts would compute "
                        f"by the MLP that they are copies of: let a class have it as a method, {_INSTEAD}"
                    )
                _check_other(f"{what}: {where} has a {key}, which leads to", one, own, going)
        for key, value in _of_class(layer):
            reached = [one for one, _ in _reached(value, is_copied=False)]
            if any(id(one) in own for one in reached):
                raise UsageError(
                    f"{what}: {where}, {type(layer).__qualname__}, has a {key} in its class, which leads to layers or "
                    "weights of the MLP: experts would compute by these, as a class is not copied: let the layer have "
                    f"them as attributes, {_INSTEAD}"
                )
            for one in reached:
                _check_other(f"{what}: {where} has a {key} in its class, which leads to", one, own, going)
    try:
        copied(module, model, {id(one): one for one in module.parameters()})
    except Exception as error:
        raise UsageError(
            f"{what}: {name} cannot be copied ({type(error).__name__}: {error}): give hidden= for built-in MLPs, "
            f"{_INSTEAD}"
        ) from error


def _check_other(what: str, one: Any, own: Collection[int], going: Collection[int]) -> None:
    """Raise UsageError for a layer or weight of others that experts cannot share."""
    if id(one) in own:
        return
    if id(one) in going:
        raise UsageError(
            f"{what} a layer or weight of another MLP of the plan, which leaves the model: leave one of the two out of "
            f"the plan, {_INSTEAD}"
        )
    if isinstance(one, nn.Module) and not _has(one, own):
        for name, _ in one.named_buffers():
            raise UsageError(
                f"{what} a {type(one).__name__} that is not the MLP's own, with a buffer, {name}: each expert would "
                f"change it by other tokens: call it before or behind the MLP, {_INSTEAD}"
            )


def copied(module: nn.Module, model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a copy of an MLP of a model. Layers and weights that are not its own it shares, as the MLP does.

    memo: other objects that it shares, by their ids.
    """
    return copy.deepcopy(module, {**_outside(module, model), **(memo or {})})


def _outside(module: nn.Module, model: nn.Module) -> dict[int, Any]:
    """Return the layers and weights to which an MLP refers that are not its own, by their ids."""
    own, known = {id(one) for one in _of(module)}, {id(one) for one in _of(model)}
    found: dict[int, Any] = {}
    layers = [layer for layer in module.modules() if not hasattr(type(layer), "__deepcopy__")]
    for _, value in (pair for layer in layers for pair in _attributes(layer)):
        for one, _ in _reached(value, is_copied=True):
            if isinstance(one, nn.Module) and id(one) not in known and _has(one, own):
                # It is made of the MLP's own layers, and copied as these are.
                parts = [part for part in _of(one) if not (isinstance(part, nn.Module) and _has(part, own))]
            else:
                parts = [one] if id(one) in known or isinstance(one, nn.Module) or one.requires_grad else []
            found |= {id(part): part for part in parts if id(part) not in own}
    return found


def _of(module: nn.Module) -> Iterator[Any]:
    """Yield the layers of a module, and their parameters and buffers."""
    for layer in module.modules():
        yield layer
        yield from (one for one in (*layer._parameters.values(), *layer._buffers.values()) if one is not None)


def _has(module: nn.Module, some: Collection[int]) -> bool:
    return any(id(one) in some for one in _of(module))


def _attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what a layer has that it may compute by, but for weights and layers: as its copies get it."""
    state = layer.__getstate__()
    for key, value in (state if isinstance(state, dict) else vars(layer)).items():
        if key in HOOKS:
            yield "hook", value
        elif key not in OF_MODULES:
            yield key, value


def _of_class(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the methods that a layer has of its user's classes, and what these have that the methods name."""
    classes = [kind for kind in type(layer).__mro__ if is_users_kind(kind)]
    every = [(key, _unwrapped(value)) for kind in classes for key, value in vars(kind).items()]
    methods = [(key, one) for key, one in every if isinstance(one, FunctionType) and key not in _NOT_CALLED]
    names = {name for _, one in methods for name in _names(one.__code__)}
    yield from methods
    yield from ((key, one) for key, one in every if key in names and not isinstance(one, FunctionType))


def _unwrapped(value: Any) -> Any:
    """Return the function of a property, and of a method without an object; all else as it is."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _reached(root: Any, *, is_copied: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the modules and tensors to which a value leads, and whether copies of the value lead to copies of these.

    What a function has, or a class, is not copied, nor is what is referred to weakly.
    """
    waiting, known = [(root, is_copied)], dict[tuple[int, bool], Any]()
    while waiting:
        value, is_copied = waiting.pop()
        if (id(value), is_copied) in known:
            continue
        known[id(value), is_copied] = value
        if isinstance(value, nn.Module):
            inside = _of(value) if not is_copied else [value]
            yield from ((one, is_copied) for one in inside)
        elif isinstance(value, Tensor):
            yield value, is_copied
        elif isinstance(value, FunctionType):
            waiting += [(one, False) for one in _kept_by(value)]
        elif isinstance(value, weakref.ref):
            waiting.append((value(), False))
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            waiting += [(one, False) for pair in list(value.items()) for one in pair]
        elif isinstance(value, weakref.WeakSet):
            waiting += [(one, False) for one in list(value)]
        elif isinstance(value, type):
            own = vars(value).values() if not is_copied and is_users_kind(value) else ()
            waiting += [(one, False) for one in own if not isinstance(_unwrapped(one), FunctionType)]
        else:
            keys = list(value) if isinstance(value, dict | set | frozenset) else []
            waiting += [(one, is_copied) for one in (*inside_of(value).values(), *keys)]


def _kept_by(function: FunctionType) -> list[Any]:
    """Return what a function has closed over, its defaults, and the variables of its module that it names."""
    if function.__module__ is not None and function.__module__.partition(".")[0] in _LIBRARIES:
        return []
    own = function.__globals__
    named = [own[name] for name in _globals_in(function.__code__) if name in own]
    return [*map(_contents, function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, *named]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _globals_in(code: CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(one.argval)
        elif isinstance(one.argval, CodeType):
            yield from _globals_in(one.argval)


def _names(code: CodeType) -> set[str]:
    """Return the names that a function has of what is outside, and those that functions within it have."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
