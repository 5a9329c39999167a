"""Queued sends: asynchronous sends of a channel that wait for room on the other side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.dtypes import Array
from commlib.process import forks
from commlib.runtime.work import Work
from commlib.transport.base import WaitHook


class SendPoll:
    """The poller's view of a queued send. Users call the send's own methods."""

    __slots__ = ("description", "done")

    def __init__(self, work: QueuedSend) -> None:
        self.description, self.done = work.description, work.poll


class QueuedSend(Work):
    """A send that the poller will do.

    make: returns the array, or None while it is not ready. watch: raises if the send has become impossible. move: sends
    queued messages while there is room. wait_for: waits for this send, up to a timeout.
    """

    __slots__ = ("_make", "_move", "_wait_for", "array", "watch")

    def __init__(
        self,
        description: str,
        make: Callable[[], Array | None],
        watch: WaitHook,
        move: Callable[[], bool],
        wait_for: Callable[[QueuedSend, float | None], None],
    ) -> None:
        super().__init__(description)
        self._make, self.watch, self._move, self._wait_for = make, watch, move, wait_for
        self.array: Array | None = None

    def make_array(self) -> Array | None:
        """Return the array to send, made only once; None while it is not ready."""
        if self.array is None:
            self.array = self._make()
        return self.array

    @property
    def has_ended(self) -> bool:
        """Whether the send has left or failed."""
        return super().done()

    def poll(self) -> bool:
        """Make progress, on the poller's thread; return whether the send has left or failed."""
        if not self.has_ended and not forks.is_child():
            self._move()
        return self.has_ended

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the send has left, at most `timeout` seconds; see `Work.wait`."""
        if not self.has_ended:
            forks.check(self.description)
            self._wait_for(self, timeout)
        return super().wait(0)
