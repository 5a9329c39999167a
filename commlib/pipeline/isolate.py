"""Isolated calls: call a user's function again without side effects, on copies of its state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet
from types import CellType, FunctionType, MethodType
from typing import Any


def isolate(function: Callable[..., Any], shared: dict[int, Any] | None = None) -> Callable[..., Any]:
    """Return a function that computes the same, but changes none of the original's objects and variables.

    Objects, closures, defaults and the module variables that it names are copied if possible; the state of other
    functions that it calls is not. shared: by id, objects not to copy, as for `copy.deepcopy`.
    """
    return _copy(function, {} if shared is None else dict(shared))  # type: ignore[no-any-return]


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _copy_function(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy(value.__self__, memo))
    if isinstance(value, functools.partial):
        arguments = [_copy(one, memo) for one in value.args]
        named = {name: _copy(one, memo) for name, one in value.keywords.items()}
        return functools.partial(_copy(value.func, memo), *arguments, **named)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # it cannot be copied
        return value


def _copy_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    memo[id(function)] = function  # it may refer to itself
    names = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    state = {name: _copy(value, memo) for name, value in names.items() if _is_state(value)}
    cells = None
    if function.__closure__ is not None:
        cells = tuple(_copy_cell(cell, memo) for cell in function.__closure__)
    new = FunctionType(
        function.__code__,
        {**function.__globals__, **state},
        function.__name__,
        _copy(function.__defaults__, memo),
        cells,
    )
    new.__kwdefaults__ = _copy(function.__kwdefaults__, memo)
    new.__dict__.update(_copy(function.__dict__, memo))
    return new


def _copy_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    try:
        return CellType(_copy(cell.cell_contents, memo))
    except ValueError:  # it is empty
        return CellType()


def _is_state(value: Any) -> bool:
    """Return whether a module variable is an object that a function may change."""
    return isinstance(value, MutableMapping | MutableSequence | MutableSet) or hasattr(value, "register_forward_hook")
