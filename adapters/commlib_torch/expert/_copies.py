"""Copies of an MLP as experts: they contain all state of its computation except other layers of the model."""

from __future__ import annotations

import copy
import dis
import weakref
from collections.abc import Collection, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import Tensor, nn

from commlib.errors import UsageError
from commlib.expert.layer_values import list_contents
from commlib.snapshot.reachable_code import is_users_kind
from commlib_torch._copies import HOOKS, OF_MODULES

_LIBRARIES = ("torch", "commlib", "commlib_torch")
_NOT_CALLED = frozenset(("__init__", "__new__", "__init_subclass__", "__repr__", "reset_parameters", "extra_repr"))
"""Methods that do not process rows."""
_INSTEAD = "or replace it by a MoE(width, experts, ranks, expert=...)"


def check_copies(what: str, name: str, module: nn.Module, model: nn.Module, going: Collection[int]) -> None:
    """Raise UsageError for an MLP that cannot be copied, or whose copies would use its own weights.

    Functions and classes are not copied: closures and names of a function keep their values. Bound methods, partial
    functions and objects are copied. what: the caller, for errors. going: ids of layers and weights that leave the
    model, those of all MLPs that become experts.
    """
    own = {id(one) for one in _members_of(module)}
    for inner, layer in module.named_modules():
        if hasattr(type(layer), "__deepcopy__"):
            continue
        where = f"{name}.{inner}" if inner else name
        for key, value in _attributes(layer):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                raise UsageError(
                    f"{what}: {where} has a {key} that is computed from other parameters, as by nn.utils.weight_norm, "
                    "and cannot be copied: use nn.utils.parametrizations with copy=True, or pass hidden= for built-in "
                    "MLPs"
                )
            for one, is_copied in _reach(value, is_copied=True):
                if id(one) in own and not is_copied:
                    raise UsageError(
                        f"{what}: {where} has a {key} set on the object, which calls the original instead of the "
                        "copy: experts would compute with the MLP that they are copies of: make it a method of the "
                        f"class, {_INSTEAD}"
                    )
                _check_other(f"{what}: {where} has a {key}, which leads to", one, own, going)
        for key, value in _class_values(layer):
            reached = [one for one, _ in _reach(value, is_copied=False)]
            if any(id(one) in own for one in reached):
                raise UsageError(
                    f"{what}: {where}, {type(layer).__qualname__}, has a {key} in its class, which leads to layers or "
                    "weights of the MLP: experts would compute with these, because a class is not copied: make them "
                    f"attributes of the layer, {_INSTEAD}"
                )
            for one in reached:
                _check_other(f"{what}: {where} has a {key} in its class, which leads to", one, own, going)
    try:
        copy_mlp(module, model, {id(one): one for one in module.parameters()})
    except Exception as error:
        raise UsageError(
            f"{what}: {name} cannot be copied ({type(error).__name__}: {error}): pass hidden= for built-in MLPs, "
            f"{_INSTEAD}"
        ) from error


def _check_other(what: str, one: Any, own: Collection[int], going: Collection[int]) -> None:
    """Raise UsageError for a layer or weight outside of the MLP that experts cannot share."""
    if id(one) in own:
        return
    if id(one) in going:
        raise UsageError(
            f"{what} a layer or weight of another MLP of the plan, which leaves the model: leave one of the two out of "
            f"the plan, {_INSTEAD}"
        )
    if isinstance(one, nn.Module) and not _contains(one, own):
        for name, _ in one.named_buffers():
            raise UsageError(
                f"{what} a {type(one).__name__} that is not the MLP's own, with a buffer, {name}: each expert would "
                f"change it with other tokens: call it before or after the MLP, {_INSTEAD}"
            )


def copy_mlp(module: nn.Module, model: nn.Module, memo: Mapping[int, Any] | None = None) -> nn.Module:
    """Return a copy of an MLP of a model. It shares outside layers and weights with the MLP.

    memo: other objects to share, by their ids.
    """
    return copy.deepcopy(module, {**_outside(module, model), **(memo or {})})


