"""Chrome: the lines of a timeline's file, each an event of Chrome's format, from what a recorder tells.

Each group has a row, and each named operation one of its own. What may overlap, messages between two ranks, what waits
in a queue, waits and buckets, are "asynchronous" events, which viewers lay out themselves. Lines are put together by
hand, since they are made while a program trains: `json.dumps` of a whole event takes four times as long.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable
from functools import lru_cache
from typing import Any

from commlib.observe.recorder import MESSAGES, Event, Mark, Phase, Record, of

_ROWS = {"wait": "exposed wait", "bucket": "buckets", "step": "steps"}  # what rows are called, by categories

_CYCLES = ("", "cycles")  # the row of what concerns no operation

_quoted = lru_cache(4096)(json.dumps)  # texts come again and again


class Lines:
    """Knows what has begun and not ended, and the number of each row. start: the ns that are 0 in the file."""

    def __init__(self, rank: int, start: int) -> None:
        self._head = f'{{"pid": {rank}, "ts": '
        self._meta = f'{{"pid": {rank}, "ph": "M", "name": '
        self._rows: dict[Hashable, int] = {}
        self._open: dict[int, int] = {}  # what has begun in a row and not ended: how many, by operation
        self._blocking: set[int] = set()  # what runs in the thread that called it
        self._doing: set[int] = set()  # named operations in the middle of what they do
        self._start = self._now = start
        self._found: list[str] = []

    def of(self, happened: Event | Mark, own_threads: Collection[int]) -> list[str]:
        """Return the lines of something that happened. own_threads: those of commlib, whose waits are nobody's."""
        self._found = []
        # In a file times never go back; threads that write at once may be some microseconds apart.
        if happened.time > self._now:
            self._now = happened.time
        if type(happened) is Mark:
            self._marked(happened, own_threads)
        elif type(happened) is Event:
            (self._named if happened.record.name else self._unnamed)(happened, own_threads)
        return self._found

    def meta(self, name: str, facts: dict[str, Any], more: str = "") -> str:
        """Return a line that says something of the file, or of a row."""
        return f'{self._meta}"{name}", {more}"args": {json.dumps(facts)}}}'

    def _named(self, event: Event, own_threads: Collection[int]) -> None:
        """Within its row: the time in which ranks agree, then that of the operation, and in it what that does.

        As Horovod has them.
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
            self._doing.add(record.number)
            self._in_row(record.row, record.name, f'"ph": "B", "name": {_quoted(event.detail)}')
        elif phase is Phase.END:
            self._end_activity(record)
            self._end(record)

    def _end_activity(self, record: Record) -> None:
        if record.number in self._doing:
            self._doing.discard(record.number)
            self._in_row(record.row, record.name, '"ph": "E"')

    def _unnamed(self, event: Event, own_threads: Collection[int]) -> None:
        record, phase = event.record, event.phase
        if phase is Phase.MARK:
            self._in_row(_CYCLES, "cycles", f'"ph": "i", "name": {_quoted(record.text)}, "s": "p"')
        elif phase is Phase.COUNT:
            numbers = {str(place): int(number) for place, number in enumerate(event.detail.split())}
            self._write(0, f'"ph": "C", "name": {_quoted(record.text)}, "args": {json.dumps(numbers)}')
        elif record.row == MESSAGES:
            if phase in (Phase.RUN, Phase.END):
                self._overlapping(record, "b" if phase is Phase.RUN else "e", "message", record.verb)
        elif phase is Phase.QUEUED:
            self._overlapping(record, "b", "queue", f"queued {record.verb}")
        elif phase is Phase.ROUND:
            self._in_row(record.row, record.group, f'"ph": "i", "name": {_quoted(event.detail)}, "s": "t"')
        elif phase is Phase.END:
            if record.queued and not record.began:
                self._overlapping(record, "e", "queue", f"queued {record.verb}")
            self._end(record)
        elif record.number not in self._open:
            if record.queued:
                self._overlapping(record, "e", "queue", f"queued {record.verb}")
            elif phase is Phase.RUN and event.thread not in own_threads:
                self._blocking.add(record.number)
            self._begin(record, f'"name": {_quoted(record.verb)}, "args": {_facts(record)}')

    def _marked(self, mark: Mark, own_threads: Collection[int]) -> None:
        row, facts = _ROWS.get(mark.category, mark.category), mark.facts
        if mark.category == "wait" and mark.row in own_threads:
            return  # nobody's time but commlib's
        args = _awaited(facts) if isinstance(facts, Record) else json.dumps(facts) if facts else "{}"
        tail = f'"ph": "{mark.phase}", "cat": "{mark.category}", "name": {_quoted(mark.name)}, "args": {args}'
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
        self._write(0, f'"ph": "{phase}", "cat": "{category}", "id": {number}, "name": {_quoted(name)}, "args": {args}')

    def _in_row(self, key: Hashable, name: str, tail: str, record: Record | None = None) -> None:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            named = {"name": name, "calls": "" if record is None else of(record)}
            self._found.append(self.meta("thread_name", named, f'"tid": {row}, '))
        self._write(row, tail)

    def _write(self, row: int, tail: str) -> None:
        self._found.append(f'{self._head}{(self._now - self._start) / 1e3:.3f}, "tid": {row}, {tail}}}')


def _awaited(record: Record) -> str:
    number = record.number
    return f'{{"calls": {_quoted(of(record))}, "sequence": {record.sequence}, "operation": {number}}}'


def _facts(record: Record) -> str:
    text, group, error = _quoted(record.text), _quoted(record.group), record.error
    facts = f'"call": {text}, "group": {group}, "sequence": {record.sequence}, "bytes": {record.nbytes}'
    return f'{{{facts}, "error": {json.dumps(error)}}}' if error else f"{{{facts}}}"
