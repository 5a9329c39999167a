"""Unnamed operations: generate names for operations without one.

There are few names, which repeat, so ranks soon know the name of an operation in a loop. As many operations can be in
flight at once as there are names. Others wait here until their name is free.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Container, Iterator

from commlib.coordinator.pending_op import PendingOp

_UNNAMED, _NAMES = ".noname.", 64


class UnnamedOps:
    """Numbers the unnamed operations of one rank. Ranks count the same as long as no rank has joined."""

    def __init__(self) -> None:
        self._counters: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # by verb
        self._later: defaultdict[str, deque[PendingOp]] = defaultdict(deque)

    def next_name(self, verb: str) -> str:
        """Return the name of the next operation of a verb."""
        return f"{verb}{_UNNAMED}{next(self._counters[verb]) % _NAMES}"

    def is_unnamed(self, name: str) -> bool:
        """Return whether a name was generated here."""
        return _UNNAMED in name

    def hold_back(self, pending: PendingOp) -> None:
        """Hold an operation until its name is free."""
        self._later[pending.request.name].append(pending)

    def due(self, used: Container[str]) -> Iterator[PendingOp]:
        """Yield the held operations whose names are free now, one for each name."""
        for name in [name for name in self._later if name not in used]:
            yield self._later[name][0]
            self._later[name].popleft()  # removed after it has its name, so it is always in exactly one place
            if not self._later[name]:
                del self._later[name]

    def waiting(self) -> list[PendingOp]:
        """Return all held operations."""
        return [pending for queue in self._later.values() for pending in queue]

    def restart_count(self) -> None:
        """Count from 0 again, because ranks may have counted different numbers."""
        self._counters.clear()

    def clear(self) -> None:
        """Drop all held operations."""
        self._later.clear()
