"""Contents of containers, objects and functions, read without running methods of users' classes. [pure]

A table that creates entries on access would otherwise create them here.
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
    """Return the built-in method of a container or of a subclass; for other objects the method of their class."""
    kind = next((one for one in _KINDS if issubclass(type(value), one)), None)
    return getattr(value, name) if kind is None else functools.partial(getattr(kind, name), value)


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return the names and values of an object's own attributes, including those in slots."""
    kind: Any = type(value)
    attributes: list[tuple[str, Any]] = []
    if kind.__dictoffset__:
        with suppress(AttributeError):  # some types not written in Python hide it
            attributes += object.__getattribute__(value, "__dict__").items()
    for name, member in _slots_of(kind):
        try:
            attributes.append((name, member.__get__(value, kind)))
        except AttributeError:  # the slot is empty
            continue
    return attributes


def may_have_attributes(kind: Any) -> bool:
    """Return whether objects of a class have attributes of their own."""
    return bool(kind.__dictoffset__ or _slots_of(kind))


def list_held(function: FunctionType) -> list[Any]:
    """Return the defaults, closed-over values and attributes of a function."""
    cells = map(content_of, function.__closure__ or ())
    named = (function.__kwdefaults__ or {}), function.__dict__
    return [*(function.__defaults__ or ()), *cells, *(one for table in named for one in table.values())]


def content_of(cell: CellType) -> Any:
    """Return the contents of a cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@functools.lru_cache(1000)
def _slots_of(kind: Any) -> tuple[tuple[str, MemberDescriptorType], ...]:
    members = (one for base in kind.__mro__ for one in vars(base).items())
    return tuple((name, member) for name, member in members if type(member) is MemberDescriptorType)


_KINDS = (OrderedDict, dict, list, tuple, deque, set, frozenset)
