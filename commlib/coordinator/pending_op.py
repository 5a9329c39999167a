"""Pending operation: hold a named operation that this rank has submitted, and its arrays; find those that stall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Any, Protocol

from commlib.coordinator.op_request import OpRequest
from commlib.runtime.work import Work

Array = Any


class ProgressDriver(Protocol):
    """Interface that makes progress with pending operations. `failed` holds those whose error nobody has retrieved."""

    failed: dict[Any, None]

    def drive(self, until: Callable[[], bool]) -> None:
        """Make progress in this thread until `until()` is True."""
        ...

    def wake(self) -> None:
        """Make progress in the background thread."""
        ...


class PendingOp(Work):
    """One named operation. Its arrays must not be touched until it is done."""

    __slots__ = ("_coordinator", "extra", "inputs", "outputs", "request", "since", "warned")

    def __init__(
        self,
        coordinator: ProgressDriver,
        request: OpRequest,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        extra: Any,
    ) -> None:
        self.description = request.name  # instead of Work.__init__, because each call costs time
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

        The waiting thread negotiates: an operation that is waited for at once needs no other thread.
        """
        if not self._done:
            if timeout is None:
                record = self.record
                if record is not None:
                    since = record.waits()
                try:
                    self._coordinator.drive(self.done)
                except BaseException:
                    self.seen = self._done  # the waiting caller gets the exception
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
        """End it, and release its arrays."""
        self.inputs = self.outputs = ()
        self.extra = None
        if self.record is not None:
            self.record.end(error)
        self._result, self._error = result, error  # `Work.finish`, inlined for speed
        if error is not None:
            self._trace = error.__traceback__
            self._coordinator.failed[self] = None
        self._done = True
        self._running.release()

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended. Also works after an interrupted `finish`."""
        if not self._done:
            self.finish(error=error)
        elif self._running.locked():
            self._running.release()


@dataclass(frozen=True, slots=True)
class StallInspector:
    """Detects operations that have waited long (after `warning` s) or timed out (after `timeout` s; 0: never)."""

    warning: float
    timeout: float

    def overdue(self, waiting: Mapping[str, PendingOp]) -> dict[str, bool]:
        """Return the names of operations that have waited long and were not reported yet; True: timed out.

        `waiting` is in the order of submission.
        """
        now = monotonic()
        result = {}
        for name, pending in waiting.items():
            waited = now - pending.since
            if 0 < self.timeout < waited:
                result[name] = True
            elif waited > self.warning and not pending.warned:
                result[name] = False
            elif waited < min(self.warning, self.timeout or self.warning):
                break  # later ones are younger
        return result
