"""Pending: hold a named operation that was asked for here, and its arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from time import monotonic
from typing import Any, Protocol

from commlib.coordinator.request import Request
from commlib.runtime.work import Work

Array = Any


class Drives(Protocol):
    """Make progress with pending operations. `failed` are those whose error was never asked for."""

    failed: dict[Any, None]

    def drive(self, until: Callable[[], bool]) -> None:
        """Make progress in this thread until something is so."""
        ...

    def wake(self) -> None:
        """Let the thread of its own make progress."""
        ...


class Pending(Work):
    """Hold one named operation. Its arrays must not be touched until it is done."""

    __slots__ = ("_coordinator", "extra", "inputs", "outputs", "request", "since", "warned")

    def __init__(
        self, coordinator: Drives, request: Request, inputs: Sequence[Array], outputs: Sequence[Array], extra: Any
    ) -> None:
        self.description = request.name  # and not Work.__init__: there are many of these, and each call counts
        self.seen = self._done = self.warned = False
        self._error = self._result = None
        self.seconds = 0.0
        self._running = Lock()
        self._running.acquire()
        self._coordinator, self.request = coordinator, request
        self.inputs, self.outputs, self.extra = inputs, outputs, extra
        self.since = monotonic()
        self.record = None

    def wait(self, timeout: float | None = None) -> Any:
        """Block until it has ended, at most `timeout` seconds, and return its result; see `Work.wait`.

        The waiting thread negotiates: no other thread has to be woken for an operation that is waited for at once.
        """
        if not self._done:
            if timeout is None:
                record = self.record
                if record is not None:
                    since = record.waits()
                try:
                    self._coordinator.drive(self.done)
                except BaseException:
                    self.seen = self._done  # whoever waits has what ended it
                    self._forget_failure()
                    raise
                finally:
                    if record is not None:
                        record.waited(since)
            else:
                self._coordinator.wake()
        try:
            return super().wait(timeout)
        finally:
            if self._error is not None:
                self._forget_failure()

    def _forget_failure(self) -> None:
        if self.seen:
            self._coordinator.failed.pop(self, None)  # it would keep the traceback's frames alive

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """End it, and let go of its arrays."""
        self.inputs = self.outputs = ()
        self.extra = None
        if self.record is not None:
            self.record.end(error)
        self._result, self._error = result, error  # `Work.finish`, written out: they are many
        if error is not None:
            self._trace = error.__traceback__
            self._coordinator.failed[self] = None
        self._done = True
        self._running.release()

    def fail(self, error: BaseException) -> None:
        """End it badly, unless it has ended; also where `finish` was interrupted on its way."""
        if not self._done:
            self.finish(error=error)
        elif self._running.locked():
            self._running.release()
