"""Work: the handle of an operation that an `*_async` verb started, with a result on the host or on a device."""

from __future__ import annotations

import threading
import time
from typing import Any

from commlib.devices.protocol import Device, DeviceEvent
from commlib.devices.waiting import wait_for
from commlib.errors import StallError
from commlib.observe.recorder import Record
from commlib.process import forks


class Work:
    """One operation that runs on the progress thread.

    It keeps its arrays alive until it is done. Any number of threads may wait; each gets the operation's result or
    exception.
    """

    __slots__ = ("_done", "_error", "_result", "_running", "_trace", "description", "record", "seconds", "seen")

    def __init__(self, description: str) -> None:
        self.description = description
        self.seen = False  # a caller has seen the result or the error
        self.seconds = 0.0  # run time, once it is done; 0 if it ran in the call that started it
        self._done = False
        self._running = threading.Lock()  # held until it is done: forty times cheaper than an Event
        self._running.acquire()
        self._result: Any = None
        self._error: BaseException | None = None
        self.record: Record | None = None  # its timings, while calls are recorded

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "done"
        return f"<Work {self.description}: {state}>"

    def done(self) -> bool:
        """Return whether the operation has ended, successfully or not. Never blocks.

        Examples:
            >>> work = comm.barrier_async()
            >>> work.wait()
            >>> work.done()
            True
        """
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation has ended, at most `timeout` seconds, and return its result.

        Args:
            timeout: Seconds; None: without a limit.

        Raises:
            StallError: After the timeout; the operation continues.
            Exception: The operation's own, if it failed.

        Examples:
            >>> work = comm.all_reduce_async(np.ones(2))
            >>> work.wait()
            array([2., 2.])
        """
        if not self._done:
            forks.check(self.description)
            record = self.record
            if record is not None:
                since = record.waits()
            try:
                if timeout is None:
                    with self._running:  # others may wait too; a signal handler may raise in here
                        pass
                elif self._running.acquire(timeout=max(timeout, 0)):
                    self._running.release()
                else:
                    raise StallError(
                        f"{self.description}: not done after {timeout} s; it is still running, wait again to collect it"
                    )
            finally:
                if record is not None:
                    record.waited(since)
        self.seen = True
        if self._error is not None:
            raise self._error.with_traceback(self._trace)  # each wait would add its frames to the traceback
        return self._result

    def result(self) -> Any:
        """Wait without a timeout and return the result.

        Raises:
            Exception: The operation's own, if it failed.

        Examples:
            >>> comm.all_reduce_async(np.ones(1)).result()
            array([2.])
        """
        return self.wait()

    def exception(self) -> BaseException | None:
        """Wait until the operation has ended and return its exception, or None.

        Examples:
            >>> comm.barrier_async().exception() is None
            True
        """
        try:
            self.wait()
        except BaseException as error:
            if error is not self._error:
                raise
        return self._error

    @property
    def unseen_error(self) -> BaseException | None:
        """The operation's exception, if it failed and no caller has seen that yet."""
        return None if self.seen else self._error

    @classmethod
    def ended(cls, description: str, result: Any) -> Work:
        """Return a work that is already done."""
        work = cls.__new__(cls)
        work.description, work._result, work.seconds = description, result, 0.0
        work._done, work._error, work.seen = True, None, True
        return work

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Mark the operation as ended. Called once, by the thread that runs it."""
        self._result, self._error = result, error
        self._trace = None if error is None else error.__traceback__
        self._done = True
        self._running.release()


class DeviceWork(Work):
    """A call on device arrays. `done()` means that it has ended on the host; the device may still compute the result.

    `wait` blocks until the end on the host, and makes the current stream of the calling thread wait for the result:
    work that the thread queues afterwards sees it. `wait(host=True)` blocks until the result is in device memory.
    """

    __slots__ = ("_device", "event")

    def __init__(self, description: str, device: Device) -> None:
        super().__init__(description)
        self._device = device
        self.event: DeviceEvent | None = None  # recorded after the result; set before the work ends successfully

    def wait(self, timeout: float | None = None, *, host: bool = False) -> Any:
        """Wait for the call, as `Work.wait` does. host: also block until the result is in device memory."""
        started = time.monotonic()
        result = super().wait(timeout)
        if self.event is not None:
            self._device.current().wait(self.event)
        if host and self.event is not None:

            def on_wait() -> None:
                if timeout is not None and time.monotonic() - started > timeout:
                    raise StallError(
                        f"{self.description}: the device did not finish the result in {timeout} s; wait again for it"
                    )

            wait_for(self.event, on_wait)
        return result


class Failures:
    """The failed works of one group, to report at shutdown those whose error no caller has seen."""

    def __init__(self) -> None:
        self._works: list[Work] = []

    def note(self, work: Work) -> None:
        """Remember a failed work."""
        self._works = [other for other in self._works if other.unseen_error is not None]
        self._works.append(work)

    def unseen(self) -> str:
        """Describe the first failed work whose error no caller has seen; "" without one."""
        for work in self._works:
            if (error := work.unseen_error) is not None:
                return f"failed {work.description} ({type(error).__name__}: {error})"
        return ""
