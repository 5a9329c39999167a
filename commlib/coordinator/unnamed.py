"""Unnamed: name the operations that the user gives no name.

Names are few and come round again, so an operation in a loop soon has a name that ranks know. As many operations can be
in flight at once; more of them wait here until their name is free.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Container, Iterator

from commlib.coordinator.pending import Pending

_UNNAMED, _NAMES = ".noname.", 64


class Unnamed:
    """Number the unnamed operations of one rank. Ranks count alike as long as none has joined."""

    def __init__(self) -> None:
        self._counters: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)  # by verb
        self._later: defaultdict[str, deque[Pending]] = defaultdict(deque)

    def next_name(self, verb: str) -> str:
        """Return the name of the next operation of a verb."""
        return f"{verb}{_UNNAMED}{next(self._counters[verb]) % _NAMES}"

    def is_one(self, name: str) -> bool:
        """Return whether an operation of this name is one of these."""
        return _UNNAMED in name

    def put_off(self, pending: Pending) -> None:
        """Keep one until its name is free."""
        self._later[pending.request.name].append(pending)

    def due(self, taken: Container[str]) -> Iterator[Pending]:
        """Yield what was put off and has a name that is not taken any more: one for each name."""
        for name in [name for name in self._later if name not in taken]:
            yield self._later[name][0]
            self._later[name].popleft()  # now that it has its name: it is in one place at any time
            if not self._later[name]:
                del self._later[name]

    def waiting(self) -> list[Pending]:
        """Return all that was put off."""
        return [pending for queue in self._later.values() for pending in queue]

    def count_anew(self) -> None:
        """Count from 0: ranks have counted different numbers, and count alike again from here on."""
        self._counters.clear()

    def clear(self) -> None:
        """Forget what was put off."""
        self._later.clear()
