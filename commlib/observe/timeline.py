"""A trace of what operations do, in Chrome's format: open it in chrome://tracing or ui.perfetto.dev.

Format: "Trace Event Format", an array of events whose closing bracket may be missing, so that the file of a job that
was killed can be read. Each group has a row, and each named operation one of its own. What may overlap, messages
between two ranks, what waits in a queue, and buckets, are "asynchronous" events, which viewers lay out themselves.
The first line says what `commlib trace` needs to put files of several ranks together: see `commlib.trace.read`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import suppress
from time import monotonic_ns, time_ns
from typing import Any

from commlib.errors import UsageError
from commlib.observe.clocks import Offset, clock_id, host_name
from commlib.observe.recorder import MESSAGES, Event, Mark, Phase, Record, of

log = logging.getLogger("commlib")

# So often (seconds) what was recorded goes to the file. Whoever is recorded never waits for a disk.
_INTERVAL = 0.05

FORMAT = 1
"""What a reader must know of the file's own events changes with it."""

_CLOSE = 10.0  # seconds that the end of a timeline waits for its file

_ROWS = {"wait": "exposed wait", "bucket": "buckets", "step": "steps"}  # what rows are called, by categories

_CYCLES = ("", "cycles")  # the row of what concerns no operation


class Timeline:
    """Writes a recorder's events to a file until it is closed. Any thread may call it.

    mark_cycles: whether the recorder is to mark when ranks negotiate.
    """

    def __init__(self, path: str, *, rank: int, mark_cycles: bool = False) -> None:
        self.mark_cycles = mark_cycles
        self._path, self._rank = path, rank
        self._rows: dict[Hashable, int] = {}
        self._open: dict[int, int] = {}  # what has begun in a row and not ended: how many, by operation
        self._blocking: set[int] = set()  # what runs in the thread that called it
        self._own_threads: set[int] = set()  # commlib's
        self._waiting: deque[Event | Mark | dict[str, Any]] = deque()
        self._failed = False
        self._start = self._now = monotonic_ns()
        self._wall = time_ns()
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
            self._waiting.append({"ph": "M", "name": "commlib_clock", "args": facts})

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
            self._append(f"[\n{json.dumps(self._head())},\n")
            ended = False
            while not ended:
                ended = self._closing.wait(_INTERVAL)
                lines = [json.dumps({"pid": self._rank, **event}) for event in self._written()]
                if lines:
                    self._append(",\n".join(lines) + ",\n")
            name = {"ph": "M", "pid": self._rank, "name": "process_name", "args": {"name": f"rank {self._rank}"}}
            self._append(f"{json.dumps(name)}\n]\n")
        except OSError as error:
            self._failed = True
            self._waiting.clear()
            log.error("the timeline %s ends early: %s", self._path, error)
        finally:
            with suppress(OSError):
                os.close(self._file)

    def _append(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._file, data) :]

    def _head(self) -> dict[str, Any]:
        facts = {"format": FORMAT, "host": host_name(), "clock": clock_id(), "process": os.getpid()}
        times = {"start_ns": self._start, "wall_ns": self._wall}
        return {"ph": "M", "pid": self._rank, "name": "commlib", "args": facts | times}

    def _written(self) -> Iterator[dict[str, Any]]:
        if self._waiting:
            named = {thread.ident or 0: thread.name for thread in threading.enumerate()}
            self._own_threads = {thread for thread, name in named.items() if name.startswith("commlib-")}
        while self._waiting:
            event = self._waiting.popleft()
            if isinstance(event, dict):
                yield event
                continue
            # In a file times never go back; threads that write at once may be some microseconds apart.
            self._now = max(self._now, event.time)
            if type(event) is Mark:
                yield from self._marked(event)
                continue
            assert type(event) is Event
            yield from self._named(event) if event.record.name else self._unnamed(event)

    def _named(self, event: Event) -> Iterator[dict[str, Any]]:
        """Within its row: the time in which ranks agree, then that of the operation. As Horovod has them."""
        record, phase = event.record, event.phase
        what = record.verb.upper()
        if phase is Phase.QUEUED:
            yield from self._begin(record, {"name": f"NEGOTIATE_{what}"})
        elif phase is Phase.RUN:
            yield from self._end(record)
            yield from self._begin(record, {"name": what, "args": _facts(record)})
        elif phase is Phase.END:
            yield from self._end(record)

    def _unnamed(self, event: Event) -> Iterator[dict[str, Any]]:
        record, phase = event.record, event.phase
        if phase is Phase.MARK:
            yield from self._in_row(_CYCLES, "cycles", {"ph": "i", "name": record.text, "s": "p"})
        elif phase is Phase.COUNT:
            numbers = {str(place): int(number) for place, number in enumerate(event.detail.split())}
            yield {"ts": self._time(), "tid": 0, "ph": "C", "name": record.text, "args": numbers}
        elif record.row == MESSAGES:
            if phase in (Phase.RUN, Phase.END):
                yield self._overlapping(record, "b" if phase is Phase.RUN else "e", "message", f"{record.verb}")
        elif phase is Phase.QUEUED:
            yield self._overlapping(record, "b", "queue", f"queued {record.verb}")
        elif phase is Phase.ROUND:
            yield from self._in_row(record.row, record.group, {"ph": "i", "name": event.detail, "s": "t"})
        elif phase is Phase.END:
            if record.queued and not record.began:
                yield self._overlapping(record, "e", "queue", f"queued {record.verb}")
            yield from self._end(record)
        elif record.number not in self._open:
            if record.queued:
                yield self._overlapping(record, "e", "queue", f"queued {record.verb}")
            elif phase is Phase.RUN and event.thread not in self._own_threads:
                self._blocking.add(record.number)
            yield from self._begin(record, {"name": record.verb, "args": _facts(record)})

    def _marked(self, mark: Mark) -> Iterator[dict[str, Any]]:
        facts = _awaited(mark.facts) if isinstance(mark.facts, Record) else mark.facts
        event: dict[str, Any] = {"ph": mark.phase, "cat": mark.category, "name": mark.name, "args": facts}
        row = _ROWS.get(mark.category, mark.category)
        if mark.category == "wait" and mark.row in self._own_threads:
            return  # nobody's time but commlib's
        if mark.phase in "be":
            event["id"] = f"{mark.category} {mark.row}"
            yield from self._in_row(row, row, event)
        else:
            yield from self._in_row(mark.row, row, {"s": "p", **event} if mark.phase == "i" else event)

    def _begin(self, record: Record, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._open[record.number] = self._open.get(record.number, 0) + 1
        yield from self._in_row(record.row, record.name or record.group, {"ph": "B", **event}, calls=of(record))

    def _end(self, record: Record) -> Iterator[dict[str, Any]]:
        if self._open.pop(record.number, 0):
            facts: dict[str, Any] = {"error": record.error} if record.error else {}
            if record.number in self._blocking:
                self._blocking.discard(record.number)
                facts["exposed"] = True
            yield from self._in_row(record.row, record.name or record.group, {"ph": "E", "args": facts})

    def _overlapping(self, record: Record, phase: str, category: str, name: str) -> dict[str, Any]:
        facts = {"ph": phase, "cat": category, "id": record.number, "name": name, "args": _facts(record)}
        return {"ts": self._time(), "tid": 0, **facts}

    def _in_row(
        self, key: Hashable, name: str, event: Mapping[str, Any], *, calls: str = ""
    ) -> Iterator[dict[str, Any]]:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            yield {"ph": "M", "name": "thread_name", "tid": row, "args": {"name": name, "calls": calls}}
        yield {"ts": self._time(), "tid": row, **event}

    def _time(self) -> float:
        return round((self._now - self._start) / 1e3, 3)


def _awaited(record: Record) -> dict[str, Any]:
    return {"calls": of(record), "sequence": record.sequence, "operation": record.number}


def _facts(record: Record) -> dict[str, Any]:
    facts = {"call": record.text, "group": record.group, "sequence": record.sequence, "bytes": record.nbytes}
    return facts | ({"error": record.error} if record.error else {})
