"""Kinds: what tells a call of a model from those that may go another way through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from enum import Enum
from typing import Any

KINDS = 8
"""How many kinds of calls of a model are looked at."""

_MISSES = 3
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

    def miss(self, kind: Hashable) -> None:
        """Note that a call of a kind failed when somebody looked at it, so that the next one may be another.

        What fails again and again, as what cannot be looked at does, is taken as known.
        """
        self._missed[kind] += 1
        if self._missed[kind] == _MISSES:
            self.add(kind)

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

    Of flags, strings and members of an enumeration also which; numbers change with every call, and so do the lengths of
    lists. kind_of_other: of what is none of these.
    """
    kind = type(value)
    if kind is bool or kind is str:
        return value  # type: ignore[no-any-return]  # one of these
    if kind is tuple:
        return (kind, *(kind_of(one, kind_of_other) for one in value))
    if kind is list:
        return kind, frozenset(map(kind_of_other, value))
    if kind is dict:
        return frozenset((name, kind_of(one, kind_of_other)) for name, one in value.items())
    if issubclass(kind, Enum):  # the value is not asked: it may be one of a trace
        return kind, value.name
    return kind_of_other(value)
