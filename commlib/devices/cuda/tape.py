"""Tape: note what would be queued, to queue it again and again with less ado."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Recording:
    """What a function would have queued: each is (what queues it, its arguments).

    is_whole: it needs nothing else. What takes memory for its own use must take it anew each time, on the stream that
    is current then: it would be kept from nobody else's use otherwise.
    """

    queued: list[tuple[Any, ...]] = field(default_factory=list)
    is_whole: bool = True


class Tape(threading.local):
    """See above. Each thread has its own."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Note what this thread would queue, instead of queueing it."""
        before, self._recording = self._recording, Recording()
        try:
            yield self._recording
        finally:
            self._recording = before

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def add(self, queue: Callable[..., None], *arguments: Any) -> None:
        """Note a call `queue(stream, *arguments)`, while this thread is recording."""
        assert self._recording is not None
        self._recording.queued.append((queue, *arguments))

    def note_memory(self) -> None:
        """Note that memory was taken for the use of what is queued."""
        if self._recording is not None:
            self._recording.is_whole = False
