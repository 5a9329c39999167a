"""A prepared operation: checked once, run as often as wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from commlib.progress import Progress
from commlib.work import Work


class Plan:
    """A collective on fixed memory. Every rank of the group runs its plan as often as the others.

    `plan()` runs it now and returns the result array, `plan.start()` runs it on the progress thread and returns a Work.
    """

    __slots__ = ("_call", "_deliver", "_keep", "_progress", "_run", "text")

    def __init__(
        self,
        progress: Progress,
        text: str,
        call: Callable[[], Any] | None,
        run: Callable[[], Any],
        deliver: Callable[[], Any] | None,
        keep: Any,
    ) -> None:
        """`call` runs it in this thread, in turn; `run` runs it without asking whose turn it is.

        `deliver` returns the result (without it, `run` does); `keep` is kept alive.
        """
        self.text = text
        self._progress, self._call, self._run, self._deliver, self._keep = progress, call, run, deliver, keep

    def __repr__(self) -> str:
        return f"<Plan {self.text}>"

    def __call__(self) -> Any:
        """Run it now, after everything that was launched before, and return its result."""
        if self._call is None or self._deliver is None:
            return self._progress.run(self.text, self._run)
        self._call()
        return self._deliver()

    def start(self) -> Work:
        """Run it on the progress thread, after everything that was launched before."""
        return self._progress.start(self.text, self._finish)

    def _finish(self) -> Any:
        result = self._run()
        return result if self._deliver is None else self._deliver()