def _outside(module: nn.Module, model: nn.Module) -> dict[int, Any]:
    """Return the outside layers and weights that an MLP refers to, by their ids."""
    own, known = {id(one) for one in _members_of(module)}, {id(one) for one in _members_of(model)}
    outside: dict[int, Any] = {}
    layers = [layer for layer in module.modules() if not hasattr(type(layer), "__deepcopy__")]
    for _, value in (pair for layer in layers for pair in _attributes(layer)):
        for one, _ in _reach(value, is_copied=True):
            if isinstance(one, nn.Module) and id(one) not in known and _contains(one, own):
                # It consists of the MLP's own layers, and is copied like them.
                parts = [
                    part for part in _members_of(one) if not (isinstance(part, nn.Module) and _contains(part, own))
                ]
            else:
                parts = [one] if id(one) in known or isinstance(one, nn.Module) or one.requires_grad else []
            outside |= {id(part): part for part in parts if id(part) not in own}
    return outside


def _members_of(module: nn.Module) -> Iterator[Any]:
    """Yield the layers of a module, and their parameters and buffers."""
    for layer in module.modules():
        yield layer
        yield from (one for one in (*layer._parameters.values(), *layer._buffers.values()) if one is not None)


def _contains(module: nn.Module, some: Collection[int]) -> bool:
    return any(id(one) in some for one in _members_of(module))


def _attributes(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a layer's attributes, except weights and layers, in the form that its copies get."""
    state = layer.__getstate__()
    for key, value in (state if isinstance(state, dict) else vars(layer)).items():
        if key in HOOKS:
            yield "hook", value
        elif key not in OF_MODULES:
            yield key, value


def _class_values(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the methods that a layer has from user-defined classes, and the class attributes that they name."""
    classes = [kind for kind in type(layer).__mro__ if is_users_kind(kind)]
    every = [(key, _unwrap(value)) for kind in classes for key, value in vars(kind).items()]
    methods = [(key, one) for key, one in every if isinstance(one, FunctionType) and key not in _NOT_CALLED]
    names = {name for _, one in methods for name in _names(one.__code__)}
    yield from methods
    yield from ((key, one) for key, one in every if key in names and not isinstance(one, FunctionType))


def _unwrap(value: Any) -> Any:
    """Return the function of a property or a static method; other values unchanged."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _reach(root: Any, *, is_copied: bool) -> Iterator[tuple[Any, bool]]:
    """Yield the modules and tensors reachable from a value, and whether copies of the value reach copies of these.

    Values of functions and classes are not copied, nor are targets of weak references.
    """
    waiting, known = [(root, is_copied)], dict[tuple[int, bool], Any]()
    while waiting:
        value, is_copied = waiting.pop()
        if (id(value), is_copied) in known:
            continue
        known[id(value), is_copied] = value
        if isinstance(value, nn.Module):
            inside = _members_of(value) if not is_copied else [value]
            yield from ((one, is_copied) for one in inside)
        elif isinstance(value, Tensor):
            yield value, is_copied
        elif isinstance(value, FunctionType):
            waiting += [(one, False) for one in _referenced_by(value)]
        elif isinstance(value, weakref.ref):
            waiting.append((value(), False))
        elif isinstance(value, weakref.WeakKeyDictionary | weakref.WeakValueDictionary):
            waiting += [(one, False) for pair in list(value.items()) for one in pair]
        elif isinstance(value, weakref.WeakSet):
            waiting += [(one, False) for one in list(value)]
        elif isinstance(value, type):
            own = vars(value).values() if not is_copied and is_users_kind(value) else ()
            waiting += [(one, False) for one in own if not isinstance(_unwrap(one), FunctionType)]
        else:
            keys = list(value) if isinstance(value, dict | set | frozenset) else []
            waiting += [(one, is_copied) for one in (*list_contents(value).values(), *keys)]


def _referenced_by(function: FunctionType) -> list[Any]:
    """Return a function's closure values, its defaults, and the module variables that it names."""
    if function.__module__ is not None and function.__module__.partition(".")[0] in _LIBRARIES:
        return []
    own = function.__globals__
    named = [own[name] for name in _globals_in(function.__code__) if name in own]
    return [*map(_contents, function.__closure__ or ()), function.__defaults__, function.__kwdefaults__, *named]


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _globals_in(code: CodeType) -> Iterator[str]:
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(one.argval)
        elif isinstance(one.argval, CodeType):
            yield from _globals_in(one.argval)


def _names(code: CodeType) -> set[str]:
    """Return the outer names used by a function and its inner functions."""
    return set(code.co_names).union(*(_names(one) for one in code.co_consts if isinstance(one, CodeType)))
