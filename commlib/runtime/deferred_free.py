"""Deferred free: keep groups that this process has dropped until all their ranks have; then MPI can free them.

Freeing a communicator is collective, but ranks drop their groups at different times. So each rank notes its dropped
groups. At the next split of a group, which is collective, its ranks compare their notes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Key = tuple[str, int]
"""A group's key, unique in the job, and its number of ranks."""


class Closable(Protocol):
    """A resource of a group, such as its transport."""

    def close(self) -> None: ...


class DeferredFree:
    """The dropped groups of one process. Any thread may call its methods; the garbage collector may call `note`."""

    def __init__(self) -> None:
        self._groups: dict[Key, Sequence[Closable]] = {}
        self._lock = threading.RLock()

    def note(self, key: Key, parts: Sequence[Closable]) -> None:
        """Note a dropped group. parts: its resources, to close later."""
        with self._lock:
            self._groups[key] = parts

    def take(self, other: DeferredFree) -> None:
        """Take over the notes of another DeferredFree, which forgets them: no group may be freed twice."""
        with self._lock, other._lock:
            self._groups.update(other._groups)
            other._groups.clear()

    def free(self, gather: Callable[[Any], list[Any]]) -> None:
        """Free the groups whose ranks have all dropped them. Collective; `gather` all-gathers the ranks' notes.

        All ranks free the groups in the same order, which avoids deadlock. Several threads may call this at once for
        different groups: a group that several threads find is freed by the first.
        """
        with self._lock:
            mine = sorted(self._groups)
        dropped = Counter(key for notes in gather(mine) for key in notes)
        for key in mine:
            if dropped[key] == key[1]:
                with self._lock:
                    parts = self._groups.pop(key, ())
                for part in parts:
                    part.close()
