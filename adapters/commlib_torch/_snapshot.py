"""Snapshot: model state outside torch's registries, to detect and undo the changes of a trace."""

from __future__ import annotations

import dis
import inspect
import pickle
import random
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from commlib_torch._guards import MISSING, is_namespace

OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes of every module."""

_REGISTRIES = ("_buffers", "_parameters", "_modules", "_non_persistent_buffers_set")
_MOST = 200_000
"""The maximum number of visited objects: a model may hold data of any size."""


class Snapshot:
    """The attribute values of modules: lists, dictionaries, objects, arrays, tensors, generators, and their contents.

    Includes the attributes of their classes, and the global values that their forwards name. Excludes parameters and
    buffers. paths: of the modules of a model.
    """

    def __init__(self, paths: Mapping[nn.Module, str]) -> None:
        self._seen: set[int] = set()
        self._restorers: list[tuple[str, str, Callable[[], bool]]] = []
        """The path of a module, a value's title, and a function that restores it and returns whether it had changed."""
        for module, path in paths.items():
            self._attributes(module, path)
        for module, path in paths.items():
            for kind in own_classes(type(module)):
                self._class(kind, path)
            for function in methods_of(type(module)):
                self._walk(function, path, "")

    def restore(self) -> list[tuple[str, str]]:
        """Restore all values. Return the changed ones: the path of a module, and the title."""
        return [(path, title) for path, title, put_back in reversed(self._restorers) if put_back()]

    def has_visited(self, value: Any) -> bool:
        """Return whether the snapshot has visited an object."""
        return id(value) in self._seen

    def _attributes(self, module: nn.Module, path: str) -> None:
        own = vars(module)
        for name in _REGISTRIES:
            if isinstance(own.get(name), dict | set):  # a TorchScript module has different ones
                self._keep(path, f"self.{name}", _container_restorer(own[name]))
        before = {name: value for name, value in own.items() if name not in OF_MODULES}
        self._keep(path, "its attributes", _attributes_restorer(module, own))
        for name, value in before.items():
            if not isinstance(value, Tensor):  # a trace contains forward's operations on these
                self._walk(value, path, f"self.{name}")

    def _class(self, kind: type, path: str) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        for name, value in list(vars(kind).items()):
            if not name.startswith("__") and not hasattr(value, "__get__"):
                self._keep(path, f"{kind.__name__}.{name}", _attribute_restorer(kind, name, value))
                self._walk(value, path, f"{kind.__name__}.{name}")

    def _keep(self, path: str, title: str, put_back: Callable[[], bool]) -> None:
        self._restorers.append((path, title, put_back))

    def _walk(self, value: Any, path: str, title: str) -> None:
        """Save a value and its contents."""
        waiting = deque([(value, title)])
        while waiting and len(self._seen) < _MOST:
            one, name = waiting.popleft()
            if id(one) in self._seen or isinstance(one, _NOT_LOOKED_INTO) or is_namespace(one):
                continue
            self._seen.add(id(one))
            if isinstance(one, MethodType):
                waiting.append((one.__func__, name))
                one = one.__self__
                if isinstance(one, _NOT_LOOKED_INTO):
                    continue
            if isinstance(one, FunctionType):
                waiting.extend(self._function(one, path))
                continue
            if (put_back := _restorer(one)) is not None:
                self._keep(path, name, put_back)
            waiting.extend((inner, name) for inner in _contents_of(one))

    def _function(self, function: FunctionType, path: str) -> list[tuple[Any, str]]:
        """Save a function's outer values: globals, and closure cells."""
        values = []
        for name, value in globals_of(function):
            title = f"the global {name}"
            self._keep(path, title, _item_restorer(function.__globals__, name, value))
            values.append((value, title))
        for name, cell, value in cells_of(function):
            self._keep(path, name, _cell_restorer(cell, value))
            values.append((value, name))
        return values


_NOT_LOOKED_INTO = (nn.Module, nn.Parameter, type, ModuleType, str, bytes, int, float, complex, type(None), torch.dtype)


def is_own(module: str | None) -> bool:
    """Return whether objects defined in a Python module, given by name, may have state that a forward changes."""
    top = str(module).partition(".")[0]
    return top not in _OTHERS and (top == "__main__" or top not in sys.stdlib_module_names)


_OTHERS = frozenset({"torch", "numpy", "commlib", "commlib_torch"})


def own_classes(kind: type) -> list[type]:
    """Return the classes of a module that are not torch's."""
    return [one for one in kind.__mro__ if is_own(one.__module__)]


