"""Queued: send asynchronously, and wait for room on the other side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.dtypes import Array
from commlib.process import forks
from commlib.runtime.work import Work
from commlib.transport.base import WaitHook


class Sending:
    """Answer the poller. Users ask `Queued` itself."""

    __slots__ = ("description", "done")

    def __init__(self, work: Queued) -> None:
        self.description, self.done = work.description, work.poll


class Queued(Work):
    """Hold a send until the poller has sent it.

    `make` returns what is sent, or None while it is not there yet. `watch` raises where it can be sent no more; `move`
    sends what there is room for; `wait_for` waits until this one has been sent, at most for some seconds.
    """

    __slots__ = ("_make", "_move", "_wait_for", "array", "watch")

    def __init__(
        self,
        description: str,
        make: Callable[[], Array | None],
        watch: WaitHook,
        move: Callable[[], bool],
        wait_for: Callable[[Queued, float | None], None],
    ) -> None:
        super().__init__(description)
        self._make, self.watch, self._move, self._wait_for = make, watch, move, wait_for
        self.array: Array | None = None

    def made(self) -> Array | None:
        """Return what is sent, made once; None while it is not there yet."""
        if self.array is None:
            self.array = self._make()
        return self.array

    @property
    def has_ended(self) -> bool:
        """Whether it has been sent, or has failed."""
        return super().done()

    def poll(self) -> bool:
        """Make progress, on the poller's thread; return whether it has been sent, or has failed."""
        if not self.has_ended and not forks.is_child():
            self._move()
        return self.has_ended

    def wait(self, timeout: float | None = None) -> Any:
        """Block until it has been sent, at most `timeout` seconds; see `Work.wait`."""
        if not self.has_ended:
            forks.check(self.description)
            self._wait_for(self, timeout)
        return super().wait(0)
