"""Driver: run the cycles of one rank, in the thread that waits for an operation or in one of its own.

The thread of its own is started with the first operation that no caller waits for. A thread that has nothing to tell
naps until it has, until another rank is seen to have begun a cycle, or until it is time to come anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sized
from typing import Protocol

from commlib.coordinator.negotiation import Negotiation
from commlib.errors import CommlibError

# With nothing new to tell, a rank looks this often (seconds) whether others have, and comes to a cycle at the latest.
_SHORTEST_NAP, _LONGEST_NAP = 20e-6, 2e-3
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-3, 50e-3


class Awaited(Protocol):
    """Watch a group, as far as other ranks may wait for this rank in it."""

    def is_awaited(self) -> bool:
        """Return whether some rank has begun what this one has not come to."""
        ...


class Driver:
    """Runs the cycles of one coordinator.

    lock: of what is pending; methods say whether their caller holds it. pending: all that is. negotiation: knows
    whether this rank has something to tell. group: sees whether another rank has begun a cycle. run: runs
    one, and says so in `midway`. fail: ends all that is pending, when this rank is out of step.
    """

    def __init__(
        self,
        lock: threading.Lock,
        pending: Sized,
        negotiation: Negotiation,
        group: Awaited,
        *,
        run: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._lock, self._changed = lock, threading.Condition(lock)
        self._pending, self._negotiation = pending, negotiation
        self._group, self._run, self._fail = group, run, fail
        self.driving = threading.Lock()
        """Held by the thread that runs cycles."""
        self._holder: object = None  # who took `driving` last: set first, so that whoever leaves knows its own
        self.thread: threading.Thread | None = None
        self.closed = False
        self.midway = False
        """Whether one is under way, written by who runs it: to leave it now is to be out of step."""
        self._pause = _SHORTEST_PAUSE
        self.napping = False
        """Whether the thread that runs cycles has nothing to tell."""
        self._woken = False  # the thread has been told, and has not come to it yet

    def tell(self) -> None:
        """Tell the runner of cycles what is pending now, or let the thread begin. The lock is held."""
        if self.napping:
            self._changed.notify_all()
        elif not self.driving.locked():
            self._wake_thread()

    def wake(self) -> None:
        """Let cycles run although no thread waits for an operation."""
        with self._lock:
            if self._pending:
                self._wake_thread()

    def drive(self, done: Callable[[], bool]) -> None:
        """Run cycles in this thread until `done()` or nothing is pending; return at once if another thread does.

        Raises what the handler of a signal raises, anywhere in here. Between cycles that changes nothing: what is
        pending stays so. Within one, this rank is out of step with the others, and the group has failed.
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
                    pass  # not even taken
                finally:
                    if self._pending:  # whoever asks later sees that nobody drives
                        self.wake()

    def await_reason(self) -> None:
        """Wait for something to tell, for another rank that has, or for a while."""
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
        """Let the next one come soon if this one has agreed on something, else later than the last."""
        self._pause = _SHORTEST_PAUSE if has_agreed else min(2 * self._pause, _LONGEST_PAUSE)

    def _wake_thread(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._loop, name="commlib-coordinator", daemon=True)
            self.thread.start()
        if not self._woken:
            self._woken = True
            self._changed.notify_all()

    def _loop(self) -> None:
        """Run cycles while something is pending and no other thread runs them."""
        while True:
            with self._lock:
                self._changed.wait_for(self._is_due)
                if self.closed:
                    return
            try:
                self.drive(lambda: False)
            except BaseException as error:
                self._fail(error)  # where it has not

    def _is_due(self) -> bool:
        self._woken = False
        return self.closed or (bool(self._pending) and not self.driving.locked())

    def close(self) -> None:
        """Run no more of them. The lock is held."""
        self.closed = True
        self._changed.notify_all()

    def abandon(self, lock: threading.Lock) -> None:
        """Let nothing run in this forked child, whose copies of the locks may be held by threads that it lacks."""
        self._lock, self._changed = lock, threading.Condition(lock)
        self.driving.acquire(blocking=False)  # for ever: whoever waits is told at once
        self.closed = True
        self.thread = None

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `close`, at most `timeout` s: see `Progress.join`."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout)
