"""TensorWork: handle of an operation on tensors that runs on the progress thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from commlib.runtime.work import DeviceWork

R = TypeVar("R")
S = TypeVar("S")


class TensorWork(Generic[R]):
    """Handle of an operation that an `_async` verb started on the progress thread.

    Do not touch the tensors passed to the verb before `wait` has returned. in_order: see `Bridge`.
    """

    __slots__ = ("_finish", "_in_order", "_result", "_work")

    def __init__(
        self,
        work: Any,
        finish: Callable[[Any], R],
        in_order: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._work, self._finish, self._in_order = work, finish, in_order
        self._result: list[R] = []

    def __repr__(self) -> str:
        return f"<Work on tensors: {'done' if self.done() else 'running'}>"

    def done(self) -> bool:
        """Return whether the operation has ended, successfully or not. Never blocks."""
        return bool(self._work.done())

    def wait(self, timeout: float | None = None, *, host: bool = False) -> R:
        """Block until the operation has ended, at most `timeout` seconds, and return its result.

        On a device, the result may not be computed yet: later work on the caller's stream runs after it; with `host`,
        this blocks until it is complete. Raises the error of the operation; StallError after `timeout` (the operation
        continues).
        """
        with self._in_order():
            if host and isinstance(self._work, DeviceWork):
                value = self._work.wait(timeout, host=True)
            else:
                value = self._work.wait(timeout)
        if not self._result:
            self._result.append(self._finish(value))
        return self._result[0]

    def result(self) -> R:
        """Wait without a timeout, and return the result. Raises the error of the operation."""
        return self.wait()

    def exception(self) -> BaseException | None:
        """Wait until the operation has ended, and return its error, or None."""
        with self._in_order():
            error: BaseException | None = self._work.exception()
        return error

    def then(self, finish: Callable[[R], S]) -> TensorWork[S]:
        """Return a handle of the same operation whose result is passed through `finish`."""
        before = self._finish
        return TensorWork(self._work, lambda value: finish(before(value)), self._in_order)
