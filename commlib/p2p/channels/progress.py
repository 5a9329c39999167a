"""Pumps: move a channel's messages on the poller's thread while no other thread waits for them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from commlib.errors import CommlibError
from commlib.p2p.channels.ends import Ends
from commlib.p2p.channels.posted_receives import PostedReceives

if TYPE_CHECKING:
    from commlib.group.group import Group

# A receiver between nodes looks for messages for so long after the last one (seconds): a library that moves large
# messages only when it is called has then moved them by the time that somebody asks.
_LISTENING = 0.5


class Pumps:
    """Both directions of one channel."""

    def __init__(self, group: Group, ends: Ends, text: str) -> None:
        self._poller, self._owner = group.runtime.poller, weakref.ref(group)
        self._ends = weakref.ref(ends)
        self._text = text
        self._sending = self._listening = False
        self._sent = 0  # how often `sent` was called
        self._listens = isinstance(ends.incoming, PostedReceives)
        self._until = 0.0

    def sent(self, *, lags: bool = False) -> None:
        """See to what has been sent and has not left yet, or not been found. `lags`: there is such a message."""
        ends = self._ends()
        self._sent += 1  # before the look at `_sending`: see `_send`
        lags = not self._sending and ends is not None and (lags or ends.outgoing.may_lag)
        if lags and ends is not None and ends.outgoing.is_under_way:
            self._sending = True
            self._poller.watch(_Pump(f"send on {self._text}", self._send), self._owner())

    def received(self) -> None:
        """See to what may come soon."""
        if self._listens:
            self._until = time.monotonic() + _LISTENING
            if not self._listening:
                self._listening = True
                self._poller.watch(_Pump(f"recv on {self._text}", self._listen), self._owner(), awaited=False)

    def _send(self) -> bool:
        ends, before = self._ends(), self._sent
        if ends is None or not _ask(ends, sending=True):
            self._sending = False
            # What was sent after it was asked for, and before it was said, has been left to this.
            self._sending = self._sent != before and ends is not None
        return not self._sending

    def _listen(self) -> bool:
        ends = self._ends()
        if ends is None or time.monotonic() > self._until or not _ask(ends, sending=False):
            self._listening = False
        return not self._listening


def _ask(ends: Ends, *, sending: bool) -> bool:
    """Let messages move; return whether to go on. What goes wrong is found again by who waits."""
    try:
        if sending:
            return ends.outgoing.is_under_way and ends.may_be_taken()
        incoming = ends.incoming
        # Whoever holds it asks itself, or was interrupted for good.
        if isinstance(incoming, PostedReceives) and incoming.lock.acquire(blocking=False):
            try:
                incoming.has_come()
            finally:
                incoming.lock.release()
    except CommlibError:
        return False
    return not ends.is_closed


class _Pump:
    __slots__ = ("description", "done")

    def __init__(self, description: str, done: Callable[[], bool]) -> None:
        self.description, self.done = description, done
