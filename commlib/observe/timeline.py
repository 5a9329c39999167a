"""A trace of what operations do, in Chrome's format: open it in chrome://tracing or ui.perfetto.dev.

Format: "Trace Event Format", an array of events whose closing bracket may be missing, so that the file of a job that
was killed can be read. Each named operation has a row of its own.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import IO, Any

from commlib.errors import UsageError


class Timeline:
    """Writes events to a file until it is closed. Any thread may call it."""

    def __init__(self, path: str, *, rank: int, mark_cycles: bool = False) -> None:
        self.mark_cycles = mark_cycles
        self._rank = rank
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        try:
            self._file: IO[str] = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # until `close`
        except OSError as error:
            raise UsageError(f"start_timeline: cannot write {path}: {error}") from error
        self._file.write("[\n")

    def begin(self, name: str, what: str) -> None:
        """Say that an operation begins to do something; in its row, within what it does already."""
        self._write(name, {"ph": "B", "name": what})

    def end(self, name: str) -> None:
        """Say that what was begun last in an operation's row has ended."""
        self._write(name, {"ph": "E"})

    def mark(self, what: str) -> None:
        """Say that something happened, to no operation in particular."""
        self._write("", {"ph": "i", "name": what, "s": "p"})

    def close(self) -> None:
        """Write the end of the file. Idempotent."""
        with self._lock:
            if not self._file.closed:
                self._event({"ph": "M", "name": "process_name", "args": {"name": f"rank {self._rank}"}}, last=True)
                self._file.write("]\n")
                self._file.close()

    def _write(self, name: str, event: dict[str, Any]) -> None:
        with self._lock:
            if self._file.closed:
                return
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = len(self._rows)
                self._event({"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name or "cycles"}})
            self._event({"ts": round(1e6 * (time.perf_counter() - self._start), 3), "tid": row, **event})

    def _event(self, event: dict[str, Any], *, last: bool = False) -> None:
        self._file.write(json.dumps({"pid": self._rank, **event}) + ("\n" if last else ",\n"))
