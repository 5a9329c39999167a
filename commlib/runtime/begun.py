"""Begun: hold the work of an operation until a thread waits for it and finishes it."""

from __future__ import annotations

from typing import Any, Protocol

from commlib.runtime.work import Work


class Finisher(Protocol):
    """Finish what has been begun, as the group's Progress does."""

    def hand_over(self) -> None:
        """Let the thread finish what has been begun."""
        ...

    def finish_begun(self, work: Work) -> None:
        """Finish `work` in this thread, unless another thread does."""
        ...


class Begun(Work):
    """An operation that has been begun. The thread that waits for it finishes it."""

    __slots__ = ("_progress",)

    def __init__(self, description: str, progress: Finisher) -> None:
        super().__init__(description)
        self._progress = progress

    def done(self) -> bool:
        """Return whether it has ended; if not, let the progress thread see to it."""
        if not self._done:
            self._progress.hand_over()
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        """Block until it has ended; see `Work.wait`."""
        if not self._done:
            if timeout is None:
                record = self.record
                if record is None:
                    self._progress.finish_begun(self)
                else:
                    since = record.waits()
                    try:
                        self._progress.finish_begun(self)
                    finally:
                        record.waited(since)
            else:
                self._progress.hand_over()
        return super().wait(timeout)
