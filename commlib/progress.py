"""The progress thread: runs queued operations in launch order, off the callers' threads.

A blocking call runs in its caller's thread when nothing is queued (no hand-over, a microsecond instead of twenty), and
queues behind what is pending otherwise, so that the order of launches is the order of execution on every rank.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from commlib.errors import ShutdownError
from commlib.work import Work

Run = Callable[[], Any]

# While messages are under way the thread looks after them this often (seconds): at first, and at most.
_SOONEST, _LATEST = 50e-6, 5e-3


class Watched(Protocol):
    """Something that makes progress when it is asked whether it is done."""

    description: str

    def done(self) -> bool: ...


class Progress:
    """One queue and one thread (started with the first queued operation; asleep while there is nothing to do)."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Work, Run]] = deque()
        self._watched: list[Watched] = []
        self._failed: list[Work] = []  # to tell at the end of errors that nobody has asked for
        self._changed = threading.Condition(threading.Lock())
        self.running = threading.Lock()  # held by whoever runs an operation
        self.pending = 0  # operations queued for, or running on, the thread
        self._thread: threading.Thread | None = None
        self._closed = False
        self.current = ""  # what is running on the thread, for messages

    def run(self, description: str, run: Run) -> Any:
        """Run one operation and return its result, after everything that was launched before it."""
        if self.pending or not self.running.acquire(False):
            return self.start(description, run).wait()
        try:
            return run()
        finally:
            self.running.release()

    def start(self, description: str, run: Run) -> Work:
        """Queue one operation and return its Work."""
        work = Work(description)
        with self._changed:
            if self._closed:
                raise ShutdownError(f"{description}: commlib has been shut down")
            self._queue.append((work, run))
            self.pending += 1
            self._start_thread()
            self._changed.notify_all()
        return work

    def watch(self, work: Watched) -> None:
        """Look after `work` until it is done, whenever nothing is queued."""
        with self._changed:
            self._watched.append(work)
            self._start_thread()
            self._changed.notify_all()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="commlib-progress", daemon=True)
            self._thread.start()

    def _next(self) -> tuple[Work, Run] | None:
        """Return what to run next, looking after messages meanwhile; None to end."""
        nap = _SOONEST
        while True:
            with self._changed:
                if not self._queue and not self._closed:
                    self._changed.wait(nap if self._watched else None)
                if self._queue:
                    self.current = self._queue[0][0].description
                    return self._queue.popleft()
                if self._closed:
                    return None
                watched = list(self._watched)
            ended = [work for work in watched if work.done()]
            nap = _SOONEST if ended else min(2 * nap, _LATEST)
            with self._changed:
                self._watched = [work for work in self._watched if work not in ended]
                self._changed.notify_all()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            work, run = job
            result, error = None, None
            try:
                with self.running:
                    result = run()
            except BaseException as caught:  # it belongs to whoever waits for the work
                error = caught
            # The next blocking call may run inline as soon as its thread knows that this one is done.
            with self._changed:
                self.pending -= 1
                self.current = ""
                self._changed.notify_all()
            work.finish(result, error)
            if error is not None:
                self._failed.append(work)
            del job, work, run, result, error  # an idle thread must not keep arrays alive

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending; return "" or, if that takes longer than `timeout` s, what is running."""
        with self._changed:
            if self._changed.wait_for(lambda: self.pending == 0 and not self._watched, timeout):
                return ""
            return "unfinished " + self._what_is_pending()

    def unseen_failure(self) -> str:
        """Return the first failed work whose error nobody has asked for, or ""."""
        for work in self._failed:
            if (error := work.unseen_error) is not None:
                return f"failed {work.description} ({type(error).__name__}: {error})"
        return ""

    def _what_is_pending(self) -> str:
        return self.current or next((work.description for work in self._watched), "a queued operation")

    def close(self) -> None:
        """Accept nothing more; what is queued and has not begun ends with ShutdownError."""
        with self._changed:
            self._closed = True
            self.pending += 1  # for ever: nothing may run in its caller's thread either
            dropped = list(self._queue)
            self._queue.clear()
            self.pending -= len(dropped)
            self._changed.notify_all()
        for work, _ in dropped:
            work.finish(error=ShutdownError(f"{work.description}: commlib was shut down before it began"))

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `close`, at most `timeout` s.

        A thread that still drops its last references while the interpreter is finalised is killed in the middle of
        foreign destructors, and the process with it.
        """
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
