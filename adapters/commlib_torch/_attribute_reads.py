"""Attribute reads: record the attributes that forwards read, of modules and their objects, during a trace."""

from __future__ import annotations

import enum
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from commlib.tensor_parallel.recording import replace_attribute
from commlib_torch._guards import MISSING, Guards
from commlib_torch._snapshot import OF_MODULES, cells_of, globals_of, is_own, methods_of, named_in, own_classes

_OF_TORCH = OF_MODULES | frozenset(dir(nn.Module))
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_VALUES = (
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    frozenset,
    np.ndarray,
    np.generic,
    Tensor,
    enum.Enum,
)


class AttributeReads:
    """Records reads while `watching` runs.

    paths: names of the modules to watch. shown: called with the name of a tensor attribute and the tensor; returns the
    value for forward. refuse: called for reads that a trace must not contain; raises.
    """

    def __init__(
        self,
        paths: Mapping[nn.Module, str],
        title: str,
        readings: Guards,
        *,
        shown: Callable[[str, Tensor], Any],
        refuse: Callable[[str], None],
    ) -> None:
        self._paths, self._title, self._readings = paths, title, readings
        self._shown, self._refuse = shown, refuse
        self._titles: dict[int, str] = {}
        self._objects: list[Any] = []  # keeps their ids valid
        self._kinds: set[type] = set()
        self._functions: dict[int, FunctionType] = {}
        self._is_noting = False
        self._stack = ExitStack()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record reads within the context."""
        with self._stack:
            self._stack.enter_context(replace_attribute(nn.Module, "__getattribute__", self._getter_of_modules()))
            yield

    def note_globals(self, module: nn.Module) -> None:
        """Record the names that a module's forward uses: global values, and attributes of its class."""
        kind = type(module)
        for function in methods_of(kind):
            self._note_function(function)
            for name in named_in(function.__code__):
                value = next((vars(one)[name] for one in own_classes(kind) if name in vars(one)), MISSING)
                if (value is None or isinstance(value, _VALUES)) and not name.startswith("__"):
                    self._readings.note(kind, name, f"{kind.__name__}.{name}", value)

    def _note_function(self, function: FunctionType) -> None:
        """Record the outer values of a function, and those of functions that it names."""
        if id(function) in self._functions:
            return
        self._functions[id(function)] = function
        named = [(function.__globals__, name, f"the global {name}", one) for name, one in globals_of(function)]
        around = [(cell, "cell_contents", name, one) for name, cell, one in cells_of(function)]
        for owner, name, title, value in (*named, *around):
            if isinstance(value, FunctionType):
                self._note_function(value)
            elif value is None or isinstance(value, _VALUES):
                self._readings.note(owner, name, title, value)

    def _getter_of_modules(self) -> Any:
        read, paths = object.__getattribute__, self._paths

        def get(module: nn.Module, name: str) -> Any:
            try:
                value = read(module, name)
            except AttributeError:
                if name not in _OF_TORCH and not name.startswith("__") and module in paths:
                    self._note_missing(module, name)
                raise
            if name in _OF_TORCH or name.startswith("__") or module not in paths:
                return value
            return self._value(module, name, value, f"{paths[module] or self._title}.{name}")

        return get

    def _note_missing(self, module: nn.Module, name: str) -> None:
        """Record that an attribute is missing, or is a layer, weight or buffer that is None."""
        own = object.__getattribute__(module, "__dict__")
        values = [own[kind][name] for kind in ("_parameters", "_buffers", "_modules") if name in own[kind]]
        if type(module).__getattr__ is nn.Module.__getattr__ and (not values or values[0] is None):
            title = f"{self._paths[module] or self._title}.{name}"
            self._note(module, name, title, None if values else MISSING)

    def _getter_of(self, kind: type) -> Any:
        read: Any = kind.__getattribute__

        def get(one: Any, name: str) -> Any:
            value = read(one, name)
            title = self._titles.get(id(one))
            if title is None or self._is_noting:
                return value
            if (
                name == "__dict__" and sys._getframe(1).f_globals.get("__name__") != "functools"
            ):  # for a cached property
                for inner, inner_value in value.items():
                    self._value(one, inner, inner_value, f"{title}.{inner}")
            return value if name.startswith("__") else self._value(one, name, value, f"{title}.{name}")

        return get

    def _value(self, owner: Any, name: str, value: Any, title: str) -> Any:
        """Record an attribute, and return the value for forward."""
        kind = type(value)
        if issubclass(kind, nn.Module | fx.Proxy) or _is_computed(owner, name):
            return value  # its computation reads other attributes
        if issubclass(kind, _GENERATORS):
            self._refuse(f"draws random numbers of its own ({title}), which would be constant in the trace")
        if hasattr(kind, "__next__"):
            self._refuse(f"takes from {title}, which tracing would do only once")
        if issubclass(kind, Tensor) and isinstance(owner, nn.Module):
            self._note(owner, name, title, value, is_shown=True)
            return self._shown(f"{self._paths[owner]}.{name}".removeprefix("."), value)
        if value is None or issubclass(kind, _VALUES) or not _is_made_up(owner, name):
            self._note(owner, name, title, value)
        if isinstance(value, FunctionType):
            self._note_function(value)
        self._look_into(value, title)
        return value

    def _note(self, owner: Any, name: str, title: str, value: Any, *, is_shown: bool = False) -> None:
        self._is_noting = True
        try:
            self._readings.note(owner, name, title, value, is_shown=is_shown)
        finally:
            self._is_noting = False

    def _look_into(self, value: Any, title: str) -> None:
        """Record the reads of an object of a user's class, such as a configuration."""
        kind = type(value)
        if issubclass(kind, (*_VALUES, type, FunctionType, MethodType)) or not is_own(kind.__module__):
            return
        if id(value) not in self._titles:
            self._titles[id(value)] = title
            self._objects.append(value)
        if kind not in self._kinds:
            self._kinds.add(kind)
            try:
                self._stack.enter_context(replace_attribute(kind, "__getattribute__", self._getter_of(kind)))
            except TypeError:  # implemented in C
                return


def _is_computed(owner: Any, name: str) -> bool:
    """Return whether an attribute is a method or a method's result."""
    attribute = next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), MISSING)
    if isinstance(attribute, cached_property):
        return True
    if name in _own_attribute(owner):
        return False
    return hasattr(attribute, "__get__") and not hasattr(attribute, "__objclass__")  # slots have it


def _is_made_up(owner: Any, name: str) -> bool:
    """Return whether an attribute comes from `__getattr__` or the like, possibly as a new object each time."""
    return name not in _own_attribute(owner) and not any(name in vars(kind) for kind in type(owner).__mro__)


def _own_attribute(owner: Any) -> dict[str, Any]:
    try:
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    except AttributeError:
        return {}
