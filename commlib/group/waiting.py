"""Waiting: one hook for the many waits of an operation."""

from __future__ import annotations

import weakref
from time import monotonic
from typing import Protocol

from commlib.transport.base import WaitHook


class WaitWatcher(Protocol):
    """A group, which watches waits."""

    @property
    def call_number(self) -> int:
        """The number of the last call."""
        ...

    def watch(self, text: str) -> WaitHook:
        """Return the watchdog for one wait."""
        ...


class Waiting:
    """A wait hook that makes a new watchdog for each wait of an operation."""

    def __init__(self, group: WaitWatcher, text: str) -> None:
        self._group, self._text = weakref.ref(group), text
        self._watch: WaitHook | None = None
        self._call = 0
        self._last = 0.0

    def __call__(self) -> None:
        now = monotonic()
        group = self._group()
        if group is None:
            return
        call = group.call_number
        # Within one wait this is called about every 20 ms; a wait of the next call may start just as soon.
        if self._watch is None or call != self._call or now - self._last > 1.0:
            self._watch = group.watch(self._text)
        self._last, self._call = now, call
        self._watch()
