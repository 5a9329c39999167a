"""Tape: note what would be queued, to queue it again and again with less ado."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Tape(threading.local):
    """See above. Each thread has its own."""

    def __init__(self) -> None:
        self._queued: list[tuple[Any, ...]] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Any, ...]]]:
        """Note what this thread would queue, instead of queueing it: each is (what queues it, its arguments)."""
        before, self._queued = self._queued, []
        try:
            yield self._queued
        finally:
            self._queued = before

    @property
    def is_recording(self) -> bool:
        return self._queued is not None

    def add(self, queue: Callable[..., None], *arguments: Any) -> bool:
        """Note a call `queue(stream, *arguments)`; return whether this thread is recording."""
        if self._queued is None:
            return False
        self._queued.append((queue, *arguments))
        return True
