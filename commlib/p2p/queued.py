"""Queued: an asynchronous send that waits for room on the other side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib import forks
from commlib.dtypes import Array
from commlib.runtime.work import Work


class Queued(Work):
    """It is sent when somebody waits for it, or for what comes after, and by the poller.

    `move` sends what there is room for; `wait_for` does so until this one has been sent, or for some seconds.
    """

    __slots__ = ("_move", "_wait_for", "array")

    def __init__(
        self,
        description: str,
        array: Array,
        move: Callable[[], bool],
        wait_for: Callable[[Queued, float | None], None],
    ) -> None:
        super().__init__(description)
        self.array, self._move, self._wait_for = array, move, wait_for

    @property
    def has_ended(self) -> bool:
        """Whether it has been sent, or has failed."""
        return super().done()

    def done(self) -> bool:
        """Make progress, and return whether it has been sent, or has failed. Never blocks."""
        if not self.has_ended and not forks.is_child():
            self._move()
        return self.has_ended

    def wait(self, timeout: float | None = None) -> Any:
        """Block until it has been sent, at most `timeout` seconds; see `Work.wait`."""
        if not self.has_ended:
            forks.check(self.description)
            self._wait_for(self, timeout)
        return super().wait(0)
