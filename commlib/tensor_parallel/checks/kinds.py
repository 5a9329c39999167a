"""Kinds: what tells a call of a model from those that may go another way through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from commlib.tensor_parallel.checks.telling import Holding, Same, kind_of

__all__ = ["KINDS", "MISSES", "Holding", "Kinds", "Same", "kind_of"]

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

    def __deepcopy__(self, memo: Any) -> Kinds:
        found = object.__new__(Kinds)
        found._known, found._missed, found.looks = dict(self._known), Counter(self._missed), self.looks
        return found

    @property
    def too_many(self) -> bool:
        """As many were looked at as may be."""
        return self.looks >= KINDS
