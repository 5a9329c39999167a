"""Launch tape: record launches instead of queueing them, so that replaying them is cheaper."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class LaunchRecording:
    """The recorded launches of a function: each is (queueing function, *arguments).

    is_whole: replaying them is enough. If the function has allocated scratch memory, it is not: each run must allocate
    it again on the stream that is current then, as the pool may give the recorded memory to other work.
    """

    queued: list[tuple[Any, ...]] = field(default_factory=list)
    is_whole: bool = True


class LaunchTape(threading.local):
    """The recorder of launches, one for each thread."""

    def __init__(self) -> None:
        self._recording: LaunchRecording | None = None

    @contextmanager
    def recording(self) -> Iterator[LaunchRecording]:
        """Record this thread's launches instead of queueing them."""
        before, self._recording = self._recording, LaunchRecording()
        try:
            yield self._recording
        finally:
            self._recording = before

    @property
    def is_recording(self) -> bool:
        return self._recording is not None

    def add(self, queue: Callable[..., None], *arguments: Any) -> None:
        """Record a call `queue(stream, *arguments)`. This thread must be recording."""
        assert self._recording is not None
        self._recording.queued.append((queue, *arguments))

    def note_memory(self) -> None:
        """Note that the recorded launches use newly allocated memory."""
        if self._recording is not None:
            self._recording.is_whole = False
