"""Progress: runs the operations of one group in launch order, on a progress thread if needed.

A blocking call runs in its caller's thread when nothing is queued (no hand-over: one microsecond instead of twenty).
Otherwise it queues behind the pending operations. So operations execute in launch order on every rank. Groups do not
wait for each other: threads that use different groups may interleave differently on each rank.

A small asynchronous call *starts* in its caller's thread: it publishes its data, and other ranks need no more from this
one. If the other ranks have not arrived yet, the thread that waits for the work finishes it, or the progress thread
finishes it before the next operation.
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
from commlib.observe.flight_recorder import new_flight_recorder
from commlib.observe.journal import Journal
from commlib.observe.recorder import Record, Recorder
from commlib.process import forks
from commlib.runtime.claims import is_claimed_here
from commlib.runtime.gate import Gate
from commlib.runtime.started_operations import StartedOperations
from commlib.runtime.work import Failures, Work

# Seconds between checks of a waiting thread whether the previous operation can still end.
_TURN = 0.1

# A bit of `Progress.pending`, set while operations are recorded: one check of `pending` then takes calls off their fast
# path. The bits below it hold the count.
RECORDED = 1 << 40
_COUNT = RECORDED - 1

Run = Callable[[], Any]
Interrupted = Callable[[str, BaseException], None]


def _ignore(description: str, error: BaseException) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _QueuedOperation:
    """A queued operation. `record` is None if it is not recorded."""

    work: Work
    run: Run
    record: Record | None


class Progress:
    """One queue and one thread (started with the first queued operation; asleep while the queue is empty).

    The arrays of an operation must stay alive until it has run, even if nobody wants its result any more: `run` holds
    the arrays, and the queue holds `run`.

    interrupted: called with an exception that has left a call before its operation ended, or may have. If it is not a
    commlib error, but perhaps a signal handler's, other ranks may depend on work that this rank has left unfinished.
    journal: records the operations while there is a reader.
    """

    def __init__(self, interrupted: Interrupted = _ignore, journal: Journal | None = None) -> None:
        self._interrupted = interrupted
        self.journal = Journal() if journal is None else journal
        self.flight = new_flight_recorder()  # flight recorder: the texts of the calls that have started
        self._queue: deque[_QueuedOperation] = deque()
        self._started: _QueuedOperation | None = None
        self._failures = Failures()
        # Acquired directly, not by `with` on the condition: an exception of a signal handler could leave that locked.
        # Reentrant, so it has an owner: a signal handler's call that would wait for its own thread is refused.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.running = threading.Lock()  # held while an operation runs
        self.busy = 0
        """Id of the thread in which an operation waits, or may wait; 0: none. Written by the holder of `running`."""
        self.raised: BaseException | None = None  # exception that the current operation raised
        self.gate = Gate(self.running, self.flight.append)
        self._is_broken = False  # True: an interrupted thread may still hold `running`; every operation fails at once
        self._may_miscount = False  # True: an exception may have skipped an update of `pending`
        self.thread: threading.Thread | None = None  # until the first queued operation
        self._closed, self._why_closed = False, ""
        self.current = ""  # text of the operation on the thread, for messages
        self.in_background = False  # True while an operation runs on the thread

    @property
    def pending(self) -> int:
        """Number of operations that are started, queued, or running on the thread, plus RECORDED.

        While it is 0, a call that holds `running` may run in its caller's thread, and is not recorded."""
        return self.gate.pending.value

    @pending.setter
    def pending(self, number: int) -> None:
        self.gate.pending.value = number

    @property
    def _broken(self) -> bool:
        if self.gate.is_lost and not self._is_broken:
            self._is_broken = self._may_miscount = True
            self._interrupted("a call", KeyboardInterrupt())
        return self._is_broken

    def record(self, recorder: Recorder | None) -> None:
        """Record operations with `recorder` from now on; None: stop recording."""
        with self._lock:
            self.journal.recorder = recorder
            self.pending = self.pending & _COUNT | (0 if recorder is None else RECORDED)

    def refuse_nested(self, description: str) -> None:
        """Raise UsageError if this thread is within another operation, which would have to end first.

        Call it after an attempt to acquire `running` failed.
        """
        claimed = not self.pending & _COUNT and is_claimed_here(self)
        if claimed or self.busy == threading.get_ident() or self._is_queueing():
            raise UsageError(
                f"{description}: called in the middle of another call of the same group, in the same thread, perhaps "
                "by a signal handler. Let the handler set a flag, and make this call after the other call has ended"
            )

    def _is_queueing(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]  # as threading.Condition does

    def break_off(self, description: str, error: BaseException) -> None:
        """Release `running` after an exception of an operation for which this thread had acquired it, or may have."""
        ours = isinstance(error, CommlibError)
        if ours or error is self.raised:  # raised within an operation: `running` is held
            self.running.release()
        else:
            self._is_broken = True
        self.raised = None
        if not ours:
            self._may_miscount = True
            self._interrupted(description, error)

    @contextmanager
    def refuse_others(self) -> Iterator[None]:
        """Refuse other calls of this thread within the block, such as those of a signal handler."""
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
            work.seen = True  # the caller gets this exception
            self._interrupted(description, error)
            raise

    def run_uninterrupted(self, description: str, run: Run, x: Any = None) -> Any:
        """Like `run_queued`, but raise an exception of the wait after the operation's end, a second one at once.

        For operations that block in MPI, which cannot be interrupted: the progress thread runs them, because no signal
        handler raises there.
        """
        work = self.start(description, run, x)
        try:
            return work.wait()
        except BaseException:
            work.exception()  # waits for its end
            raise

    def start(self, description: str, run: Run, x: Any = None, work: Work | None = None) -> Work:
        """Queue one operation, on the array `x`, and return its Work. work: use this one instead of a new one."""
        forks.check(description)
        if self._is_queueing():
            self.refuse_nested(description)
        work = Work(description) if work is None else work
        try:
            with self._lock:
                if self._closed:
                    raise ShutdownError(f"{description}: {self._why_closed}")
                self._queue_started()
                self.pending += 1
                work.record = self.journal.queue(description, x)
                self._queue.append(_QueuedOperation(work, run, work.record))
                self._start_thread()
                self._changed.notify_all()
        except BaseException as error:
            work.seen = True  # it may be queued, and fail: the caller gets this exception
            self._interrupted(description, error)
            raise
        return work

    def failed(self, description: str, error: CommlibError) -> Work:
        """Return the work of an operation that failed at its start; the thread that waits for it gets the error."""
        work = Work(description)
        work.finish(error=error)
        self._failures.note(work)
        return work

    def add_started(self, description: str, finish: Run, record: Record | None = None) -> Work:
        """Return the work of an operation that was started in its caller's thread; `finish` does the rest."""
        work = StartedOperations(description, self)
        work.record = record
        with self._lock:
            self._started = _QueuedOperation(work, finish, record)
            self.pending += 1
        return work

    def hand_over(self) -> None:
        """Let the progress thread finish the started operation."""
        with self._lock:
            if self._started is not None:
                self._queue_started()
                self._start_thread()
                self._changed.notify_all()

    def unfinished(self) -> tuple[str, list[str]]:
        """Return the texts of the started operation, or "", and of the queued ones; for observers, without the lock."""
        begun = self._started
        return "" if begun is None else begun.work.description, [job.work.description for job in list(self._queue)]

    def _queue_started(self) -> None:
        if self._started is not None:  # then the queue is empty
            self._queue.append(self._started)
            self._started = None

    def finish_started(self, work: Work) -> None:
        """Finish `work` in this thread, unless another thread already does."""
        try:
            with self._lock:
                job = self._started
                if job is None or job.work is not work:
                    return
                self._started = None
            self._run_one(job)
        except BaseException as error:
            self._interrupted(work.description, error)
            raise

    def _run_one(self, job: _QueuedOperation, *, in_background: bool = False) -> None:
        work, result, error = job.work, None, None
        try:
            claimed = self._await_turn()
            if type(work) is not StartedOperations:  # already noted at its start
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
        except BaseException as caught:  # raised again in the thread that waits for the work
            error = caught
        # Before `finish`: a thread that learns that this work is done may run its next blocking call inline.
        with self._lock:
            self.pending -= 1
            self.current = ""
            self._changed.notify_all()
        work.finish(result, error)
        if error is not None:
            self._failures.note(work)

    def _await_turn(self) -> bool:
        """Acquire `running`; return False without it if it may never be released, when all operations fail anyway."""
        while not self.running.acquire(timeout=0 if self._broken else _TURN):
            if self._broken:
                return False
        return True

    def _start_thread(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._loop, name="commlib-progress", daemon=True)
            self.thread.start()

    def _next(self) -> _QueuedOperation | None:
        """Wait for the next operation and return it; None: end the thread."""
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
        """Wait until nothing is pending; return "" or, after `timeout` s, the running operation."""
        self.hand_over()
        deadline = time.monotonic() + timeout
        with self._lock:
            while not self._is_idle():
                if (left := deadline - time.monotonic()) <= 0:
                    return f"unfinished {self.current or 'queued operation'}"
                self._changed.wait(min(left, _TURN))  # the end of an inline operation notifies nobody
        return ""

    def _is_idle(self) -> bool:
        if self._may_miscount:
            return not self._queue and not self.current and self._started is None
        return not self.pending & _COUNT and not self.busy

    def unseen_failure(self) -> str:
        """Describe the first failed work whose error no caller has seen; "" without one."""
        return self._failures.unseen()

    @property
    def is_closed(self) -> bool:
        """Whether it accepts no more operations."""
        return self._closed

    def close(self, why: str = "commlib has been shut down") -> None:
        """Accept no more operations; queued ones that have not started end with ShutdownError. why: for errors."""
        with self._lock:
            self._closed, self._why_closed = True, self._why_closed or why
            self.pending += 1  # forever: no operation may run in its caller's thread either
            self._queue_started()
            dropped = list(self._queue)
            self._queue.clear()
            self.pending -= len(dropped)
            self._changed.notify_all()
        for job in dropped:
            error = ShutdownError(f"{job.work.description}: commlib was shut down before it started")
            if job.record is not None:
                job.record.end(error)
            job.work.finish(error=error)

    def abandon(self) -> None:
        """Stop in a forked child. Its copies of the locks may be held by threads that it does not have."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue.clear()
        self._started = self.thread = None
        self.pending += 1  # forever: every call reaches `start`, which refuses it

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` s until the thread has ended after `close`.

        If the thread still drops its last references while the interpreter is finalised, it is killed within foreign
        destructors, which crashes the process.
        """
        thread = self.thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
