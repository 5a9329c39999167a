"""Contents: what containers, objects and functions hold, past what a user's class does when it is asked. [pure]

A table that makes objects when one of them is asked for would make them, and more.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Callable, ItemsView
from contextlib import suppress
from types import CellType, FunctionType, MemberDescriptorType
from typing import Any


def items_of(value: dict[Any, Any]) -> ItemsView[Any, Any]:
    """Return the items of a dict, in its order."""
    if type(value) is dict:
        return value.items()
    return own_method(value, "items")()  # type: ignore[no-any-return]


def elements_of(value: list[Any] | tuple[Any, ...] | deque[Any] | set[Any] | frozenset[Any]) -> list[Any]:
    """Return the elements of one of Python's own containers, or of a subclass of it."""
    return list(own_method(value, "__iter__")())


def own_method(value: Any, name: str) -> Callable[..., Any]:
    """Return a method of a container that reads or writes it and does no more; of what only looks like one its own."""
    kind = next((one for one in _KINDS if issubclass(type(value), one)), None)
    return getattr(value, name) if kind is None else functools.partial(getattr(kind, name), value)


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of an object's own attributes, those that it has in slots, too."""
    kind: Any = type(value)
    found: list[tuple[str, Any]] = []
    if kind.__dictoffset__:
        with suppress(AttributeError):  # some that are not written in Python hide it
            found += object.__getattribute__(value, "__dict__").items()
    for name, member in _slots_of(kind):
        try:
            found.append((name, member.__get__(value, kind)))
        except AttributeError:  # nothing is in it
            continue
    return found


def may_have_attributes(kind: Any) -> bool:
    """Return whether objects of a class have attributes of their own."""
    return bool(kind.__dictoffset__ or _slots_of(kind))


def held_by(function: FunctionType) -> list[Any]:
    """Return the defaults of a function, what it closes over, and its attributes."""
    cells = map(content_of, function.__closure__ or ())
    named = (function.__kwdefaults__ or {}), function.__dict__
    return [*(function.__defaults__ or ()), *cells, *(one for table in named for one in table.values())]


def content_of(cell: CellType) -> Any:
    """Return what is in a cell; None if nothing is in it by now."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(1000)
def _slots_of(kind: Any) -> tuple[tuple[str, MemberDescriptorType], ...]:
    found = (one for base in kind.__mro__ for one in vars(base).items())
    return tuple((name, member) for name, member in found if type(member) is MemberDescriptorType)


_KINDS = (OrderedDict, dict, list, tuple, deque, set, frozenset)
