"""Started operations: a Work that is started in its caller's thread and finished by the thread that waits for it."""

from __future__ import annotations

from typing import Any, Protocol

from commlib.runtime.work import Work


class Finisher(Protocol):
    """Finishes started operations, as the group's Progress does."""

    def hand_over(self) -> None:
        """Let the progress thread finish the started operation."""
        ...

    def finish_started(self, work: Work) -> None:
        """Finish `work` in this thread, unless another thread already does."""
        ...


class StartedOperations(Work):
    """A started operation. The thread that waits for it finishes it."""

    __slots__ = ("_progress",)

    def __init__(self, description: str, progress: Finisher) -> None:
        super().__init__(description)
        self._progress = progress

    def done(self) -> bool:
        """Return whether it has ended; if not, let the progress thread finish it."""
        if not self._done:
            self._progress.hand_over()
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        """Block until it has ended; see `Work.wait`."""
        if not self._done:
            if timeout is None:
                record = self.record
                if record is None:
                    self._progress.finish_started(self)
                else:
                    since = record.waits()
                    try:
                        self._progress.finish_started(self)
                    finally:
                        record.waited(since)
            else:
                self._progress.hand_over()
        return super().wait(timeout)
