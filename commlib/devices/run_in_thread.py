"""Run a library call that may block uninterruptibly in a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class ThreadCall:
    """A call in a daemon thread, which does not block exit. It is an `Event`: done when the call has returned."""

    def __init__(self, run: Callable[[], Any], name: str) -> None:
        self._run, self._value = run, None
        self._error: BaseException | None = None
        self._happened = threading.Event()
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            self._work()

    def _work(self) -> None:
        try:
            self._value = self._run()
        except BaseException as error:
            self._error = error
        self._happened.set()

    def done(self) -> bool:
        return self._happened.is_set()

    def result(self) -> Any:
        """Return the value of the call, or raise its error. Call it only when done."""
        if self._error is not None:
            raise self._error
        return self._value
