"""Channel progress: move a channel's messages on the poller's thread while no other thread waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from commlib.errors import CommlibError
from commlib.p2p.channels.ends import ChannelEnds
from commlib.p2p.channels.posted_receives import PostedReceives

if TYPE_CHECKING:
    from commlib.group.group import Group

# Seconds after the last message for which a receiver between nodes keeps polling. MPI libraries may move large messages
# only when called, so polling moves them before the user calls `recv`.
_LISTENING = 0.5


class ChannelProgress:
    """Progress of both directions of one channel."""

    def __init__(self, group: Group, ends: ChannelEnds, text: str) -> None:
        self._group, self._ends, self._text = group, ends, text
        self._sending = self._listening = False
        self._sends = 0  # how often `sent` was called
        self._listens = isinstance(ends.incoming, PostedReceives)
        self._until = 0.0

    def sent(self, *, lags: bool = False) -> None:
        """Watch sent messages that have not left or been mapped yet. lags: there is such a message."""
        outgoing = self._ends.outgoing
        self._sends += 1  # before reading `_sending`: see `_send`
        if not self._sending and (lags or outgoing.may_lag) and outgoing.is_in_flight:
            self._sending = True
            self._group.runtime.poller.watch(_ProgressTask(f"send on {self._text}", self._send), self._group)

    def received(self) -> None:
        """Poll for the next messages for a while."""
        if self._listens:
            self._until = time.monotonic() + _LISTENING
            if not self._listening:
                self._listening = True
                self._group.runtime.poller.watch(
                    _ProgressTask(f"recv on {self._text}", self._listen), self._group, awaited=False
                )

    def _send(self) -> bool:
        before = self._sends
        if not _poll(self._ends, sending=True):
            self._sending = False
            # A send between the poll and this line saw `_sending` and relies on this watch.
            self._sending = self._sends != before
        return not self._sending

    def _listen(self) -> bool:
        if time.monotonic() > self._until or not _poll(self._ends, sending=False):
            self._listening = False
        return not self._listening


def _poll(ends: ChannelEnds, *, sending: bool) -> bool:
    """Make progress; return whether to continue. Errors are dropped: the next waiting call gets them again."""
    try:
        if sending:
            return ends.outgoing.is_in_flight and ends.may_be_received()
        incoming = ends.incoming
        # A thread that holds the lock polls itself, or was interrupted for good.
        if isinstance(incoming, PostedReceives) and incoming.lock.acquire(blocking=False):
            try:
                incoming.has_arrived()
            finally:
                incoming.lock.release()
    except CommlibError:
        return False
    return not ends.is_closed


class _ProgressTask:
    __slots__ = ("description", "done")

    def __init__(self, description: str, done: Callable[[], bool]) -> None:
        self.description, self.done = description, done
