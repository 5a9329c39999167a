"""A trace of what operations do, in Chrome's format: open it in chrome://tracing or ui.perfetto.dev.

Format: "Trace Event Format", an array of events whose closing bracket may be missing, so that the file of a job that
was killed can be read. The first line says what `commlib trace` needs to put files of several ranks together: see
`commlib.trace.files`. The others are those of `commlib.observe.chrome`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from time import time

from commlib.errors import UsageError
from commlib.observe.chrome import Lines
from commlib.observe.clocks import Offset, clock_id, host_name, now_on_both
from commlib.observe.recorder import Event, Mark

log = logging.getLogger("commlib")

# So often (seconds) what was recorded goes to the file. Whoever is recorded never waits for a disk. All ranks write at
# the same moments: a rank whose core is taken makes the others wait, which then costs all of them nothing more.
_INTERVAL = 0.25

FORMAT = 1
"""What a reader must know of the file's own events changes with it."""

_CLOSE = 10.0  # seconds that the end of a timeline waits for its file

_MANY = 1000  # lines that are put together before they are written


class Timeline:
    """Writes a recorder's events to a file until it is closed. Any thread may call it.

    mark_cycles: whether the recorder is to mark when ranks negotiate.
    """

    def __init__(self, path: str, *, rank: int, mark_cycles: bool = False) -> None:
        self.mark_cycles = mark_cycles
        self._path, self._rank = path, rank
        self._waiting: deque[Event | Mark | str] = deque()
        self._failed = False
        self._start, self._wall = now_on_both()
        self._lines = Lines(rank, self._start)
        try:
            # Not buffered, so that a forked child has nothing of it to write again.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"start_timeline: cannot write {path}: {error}") from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="commlib-timeline", daemon=True)
        self._thread.start()

    def read(self, event: Event) -> None:
        """Take an event, which the thread writes soon."""
        if not self._failed:
            self._waiting.append(event)

    def take(self, mark: Mark) -> None:
        """Take a mark, which the thread writes soon."""
        if not self._failed:
            self._waiting.append(mark)

    def note_clock(self, offset: Offset) -> None:
        """Write how far this rank's clock was from that of another rank, at some time."""
        if not self._failed:
            facts = {"time_ns": offset.time, "offset_ns": offset.offset, "error_ns": offset.error, "to": offset.to}
            self._waiting.append(self._lines.meta("commlib_clock", facts))

    def close(self) -> None:
        """Write the end of the file. Idempotent."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE)

    def abandon(self) -> None:
        """Write nothing more, in a forked child: the file is its parent's."""
        with suppress(OSError):
            os.close(self._file)

    # The thread

    def _loop(self) -> None:
        try:
            facts = {"format": FORMAT, "host": host_name(), "clock": clock_id(), "process": os.getpid()}
            times = {"start_ns": self._start, "wall_ns": self._wall}
            # By the last one tools for Horovod's timelines know the time of day.
            told = facts | times | {"start_time_since_epoch_in_micros": self._wall // 1000}
            self._append(f"[\n{self._lines.meta('commlib', told)},\n")
            ended = False
            while not ended:
                ended = self._closing.wait(_INTERVAL - time() % _INTERVAL)
                self._write_waiting()
            self._append(f"{self._lines.meta('process_name', {'name': f'rank {self._rank}'})}\n]\n")
        except OSError as error:
            self._failed = True
            self._waiting.clear()
            log.error("the timeline %s ends early: %s", self._path, error)
        finally:
            with suppress(OSError):
                os.close(self._file)

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        threads = {thread.ident or 0: thread.name for thread in threading.enumerate()}
        own = {number for number, name in threads.items() if name.startswith("commlib-")}
        lines: list[str] = []
        while self._waiting:
            happened = self._waiting.popleft()
            if type(happened) is str:
                lines.append(happened)
            else:
                lines += self._lines.of(happened, own)  # type: ignore[arg-type]  # mypy does not see that it is no str
            if len(lines) > _MANY:
                self._append(",\n".join(lines) + ",\n")
                lines.clear()
        if lines:
            self._append(",\n".join(lines) + ",\n")

    def _append(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._file, data) :]
