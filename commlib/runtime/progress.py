"""Progress: runs the operations of one group in launch order, on a thread of its own where that is needed.

A blocking call runs in its caller's thread when nothing is queued (no hand-over, a microsecond instead of twenty), and
queues behind what is pending otherwise, so that the order of launches is the order of execution on every rank. Groups
do not wait for each other: threads that use different ones may take turns differently on each rank.

A small asynchronous call is *begun* in its caller's thread: it publishes its data, which is all that other ranks need
of this one. If they are not there yet, the waiting thread finishes it, or the progress thread before anything that
follows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from commlib.errors import CommlibError, ShutdownError, UsageError
from commlib.observe.flight import new_flight
from commlib.observe.journal import Journal
from commlib.observe.recorder import Record, Recorder
from commlib.process import forks
from commlib.runtime.begun import Begun
from commlib.runtime.claims import is_claimed_here
from commlib.runtime.failures import Failures
from commlib.runtime.work import Work

# How often, in seconds, the thread looks whether the operation before its own can still end.
_TURN = 0.1

# Set in `Progress.pending` while operations are recorded: so calls leave their short way without another look. Nothing
# but counts is below it.
RECORDED = 1 << 40
_COUNT = RECORDED - 1

Run = Callable[[], Any]
Interrupted = Callable[[str, BaseException], None]


def _ignore(description: str, error: BaseException) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Job:
    """An operation that waits for its turn. `record` is None where it is not recorded."""

    work: Work
    run: Run
    record: Record | None


class Progress:
    """One queue and one thread (started with the first queued operation; asleep while there is nothing to do).

    The arrays of an operation must stay where they are until it has run, even if its result is not wanted any more:
    `run` holds the arrays, and the queue holds `run`.

    interrupted: told of an exception that has left a call before its operation ended, or may have. If the exception is
    no error of ours, but perhaps a signal handler's, other ranks may count on work that this rank has left half-way.
    journal: what is written of the operations, while there is a reader.
    """

    def __init__(self, interrupted: Interrupted = _ignore, journal: Journal | None = None) -> None:
        self._interrupted = interrupted
        self.journal = Journal() if journal is None else journal
        self.flight = new_flight()  # the calls that have come to their turn, by their texts
        self._queue: deque[_Job] = deque()
        self._begun: _Job | None = None
        self._failures = Failures()
        # Taken itself rather than through the condition, whose `with` a signal handler could leave locked for ever. It
        # knows its owner, so that a signal handler's call can be refused that would wait for this very thread.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.running = threading.Lock()  # held by whoever runs an operation
        self.busy = 0
        """The thread where an operation waits, or may wait; 0 for none. Written by the holder of `running`."""
        self.raised: BaseException | None = None  # what has come out of the operation that is running here
        self._broken = False  # an interrupted thread may have left `running` held; then every operation fails at once
        self._may_miscount = False  # an exception may have come between counting an operation and its end
        self.pending = 0
        """How many operations are begun, queued for, or running on, the thread; and RECORDED. Looked at while `running`
        is held: while it is 0 a call may run in its caller's thread, and there is nothing to write."""
        self.thread: threading.Thread | None = None  # until something is queued
        self._closed = False
        self.current = ""  # what is running on the thread, for messages
        self.in_background = False  # what runs now runs on the thread

    def record(self, recorder: Recorder | None) -> None:
        """Write of operations to `recorder` from now on, or to none."""
        with self._lock:
            self.journal.recorder = recorder
            self.pending = self.pending & _COUNT | (0 if recorder is None else RECORDED)

    def refuse_nested(self, description: str) -> None:
        """Raise UsageError if this thread is in the middle of an operation, which would have to end first.

        To be called where `running` could not be had.
        """
        claimed = not self.pending & _COUNT and is_claimed_here(self)
        if claimed or self.busy == threading.get_ident() or self._is_queueing():
            raise UsageError(
                f"{description}: called in the middle of another call of the same group, in the same thread: by a "
                "signal handler? Let the handler set a flag, and call this after the other call has ended"
            )

    def _is_queueing(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # as threading.Condition asks

    def break_off(self, description: str, error: BaseException) -> None:
        """Let go of `running` after what has come out of an operation that this thread had claimed, or may have."""
        ours = isinstance(error, CommlibError)
        if ours or error is self.raised:  # it came out of the middle of one
            self.running.release()
        else:
            self._broken = True
        self.raised = None
        if not ours:
            self._may_miscount = True
            self._interrupted(description, error)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let no other call of this thread run while one does, not even one of a signal handler's."""
        before, self.busy = self.busy, threading.get_ident()
        try:
            yield
        finally:
            self.busy = before

    def run_queued(self, description: str, run: Run, x: Any = None) -> Any:
        """Queue one operation, on the array `x`, wait for it and return its result."""
        self.refuse_nested(description)
        if self._broken:
            self.flight.append(description)
            return self.journal.run(self.journal.open(description, x), run)
        work = self.start(description, run, x)
        try:
            return work.wait()
        except BaseException as error:
            work.seen = True  # its caller knows that something is wrong
            self._interrupted(description, error)
            raise

    def run_through(self, description: str, run: Run, x: Any = None) -> Any:
        """Like `run_queued`, but what interrupts the wait is raised when the operation has ended, or at once if twice.

        For what blocks in MPI, which nothing can end: the thread does it, as no signal handler raises there.
        """
        work = self.start(description, run, x)
        try:
            return work.wait()
        except BaseException:
            work.exception()  # waits for its end
            raise

    def start(self, description: str, run: Run, x: Any = None, work: Work | None = None) -> Work:
        """Queue one operation, on the array `x`, and return its Work, which may be given."""
        forks.check(description)
        if self._is_queueing():
            self.refuse_nested(description)
        work = Work(description) if work is None else work
        try:
            with self._lock:
                if self._closed:
                    raise ShutdownError(f"{description}: commlib has been shut down")
                self._queue_begun()
                self.pending += 1
                work.record = self.journal.queue(description, x)
                self._queue.append(_Job(work, run, work.record))
                self._start_thread()
                self._changed.notify_all()
        except BaseException as error:
            work.seen = True  # perhaps it is queued, and fails: its caller knows that something is wrong
            self._interrupted(description, error)
            raise
        return work

    def failed(self, description: str, error: CommlibError) -> Work:
        """Return the work of an operation that has failed as it was begun: the error goes to the waiting thread."""
        work = Work(description)
        work.finish(error=error)
        self._failures.note(work)
        return work

    def begun(self, description: str, finish: Run, record: Record | None = None) -> Work:
        """Return the work of an operation that has been begun in its caller's thread; `finish` does the rest of it."""
        work = Begun(description, self)
        work.record = record
        with self._lock:
            self._begun = _Job(work, finish, record)
            self.pending += 1
        return work

    def hand_over(self) -> None:
        """Let the thread finish what has been begun."""
        with self._lock:
            if self._begun is not None:
                self._queue_begun()
                self._start_thread()
                self._changed.notify_all()

    def unfinished(self) -> tuple[str, list[str]]:
        """Return what has been begun, or "", and what is queued: for who looks on, without the lock."""
        begun = self._begun
        return "" if begun is None else begun.work.description, [job.work.description for job in list(self._queue)]

    def _queue_begun(self) -> None:
        if self._begun is not None:  # then the queue is empty
            self._queue.append(self._begun)
            self._begun = None

    def finish_begun(self, work: Work) -> None:
        """Finish `work` in this thread, unless another thread does."""
        try:
            with self._lock:
                job = self._begun
                if job is None or job.work is not work:
                    return
                self._begun = None
            self._run_one(job)
        except BaseException as error:
            self._interrupted(work.description, error)
            raise

    def _run_one(self, job: _Job, *, in_background: bool = False) -> None:
        work, result, error = job.work, None, None
        try:
            claimed = self._await_turn()
            if type(work) is not Begun:  # noted as it was begun
                self.flight.append(work.description)
            self.in_background = in_background
            started = time.perf_counter()
            try:
                result = job.run() if job.record is None else self.journal.run(job.record, job.run)
            finally:
                work.seconds = time.perf_counter() - started
                self.in_background = False
                if claimed:
                    self.running.release()
        except BaseException as caught:  # it belongs to whoever waits for the work
            error = caught
        # The next blocking call may run inline as soon as its thread knows that this one is done.
        with self._lock:
            self.pending -= 1
            self.current = ""
            self._changed.notify_all()
        work.finish(result, error)
        if error is not None:
            self._failures.note(work)

    def _await_turn(self) -> bool:
        """Wait for `running`; return False without it if it may never be released: then operations only fail."""
        while not self.running.acquire(timeout=0 if self._broken else _TURN):
            if self._broken:
                return False
        return True

    def _start_thread(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._loop, name="commlib-progress", daemon=True)
            self.thread.start()

    def _next(self) -> _Job | None:
        """Wait for something to run, and return it; None to end."""
        with self._lock:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            self.current = self._queue[0].work.description
            return self._queue.popleft()

    def _loop(self) -> None:
        while (job := self._next()) is not None:
            self._run_one(job, in_background=True)
            del job  # an idle thread must not keep arrays alive

    def drain(self, timeout: float) -> str:
        """Wait until nothing is pending; return "" or, if that takes longer than `timeout` s, what is running."""
        self.hand_over()
        deadline = time.monotonic() + timeout
        with self._lock:
            while not self._is_idle():
                if (left := deadline - time.monotonic()) <= 0:
                    return f"unfinished {self.current or 'queued operation'}"
                self._changed.wait(min(left, _TURN))  # an operation that is not queued ends without a word
        return ""

    def _is_idle(self) -> bool:
        if self._may_miscount:
            return not self._queue and not self.current and self._begun is None
        return not self.pending & _COUNT and not self.busy

    def unseen_failure(self) -> str:
        """Return the first failed work with an error that was never asked for, or ""."""
        return self._failures.unseen()

    def close(self) -> None:
        """Accept nothing more; what is queued and has not begun ends with ShutdownError."""
        with self._lock:
            self._closed = True
            self.pending += 1  # for ever: nothing may run in its caller's thread either
            self._queue_begun()
            dropped = list(self._queue)
            self._queue.clear()
            self.pending -= len(dropped)
            self._changed.notify_all()
        for job in dropped:
            error = ShutdownError(f"{job.work.description}: commlib was shut down before it began")
            if job.record is not None:
                job.record.end(error)
            job.work.finish(error=error)

    def abandon(self) -> None:
        """Let nothing run in this forked child, whose copies of the locks may be held by threads that it lacks."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue.clear()
        self._begun = self.thread = None
        self.pending += 1  # for ever: so every call comes to `start`

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `close`, at most `timeout` s.

        A thread that still drops its last references while the interpreter is finalised is killed in the middle of
        foreign destructors, and the process with it.
        """
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
