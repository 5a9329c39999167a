"""Retired: keep groups that this process has dropped until all their ranks say so. Only then can MPI free them.

Freeing a communicator is collective, but ranks drop their groups at different times. So a rank notes what it has
dropped, and at the next collective moment, when a group is made of others, its ranks compare their notes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Key = tuple[str, int]
"""A group's name, which no other group of the job has, and its number of ranks."""


class Closable(Protocol):
    """A part of a group: its transport, for example."""

    def close(self) -> None: ...


class Retired:
    """Keep what one process has dropped. Any thread may call its methods, and the garbage collector may call `note`."""

    def __init__(self) -> None:
        self._groups: dict[Key, Sequence[Closable]] = {}
        self._lock = threading.RLock()

    def note(self, key: Key, parts: Sequence[Closable]) -> None:
        """Note a group that is used no more."""
        with self._lock:
            self._groups[key] = parts

    def take(self, other: Retired) -> None:
        """Note what another one has noted, which forgets it: nothing may be freed twice."""
        with self._lock, other._lock:
            self._groups.update(other._groups)
            other._groups.clear()

    def free(self, gather: Callable[[Any], list[Any]]) -> None:
        """Free the groups whose ranks have all dropped them. Collective; `gather` tells every rank's notes to all.

        All ranks free them in the same order, so that no two ranks wait for each other. Several threads may do so at
        once, for different groups: whoever comes first frees what more than one has found.
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
