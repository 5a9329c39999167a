"""Chrome: turn the events of a recorder into lines of a timeline file, each one event in Chrome's trace format.

Each group has a row, and each named operation has one. Operations that may overlap (messages between two ranks, queued
calls, waits and buckets) become "asynchronous" events, which viewers lay out themselves. The lines are formatted by
hand because this happens during training: `json.dumps` of a complete event takes four times as long.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable
from functools import lru_cache
from typing import Any

from commlib.observe.recorder import MESSAGES, Event, Mark, Phase, Record, call_key

_ROWS = {"wait": "exposed wait", "bucket": "buckets", "step": "steps"}  # titles of rows, by category

_CYCLES = ("", "cycles")  # the row of events that belong to no operation

_quote = lru_cache(4096)(json.dumps)  # the same texts recur


class ChromeLines:
    """Formats events, and tracks the open events and the number of each row. start: the ns that are 0 in the file."""

    def __init__(self, rank: int, start: int) -> None:
        self._head = f'{{"pid": {rank}, "ts": '
        self._meta = f'{{"pid": {rank}, "ph": "M", "name": '
        self._rows: dict[Hashable, int] = {}
        self._open: dict[int, int] = {}  # the number of open events in a row, by operation
        self._blocking: set[int] = set()  # operations that run in their caller's thread
        self._active: set[int] = set()  # named operations with an open activity
        self._start = self._now = start
        self._lines: list[str] = []

    def of(self, happened: Event | Mark, own_threads: Collection[int]) -> list[str]:
        """Return the lines for one event. own_threads: threads of commlib; their waits are not written."""
        self._lines = []
        # Times in a file must not decrease, but events of concurrent threads may be some microseconds out of order.
        if happened.time > self._now:
            self._now = happened.time
        if type(happened) is Mark:
            self._format_mark(happened, own_threads)
        elif type(happened) is Event:
            (self._format_named if happened.record.name else self._format_unnamed)(happened, own_threads)
        return self._lines

    def meta(self, name: str, facts: dict[str, Any], more: str = "") -> str:
        """Return a metadata line about the file or one of its rows."""
        return f'{self._meta}"{name}", {more}"args": {json.dumps(facts)}}}'

    def _format_named(self, event: Event, own_threads: Collection[int]) -> None:
        """Write the negotiation, the operation and its activities into the row of a named operation.

        The layout is Horovod's.
        """
        record, phase = event.record, event.phase
        what = record.verb.upper()
        if phase is Phase.QUEUED:
            self._begin(record, f'"name": "NEGOTIATE_{what}"')
        elif phase is Phase.RUN:
            self._end(record)
            self._begin(record, f'"name": "{what}", "args": {_facts(record)}')
        elif phase is Phase.ROUND:
            self._end_activity(record)
            self._active.add(record.number)
            self._in_row(record.row, record.name, f'"ph": "B", "name": {_quote(event.detail)}')
        elif phase is Phase.END:
            self._end_activity(record)
            self._end(record)

    def _end_activity(self, record: Record) -> None:
        if record.number in self._active:
            self._active.discard(record.number)
            self._in_row(record.row, record.name, '"ph": "E"')

    def _format_unnamed(self, event: Event, own_threads: Collection[int]) -> None:
        record, phase = event.record, event.phase
        if phase is Phase.MARK:
            self._in_row(_CYCLES, "cycles", f'"ph": "i", "name": {_quote(record.text)}, "s": "p"')
        elif phase is Phase.COUNT:
            numbers = {str(place): int(number) for place, number in enumerate(event.detail.split())}
            self._write(0, f'"ph": "C", "name": {_quote(record.text)}, "args": {json.dumps(numbers)}')
        elif record.row == MESSAGES:
            if phase in (Phase.RUN, Phase.END):
                self._overlapping(record, "b" if phase is Phase.RUN else "e", "message", record.verb)
        elif phase is Phase.QUEUED:
            self._overlapping(record, "b", "queue", f"queued {record.verb}")
        elif phase is Phase.ROUND:
            self._in_row(record.row, record.group, f'"ph": "i", "name": {_quote(event.detail)}, "s": "t"')
        elif phase is Phase.END:
            if record.queued and not record.began:
                self._overlapping(record, "e", "queue", f"queued {record.verb}")
            self._end(record)
        elif record.number not in self._open:
            if record.queued:
                self._overlapping(record, "e", "queue", f"queued {record.verb}")
            elif phase is Phase.RUN and event.thread not in own_threads:
                self._blocking.add(record.number)
            self._begin(record, f'"name": {_quote(record.verb)}, "args": {_facts(record)}')

    def _format_mark(self, mark: Mark, own_threads: Collection[int]) -> None:
        row, facts = _ROWS.get(mark.category, mark.category), mark.facts
        if mark.category == "wait" and mark.row in own_threads:
            return  # commlib's own thread waits, not the user's
        args = _wait_facts(facts) if isinstance(facts, Record) else json.dumps(facts) if facts else "{}"
        tail = f'"ph": "{mark.phase}", "cat": "{mark.category}", "name": {_quote(mark.name)}, "args": {args}'
        if mark.phase in "be":
            self._in_row(row, row, f'"id": "{mark.category} {mark.row}", {tail}')
        else:
            self._in_row(mark.row, row, f'"s": "p", {tail}' if mark.phase == "i" else tail)

    def _begin(self, record: Record, tail: str) -> None:
        self._open[record.number] = self._open.get(record.number, 0) + 1
        self._in_row(record.row, record.name or record.group, f'"ph": "B", {tail}', record)

    def _end(self, record: Record) -> None:
        if not self._open.pop(record.number, 0):
            return
        facts = [f'"error": {json.dumps(record.error)}'] if record.error else []
        if record.number in self._blocking:
            self._blocking.discard(record.number)
            facts.append('"exposed": true')
        self._in_row(record.row, record.name or record.group, f'"ph": "E", "args": {{{", ".join(facts)}}}')

    def _overlapping(self, record: Record, phase: str, category: str, name: str) -> None:
        number, args = record.number, _facts(record)
        self._write(0, f'"ph": "{phase}", "cat": "{category}", "id": {number}, "name": {_quote(name)}, "args": {args}')

    def _in_row(self, key: Hashable, name: str, tail: str, record: Record | None = None) -> None:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            named = {"name": name, "calls": "" if record is None else call_key(record)}
            self._lines.append(self.meta("thread_name", named, f'"tid": {row}, '))
        self._write(row, tail)

    def _write(self, row: int, tail: str) -> None:
        self._lines.append(f'{self._head}{(self._now - self._start) / 1e3:.3f}, "tid": {row}, {tail}}}')


def _wait_facts(record: Record) -> str:
    number = record.number
    return f'{{"calls": {_quote(call_key(record))}, "sequence": {record.sequence}, "operation": {number}}}'


def _facts(record: Record) -> str:
    text, group, error = _quote(record.text), _quote(record.group), record.error
    facts = f'"call": {text}, "group": {group}, "sequence": {record.sequence}, "bytes": {record.nbytes}'
    return f'{{{facts}, "error": {json.dumps(error)}}}' if error else f"{{{facts}}}"