@lru_cache(maxsize=4096)
def _global_names(code: CodeType) -> frozenset[str]:
    """Return the names of global values used by a function and its inner functions."""
    own = (str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"))
    inner = (_global_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(own).union(*inner)


def named_in(code: CodeType) -> set[str]:
    """Return the names used by a function and its inner functions."""
    inner = (named_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def methods_of(kind: type) -> list[FunctionType]:
    """Return the functions of a module class that its call may run: forward, and the methods it names."""
    functions: dict[str, FunctionType] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        member = next((vars(one)[name] for one in own_classes(kind) if name in vars(one)), None)
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)  # of a property, a static method
        if isinstance(member, FunctionType) and name not in functions:
            functions[name] = member
            waiting += named_in(inspect.unwrap(member).__code__)
    return list(functions.values())


def globals_of(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the global values that a function names, except modules and classes."""
    if not is_own(function.__module__):
        return []
    names = sorted(_global_names(function.__code__))
    named = ((name, function.__globals__.get(name, MISSING)) for name in names)
    return [
        (name, one) for name, one in named if one is not MISSING and not isinstance(one, nn.Module | type | ModuleType)
    ]


def cells_of(function: FunctionType) -> Iterator[tuple[str, CellType, Any]]:
    """Yield a function's closure: the name, the cell, and the value."""
    if not is_own(function.__module__):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):  # empty
            yield name, cell, cell.cell_contents


def _attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's class, such as a configuration."""
    if not isinstance(value, SimpleNamespace | Namespace) and not is_own(type(value).__module__):
        return None
    own = getattr(value, "__dict__", None)
    return own if type(own) is dict else None


def _contents_of(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from dict.values(value)
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from value
    yield from (_attributes_of(value) or {}).values()


def _restorer(value: Any) -> Callable[[], bool] | None:
    """Return a function that restores a value and returns whether it had changed; None for an immutable value."""
    if isinstance(value, Tensor):
        return _tensor_restorer(value)
    for kind, get, put in _STATES:
        if isinstance(value, kind):
            return _state_restorer(value, get, put)
    if isinstance(value, np.ndarray):
        return _array_restorer(value)
    parts = [_container_restorer(value)] if isinstance(value, dict | list | set | deque) else []
    if (own := _attributes_of(value)) is not None:
        parts.append(_attributes_restorer(value, own))
    return (lambda: sum(put_back() for put_back in parts) > 0) if parts else None


def _set_state(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


_STATES: tuple[tuple[type, Any, Any], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (
        np.random.Generator,
        lambda one: one.bit_generator.state,
        _set_state,
    ),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
)
"""Types of random generators, with functions that get and set their state."""


def _as_bytes(state: Any) -> bytes:
    return pickle.dumps(state.numpy() if isinstance(state, Tensor) else state)


def _state_restorer(value: Any, get: Any, put: Any) -> Callable[[], bool]:
    before = get(value)
    as_bytes = _as_bytes(before)

    def put_back() -> bool:
        if _as_bytes(get(value)) == as_bytes:
            return False
        put(value, before)
        return True

    return put_back


def _array_restorer(value: Any) -> Callable[[], bool]:
    before = value.copy()

    def put_back() -> bool:
        if value.dtype == object or value.tobytes() == before.tobytes():
            return False
        value[...] = before
        return True

    return put_back


def _tensor_restorer(value: Tensor) -> Callable[[], bool]:
    if value.is_inference() or value.is_meta:
        return lambda: False
    version, before = value._version, value.detach().clone()

    def put_back() -> bool:
        if value._version == version:
            return False
        with torch.no_grad():
            value.copy_(before)
        return True

    return put_back


def _container_restorer(value: Any) -> Callable[[], bool]:
    kind = _kind_of(value)
    before: Any = dict(dict.items(value)) if issubclass(kind, dict) else kind(value)

    def put_back() -> bool:
        if _is_same(value, before):
            return False
        if issubclass(kind, dict) and value.keys() == before.keys():
            kind.update(value, before)
        else:
            kind.clear(value)
            (kind.extend if kind in (list, deque) else kind.update)(value, before)
        return True

    return put_back


def _kind_of(value: Any) -> Any:
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(value, kind))


def _attributes_restorer(owner: Any, own: dict[str, Any]) -> Callable[[], bool]:
    """Return a function that restores the attributes of an object, except cached properties."""
    kind = type(owner)
    cached = {name for one in kind.__mro__ for name, value in vars(one).items() if isinstance(value, cached_property)}
    excluded = cached | OF_MODULES if isinstance(owner, nn.Module) else cached
    before = {name: value for name, value in own.items() if name not in excluded}

    def put_back() -> bool:
        now = {name: value for name, value in own.items() if name not in excluded}
        if _is_same(now, before):
            return False
        for name in now.keys() - before.keys():
            del own[name]
        own.update(before)
        return True

    return put_back


def _attribute_restorer(owner: Any, name: str, before: Any) -> Callable[[], bool]:
    def put_back() -> bool:
        if vars(owner).get(name, MISSING) is before:
            return False
        type.__setattr__(owner, name, before)
        return True

    return put_back


def _item_restorer(owner: dict[str, Any], name: str, before: Any) -> Callable[[], bool]:
    def put_back() -> bool:
        if owner.get(name, MISSING) is before:
            return False
        owner[name] = before
        return True

    return put_back


def _cell_restorer(cell: CellType, before: Any) -> Callable[[], bool]:
    def put_back() -> bool:
        if cell.cell_contents is before:
            return False
        cell.cell_contents = before
        return True

    return put_back


def _is_same(value: Any, before: Any) -> bool:
    """Return whether a container has the identical objects of another one."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(key in before and before[key] is one for key, one in value.items())
    if isinstance(value, set):
        return bool(value == before)
    return all(one is other for one, other in zip(value, before, strict=True))
