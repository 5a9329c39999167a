"""Kinds: what tells a call of a model from those that may go another way through it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from enum import Enum, Flag
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType, MethodType, SimpleNamespace
from typing import Any

import numpy as np

from commlib.functional.contents import items_of

KINDS = 8
"""How many kinds of calls of a model are looked at."""

MISSES = 3
"""How often calls of a kind are looked at that fail."""


class Kinds:
    """The kinds of calls of a model that are known to be right, and the way that the model went in each, if told.

    looks: how many of them somebody has looked at.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Hashable] = {}
        self._missed = Counter[Hashable]()
        self.looks = 0

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._known

    def add(self, kind: Hashable) -> None:
        """Take a kind as known, without a look."""
        self._known[kind] = None

    def settle(self, kind: Hashable, way: Hashable = None) -> None:
        """Note that somebody has looked at a call of a kind, and found it right. way: see `Trace.way`."""
        self._known[kind] = way
        self.looks += 1

    def miss(self, kind: Hashable) -> bool:
        """Note that a call of a kind failed when somebody looked at it, so that the next one may be another.

        What fails again and again, as what cannot be looked at does, is taken as known: return whether this one is.
        """
        self._missed[kind] += 1
        if self._missed[kind] == MISSES:
            self.add(kind)
        return kind in self

    def way(self, kind: Hashable) -> Hashable:
        """Return which way the model goes in calls of a kind; None if nobody knows."""
        return self._known.get(kind)

    def forget(self) -> None:
        """Take no kind for known any more, as of a model that is another one by now. Looks still count."""
        self._known.clear()

    @property
    def too_many(self) -> bool:
        """As many were looked at as may be."""
        return self.looks >= KINDS


def kind_of(value: Any, kind_of_other: Callable[[Any], Hashable] = type) -> Hashable:
    """Return what tells an argument from those of other kinds: its type, and those of what is in it.

    Of flags, strings, paths, members of an enumeration and classes also which, of functions their code and what they
    close over. Not which strings are in lists, which may be a batch, nor which numbers come, or how many: they change
    with every call. Short lists of several kinds are told in order; of lists of tensors, and other objects, how many
    there are. Dataclasses and namespaces are looked into, other objects are not. kind_of_other: of what is none of
    these.
    """
    handle = _handle_of(type(value))  # type: ignore[arg-type]  # types have a hash
    return kind_of_other(value) if handle is None else handle(value, kind_of_other)


Handle = Callable[[Any, Callable[[Any], Hashable]], Hashable]


@functools.lru_cache(1000)
def _handle_of(kind: Any) -> Handle | None:
    """Return what tells the kinds of values of a type. Values are not asked for their class: some are of a trace."""
    if kind in (bool, str, np.bool_) or issubclass(kind, type | BuiltinFunctionType | PurePath):
        return _itself
    if issubclass(kind, Enum):
        return _member
    return next(
        (handle for base, handle in _HANDLES if issubclass(kind, base)), _fields if is_dataclass(kind) else None
    )


def _itself(value: Any, _: Any) -> Hashable:
    return value  # type: ignore[no-any-return]  # it has a hash


def _member(value: Any, _: Any) -> Hashable:
    return type(value), value.name, value.value if isinstance(value, Flag) else None


def _called(value: Any, kind_of_other: Any, depth: int = 0) -> Hashable:
    """Tell a function by its code, which is that of each lambda of a line, and by what it holds; a method so, too."""
    kind: Any = type(value)
    if depth == _DEPTH:
        return kind  # type: ignore[no-any-return]  # types have a hash
    held: list[Any]
    mark: Any
    if kind is FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        mark, held = value.__code__, [*defaults, *map(_content, value.__closure__ or ())]
    elif kind is MethodType:
        mark, held = type(value.__self__), [value.__func__]
    elif issubclass(kind, functools.partial):
        mark, held = (kind, *value.keywords), [value.func, *value.args, *value.keywords.values()]
    else:
        handle = _handle_of(kind)
        return handle(value, kind_of_other) if handle in (_itself, _member) else kind_of_other(value)
    return mark, *(_called(one, kind_of_other, depth + 1) for one in held)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it by now
        return None


def _array(value: Any, _: Any) -> Hashable:
    return type(value), value.dtype.str, value.ndim


def _tuple(value: Any, kind_of_other: Any) -> Hashable:
    return type(value), *(kind_of(one, kind_of_other) for one in tuple.__iter__(value))


def _list(value: Any, kind_of_other: Any) -> Hashable:
    kinds = [str if type(one) is str else kind_of(one, kind_of_other) for one in list.__iter__(value)]
    told = frozenset(kinds)
    if len(told) > 1 and len(kinds) <= _SHORT:
        return type(value), *kinds
    is_counted = len(kinds) > 1 and not told & _COUNTLESS
    return (type(value), told, len(kinds)) if is_counted else (type(value), told)


def _set(value: Any, kind_of_other: Any) -> Hashable:
    return type(value), frozenset(kind_of(one, kind_of_other) for one in value)


def _dict(value: Any, kind_of_other: Any) -> Hashable:
    return frozenset((name, kind_of(one, kind_of_other)) for name, one in items_of(value))


def _proxy(value: Any, kind_of_other: Any) -> Hashable:
    return frozenset((name, kind_of(one, kind_of_other)) for name, one in value.items())


def _slice(value: Any, kind_of_other: Any) -> Hashable:
    return slice, *(kind_of(one, kind_of_other) for one in (value.start, value.stop, value.step))


def _fields(value: Any, kind_of_other: Any) -> Hashable:
    own = getattr(value, "__dict__", None)
    if own is None:  # it has slots
        own = {one.name: getattr(value, one.name, None) for one in fields(value)}
    return type(value), _dict(own, kind_of_other)


_SHORT = 8
"""Elements of a list whose order is told."""
_COUNTLESS = frozenset((str, int, float, complex, bool, True, False))
"""Kinds of elements of which any number may come: a batch of them."""
_DEPTH = 3
"""How far it is looked into functions that hold others."""

_HANDLES: tuple[tuple[type, Handle], ...] = (
    (dict, _dict),
    (tuple, _tuple),
    (list, _list),
    (set, _set),
    (frozenset, _set),
    (FunctionType, _called),
    (MethodType, _called),
    (functools.partial, _called),
    (np.ndarray, _array),
    (slice, _slice),
    (MappingProxyType, _proxy),
    (SimpleNamespace, _fields),
)
