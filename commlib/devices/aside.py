"""Aside: run what may block in a library, where nothing can interrupt it, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Aside:
    """See above; an `Event` that has happened when it has run. A thread that never comes back ends with the process."""

    def __init__(self, run: Callable[[], Any], name: str) -> None:
        self._run, self._value = run, None
        self._error: BaseException | None = None
        self._happened = threading.Event()
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except RuntimeError:  # the interpreter ends, and starts none any more
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
        """Return its value, or raise its error, once it is done."""
        if self._error is not None:
            raise self._error
        return self._value
