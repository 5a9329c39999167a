"""Poller: move messages that are under way while no thread waits for them.

It has a thread of its own, apart from the groups': one of those may be in a collective that another rank comes to only
after it has exchanged a message with this one.
"""

from __future__ import annotations

import threading
from typing import Protocol

# While messages are under way the thread asks for them this often (seconds): at first, and at most.
_SOONEST, _LATEST = 50e-6, 5e-3


class Polled(Protocol):
    """Something that makes progress when it is asked whether it is done. Never blocks."""

    description: str

    def done(self) -> bool: ...


class MessagePoller:
    """One thread for all groups of a process, started with the first message; asleep while there is none."""

    def __init__(self) -> None:
        self._works: list[tuple[Polled, object]] = []  # each with its owner
        self._unawaited: set[int] = set()  # the `id` of those works that `drain` does not wait for
        # Taken itself rather than through the condition, whose `with` a signal handler could leave locked for ever.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._asking = threading.Lock()  # held while works are asked
        self.thread: threading.Thread | None = None
        self._closed = False

    def watch(self, work: Polled, owner: object, *, awaited: bool = True) -> None:
        """Ask `work` now and then, until it is done or its owner is forgotten. `drain` waits for those `awaited`."""
        with self._lock:
            self._works.append((work, owner))
            if not awaited:
                self._unawaited.add(id(work))
            if self.thread is None:
                self.thread = threading.Thread(target=self._loop, name="commlib-messages", daemon=True)
                self.thread.start()
            self._changed.notify_all()

    def forget(self, owner: object) -> None:
        """Ask no work of `owner` any more, from now on."""
        with self._asking, self._lock:
            self._keep([pair for pair in self._works if pair[1] is not owner])

    def _keep(self, works: list[tuple[Polled, object]]) -> None:
        self._works = works
        self._unawaited &= {id(work) for work, _ in works}
        self._changed.notify_all()

    def _awaited(self) -> list[Polled]:
        return [work for work, _ in self._works if id(work) not in self._unawaited]

    def _loop(self) -> None:
        nap = _SOONEST
        while True:
            with self._lock:
                # Woken early by a new work, which may be done soon.
                nap = _SOONEST if self._changed.wait(nap if self._works else None) else min(2 * nap, _LATEST)
                if self._closed:
                    return
            if self._ask():
                nap = _SOONEST

    def _ask(self) -> bool:
        """Ask all; return whether any of them has ended. An idle thread keeps none of them alive."""
        with self._asking:
            with self._lock:
                works = list(self._works)
            ended = [pair for pair in works if pair[0].done()]
            with self._lock:
                self._keep([pair for pair in self._works if pair not in ended])
        return bool(ended)

    def drain(self, timeout: float) -> str:
        """Wait until all works are done; return "", or after `timeout` s the name of an unfinished work."""
        with self._lock:
            if self._changed.wait_for(lambda: not self._awaited(), timeout):
                return ""
            return f"unfinished {self._awaited()[0].description}"

    def abandon(self) -> None:
        """Forget everything in a forked child, whose copies of the locks may be held by threads that it lacks."""
        self._works, self._unawaited, self.thread = [], set(), None
        self._lock, self._asking = threading.Lock(), threading.Lock()
        self._changed = threading.Condition(self._lock)

    def close(self) -> None:
        """Stop asking."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout: float) -> None:
        """Wait until the thread has ended after `close`, at most `timeout` s: see `Progress.join`."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(timeout)
