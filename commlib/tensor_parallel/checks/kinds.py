"""Call kinds: distinguish the calls of a model that may run different operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from commlib.tensor_parallel.checks.call_signature import ObjectContents, SameObject, kind_of

__all__ = ["KINDS", "MISSES", "ObjectContents", "CallKinds", "SameObject", "kind_of"]

KINDS = 8
"""Maximum number of kinds of calls of a model that are checked."""

MISSES = 3
"""Maximum number of failed checks of a kind of call."""


class CallKinds:
    """The kinds of calls of a model that were checked, and the operations that the model ran in each, if known.

    looks: number of checked kinds.
    """

    def __init__(self) -> None:
        self._kinds: dict[Hashable, Hashable] = {}
        self._failures = Counter[Hashable]()
        self.looks = 0

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._kinds

    def add(self, kind: Hashable) -> None:
        """Mark a kind as known, without a check."""
        self._kinds[kind] = None

    def settle(self, kind: Hashable, way: Hashable = None) -> None:
        """Record a successful check of a call of a kind. way: see `Trace.way`."""
        self._kinds[kind] = way
        self.looks += 1

    def miss(self, kind: Hashable) -> bool:
        """Record a failed check of a call of a kind; its next call is checked again.

        After MISSES failures a kind is marked as known, because its calls cannot be checked. Return whether it is
        known.
        """
        self._failures[kind] += 1
        if self._failures[kind] == MISSES:
            self.add(kind)
        return kind in self

    def way(self, kind: Hashable) -> Hashable:
        """Return the operations that the model runs in calls of a kind (see `Trace.way`); None if unknown."""
        return self._kinds.get(kind)

    def forget(self) -> None:
        """Forget all kinds, because the model has changed. The number of checks is kept."""
        self._kinds.clear()

    def __deepcopy__(self, memo: Any) -> CallKinds:
        copied = object.__new__(CallKinds)
        copied._kinds, copied._failures, copied.looks = dict(self._kinds), Counter(self._failures), self.looks
        return copied

    @property
    def too_many(self) -> bool:
        """Whether the maximum number of kinds has been checked."""
        return self.looks >= KINDS
