"""Poller: make progress on messages in flight while no thread waits for them.

It uses a separate thread, because a group's progress thread may be blocked in a collective that another rank enters
only after exchanging a message with this one.
"""

from __future__ import annotations

import threading
from typing import Protocol

# Seconds between polls while messages are in flight: the first interval and the longest.
_SOONEST, _LATEST = 50e-6, 5e-3


class PolledWork(Protocol):
    """A work whose `done` makes progress. It never blocks."""

    description: str

    def done(self) -> bool: ...


class MessagePoller:
    """One thread for all groups of a process, started with the first message; asleep without messages."""

    def __init__(self) -> None:
        self._works: list[tuple[PolledWork, object]] = []  # each with its owner
        self._unawaited: set[int] = set()  # the `id` of works that `drain` does not wait for
        # Acquired directly, not by `with` on the condition: an exception of a signal handler could leave that locked.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._polling = threading.Lock()  # held while works are polled
        self.thread: threading.Thread | None = None
        self._closed = False

    def watch(self, work: PolledWork, owner: object, *, awaited: bool = True) -> None:
        """Poll `work` until it is done or its owner is forgotten. awaited: `drain` waits for it."""
        with self._lock:
            self._works.append((work, owner))
            if not awaited:
                self._unawaited.add(id(work))
            if self.thread is None:
                self.thread = threading.Thread(target=self._loop, name="commlib-messages", daemon=True)
                self.thread.start()
            self._changed.notify_all()

    def forget(self, owner: object) -> None:
        """Stop polling the works of `owner`."""
        with self._polling, self._lock:
            self._keep([pair for pair in self._works if pair[1] is not owner])

    def _keep(self, works: list[tuple[PolledWork, object]]) -> None:
        self._works = works
        self._unawaited &= {id(work) for work, _ in works}
        self._changed.notify_all()

    def _awaited_works(self) -> list[PolledWork]:
        return [work for work, _ in self._works if id(work) not in self._unawaited]

    def _loop(self) -> None:
        nap = _SOONEST
        while True:
            with self._lock:
                # A new work wakes the thread early: it may be done soon.
                nap = _SOONEST if self._changed.wait(nap if self._works else None) else min(2 * nap, _LATEST)
                if self._closed:
                    return
            if self._poll_all():
                nap = _SOONEST

    def _poll_all(self) -> bool:
        """Poll all works; return whether any has ended. No reference to them remains after the call."""
        with self._polling:
            with self._lock:
                works = list(self._works)
            ended = [pair for pair in works if pair[0].done()]
            with self._lock:
                self._keep([pair for pair in self._works if pair not in ended])
        return bool(ended)

    def drain(self, timeout: float) -> str:
        """Wait until all awaited works are done; return "", or after `timeout` s the name of an unfinished work."""
        with self._lock:
            if self._changed.wait_for(lambda: not self._awaited_works(), timeout):
                return ""
            return f"unfinished {self._awaited_works()[0].description}"

    def abandon(self) -> None:
        """Forget all works in a forked child. Its copies of the locks may be held by threads that it does not have."""
        self._works, self._unawaited, self.thread = [], set(), None
        self._lock, self._polling = threading.Lock(), threading.Lock()
        self._changed = threading.Condition(self._lock)

    def close(self) -> None:
        """Stop polling."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait at most `timeout` s until the thread has ended after `close`: see `Progress.join`."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout)
