"""Driver: run the cycles of one rank, in the thread that waits for an operation or in a background thread.

The background thread is started by the first operation that no caller waits for. A thread without new requests naps
until it has one, until another rank begins a cycle, or until a pause is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sized
from typing import Protocol

from commlib.coordinator.negotiation import Negotiation
from commlib.errors import CommlibError

# Without new requests, a rank polls at these intervals (s) for other ranks, and begins a cycle after a pause at most.
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 2e-3
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 50e-3


class WatchedGroup(Protocol):
    """The part of a group that reports whether other ranks wait for this rank."""

    def is_awaited(self) -> bool:
        """Return whether some rank has begun an operation that this rank has not begun."""
        ...


class Driver:
    """Runs the cycles of one coordinator.

    lock: protects the pending operations; each method states whether its caller holds it. pending: all pending
    operations. negotiation: shows whether this rank has new requests. group: detects that another rank has begun a
    cycle. run: runs one cycle, and sets `midway` during it. fail: ends all pending operations when this rank is out of
    step.
    """

    def __init__(
        self,
        lock: threading.Lock,
        pending: Sized,
        negotiation: Negotiation,
        group: WatchedGroup,
        *,
        run: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._lock, self._changed = lock, threading.Condition(lock)
        self._pending, self._negotiation = pending, negotiation
        self._group, self._run, self._fail = group, run, fail
        self.driving = threading.Lock()
        """Held by the thread that runs cycles."""
        self._holder: object = None  # last owner of `driving`, set before acquiring: a leaving owner recognizes itself
        self.thread: threading.Thread | None = None
        self.closed = False
        self.midway = False
        """Whether a cycle is in progress, set by its thread. A rank that leaves now is out of step."""
        self._pause = _SHORTEST_PAUSE
        self.napping = False
        """Whether the thread that runs cycles has no new requests."""
        self._woken = False  # the thread was notified, and has not woken up yet

    def notify(self) -> None:
        """Notify the thread that runs cycles of new requests, or start the background thread. The lock is held."""
        if self.napping:
            self._changed.notify_all()
        elif not self.driving.locked():
            self._wake_thread()

    def wake(self) -> None:
        """Run cycles in the background although no thread waits for an operation."""
        with self._lock:
            if self._pending:
                self._wake_thread()

    def drive(self, done: Callable[[], bool]) -> None:
        """Run cycles in this thread until `done()` or nothing is pending; return at once if another thread runs them.

        Raises the exception of a signal handler, from any point. Between cycles, pending operations stay pending.
        Within a cycle, this rank is then out of step with the others, and the group has failed.
        """
        me = object()
        try:
            with self._lock:
                if self.driving.locked():
                    return
                self._holder = me
                self.driving.acquire()
            while not done() and self._pending and not self.closed:
                self.await_reason()
                self._run()
        except CommlibError as error:
            self._fail(error)
        except BaseException as error:
            if self._holder is me and self.midway:
                self._fail(error)
            raise
        finally:
            if self._holder is me:
                try:
                    self.driving.release()
                except RuntimeError:
                    pass  # not acquired
                finally:
                    if self._pending:  # later callers see that no thread runs cycles
                        self.wake()

    def await_reason(self) -> None:
        """Wait for a new request, for another rank that has one, or for the end of the pause."""
        nap, until = _SHORTEST_NAP, time.monotonic() + self._pause
        with self._lock:
            while not self._negotiation.has_unannounced and not self.closed:
                if self._group.is_awaited() or time.monotonic() > until:
                    break
                self.napping = True
                try:
                    self._changed.wait(nap)
                finally:
                    self.napping = False
                nap = min(2 * nap, _LONGEST_NAP)

    def pace(self, *, has_agreed: bool) -> None:
        """Shorten the pause before the next cycle if this one agreed on an operation, else lengthen it."""
        self._pause = _SHORTEST_PAUSE if has_agreed else min(2 * self._pause, _LONGEST_PAUSE)

    def _wake_thread(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._loop, name="commlib-coordinator", daemon=True)
            self.thread.start()
        if not self._woken:
            self._woken = True
            self._changed.notify_all()

    def _loop(self) -> None:
        """Run cycles while an operation is pending and no other thread runs them."""
        while True:
            with self._lock:
                self._changed.wait_for(self._is_due)
                if self.closed:
                    return
            try:
                self.drive(lambda: False)
            except BaseException as error:
                self._fail(error)  # has no effect if `drive` called it

    def _is_due(self) -> bool:
        self._woken = False
        return self.closed or (bool(self._pending) and not self.driving.locked())

    def close(self) -> None:
        """Run no more cycles. The lock is held."""
        self.closed = True
        self._changed.notify_all()

    def abandon(self, lock: threading.Lock) -> None:
        """Disable this object in a forked child. Threads that the child lacks may hold its copies of the locks."""
        self._lock, self._changed = lock, threading.Condition(lock)
        self.driving.acquire(blocking=False)  # never released: waiting threads return at once
        self.closed = True
        self.thread = None

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `close`, at most `timeout` s: see `Progress.join`."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout)
