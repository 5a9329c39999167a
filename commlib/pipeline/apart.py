"""Apart: call a user's function once more without anybody noticing: on copies of what it keeps."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, MutableMapping, MutableSequence, MutableSet
from types import CellType, FunctionType, MethodType
from typing import Any


def apart(function: Callable[..., Any], shared: dict[int, Any] | None = None) -> Callable[..., Any]:
    """Return a function that computes the same, and changes none of the objects and variables that this one would.

    Objects, closures, defaults and the module's variables that it names are copied, if they can be; what other
    functions keep that it calls is not. shared: by id, what is not to be copied, as `copy.deepcopy` takes it.
    """
    return _copied(function, {} if shared is None else dict(shared))  # type: ignore[no-any-return]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _of_function(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copied(value.__self__, memo))
    if isinstance(value, functools.partial):
        arguments = [_copied(one, memo) for one in value.args]
        named = {name: _copied(one, memo) for name, one in value.keywords.items()}
        return functools.partial(_copied(value.func, memo), *arguments, **named)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # it cannot be copied
        return value


def _of_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    memo[id(function)] = function  # where it names itself
    names = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    kept = {name: _copied(value, memo) for name, value in names.items() if _is_state(value)}
    cells = None
    if function.__closure__ is not None:
        cells = tuple(_cell(cell, memo) for cell in function.__closure__)
    new = FunctionType(
        function.__code__,
        {**function.__globals__, **kept},
        function.__name__,
        _copied(function.__defaults__, memo),
        cells,
    )
    new.__kwdefaults__ = _copied(function.__kwdefaults__, memo)
    new.__dict__.update(_copied(function.__dict__, memo))
    return new


def _cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    try:
        return CellType(_copied(cell.cell_contents, memo))
    except ValueError:  # it is empty
        return CellType()


def _is_state(value: Any) -> bool:
    """Return whether a variable of a module is something that a function may change."""
    return isinstance(value, MutableMapping | MutableSequence | MutableSet) or hasattr(value, "register_forward_hook")
