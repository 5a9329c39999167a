"""Timeline: a trace of operations in Chrome's format. Open it in chrome://tracing or ui.perfetto.dev.

Format: "Trace Event Format", an array of events. The closing bracket may be missing, so the file of a killed job is
still readable. The first line has the facts that `commlib trace` needs to combine the files of several ranks (see
`commlib.trace.files`). `commlib.observe.chrome` formats the other lines.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from time import time

from commlib.errors import UsageError
from commlib.observe.chrome import ChromeLines
from commlib.observe.clocks import Offset, clock_id, host_name, now_on_both
from commlib.observe.recorder import Event, Mark

log = logging.getLogger("commlib")

# Seconds between writes to the file. The recorded threads never wait for a disk. All ranks write at the same moments:
# a rank that loses its core delays the others, so simultaneous writes cost one delay instead of one for each rank.
_INTERVAL = 0.25

FORMAT = 1
"""The version of the file format, which readers check."""

_CLOSE = 10.0  # seconds that `close` waits for the file to be written

_MANY = 1000  # lines that are joined for one write


class Timeline:
    """Writes a recorder's events to a file until it is closed. Any thread may call it.

    mark_cycles: whether the recorder marks each negotiation of named operations.
    """

    def __init__(self, path: str, *, rank: int, mark_cycles: bool = False) -> None:
        self.mark_cycles = mark_cycles
        self._path, self._rank = path, rank
        self._waiting: deque[Event | Mark | str] = deque()
        self._failed = False
        self._start, self._wall = now_on_both()
        self._lines = ChromeLines(rank, self._start)
        try:
            # Unbuffered, so a forked child has no buffered data that it would write a second time.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"timeline: cannot write {path}: {error}") from error
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="commlib-timeline", daemon=True)
        self._thread.start()

    def read(self, event: Event) -> None:
        """Take an event; the thread writes it soon."""
        if not self._failed:
            self._waiting.append(event)

    def take(self, mark: Mark) -> None:
        """Take a mark; the thread writes it soon."""
        if not self._failed:
            self._waiting.append(mark)

    def note_clock(self, offset: Offset) -> None:
        """Write one measured offset between this rank's clock and another rank's."""
        if not self._failed:
            facts = {"time_ns": offset.time, "offset_ns": offset.offset, "error_ns": offset.error, "to": offset.to}
            self._waiting.append(self._lines.meta("commlib_clock", facts))

    def close(self) -> None:
        """Write the end of the file. Idempotent."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE)

    def abandon(self) -> None:
        """Write no more, in a forked child: the file belongs to its parent."""
        with suppress(OSError):
            os.close(self._file)

    # The thread

    def _loop(self) -> None:
        try:
            facts = {"format": FORMAT, "host": host_name(), "clock": clock_id(), "process": os.getpid()}
            times = {"start_ns": self._start, "wall_ns": self._wall}
            # Tools for Horovod's timelines read the time of day from this last field.
            header = facts | times | {"start_time_since_epoch_in_micros": self._wall // 1000}
            self._append(f"[\n{self._lines.meta('commlib', header)},\n")
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
                lines += self._lines.of(happened, own)  # type: ignore[arg-type]  # mypy does not infer that it is not a str
            if len(lines) > _MANY:
                self._append(",\n".join(lines) + ",\n")
                lines.clear()
        if lines:
            self._append(",\n".join(lines) + ",\n")

    def _append(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._file, data) :]
