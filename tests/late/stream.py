"""Streams of the late device, each a thread, and their events."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any


class LateEvent:
    """See `devices.protocol.Event`."""

    def __init__(self) -> None:
        self._happened = threading.Event()

    def done(self) -> bool:
        return self._happened.is_set()

    def happen(self) -> None:
        self._happened.set()

    def block(self) -> None:
        if not self._happened.wait(20):
            raise TimeoutError("an event of the late device did not happen within 20 s")


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # an idle stream keeps nothing alive


class LateStream:
    """A thread that runs queued work in order. See `devices.protocol.Stream`."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self.queue,), name="late stream", daemon=True).start()
        weakref.finalize(self, self.queue.put, None).atexit = False

    def record(self, event: Any = None) -> LateEvent:
        # A new one each time: waits for an earlier record do not wait for this one, as in CUDA.
        event_at_end = LateEvent()
        self.queue.put(event_at_end.happen)
        return event_at_end

    def wait(self, event: Any) -> None:
        self.queue.put(event.block)
