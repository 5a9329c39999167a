"""Operations: what a timeline says, as operations, waits and spans with a begin and an end, instead of as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from commlib.trace.files import Trace

Key = tuple[str, int]
"""Calls of which group, and which one: the same on all ranks. ("", 0) for messages."""

NO_KEY: Key = ("", 0)

_NEGOTIATE = "NEGOTIATE_"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a rank. Times: ns of the file's clock, or of the common one.

    arrived: when this rank was there for it: it had asked for a named one, and the turn of another had come. queued:
    when it was launched. exposed: it ran in the thread that called it. key: ("", 0) for messages. row: in the file.
    """

    rank: int
    key: Key
    verb: str
    text: str
    nbytes: int
    queued: int
    arrived: int
    began: int
    ended: int
    exposed: bool
    error: str = ""
    row: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Something beside the operations. category: "wait", "pack", "codec", "pipeline", "bucket" or "step".

    key: of the operation that is waited for.
    """

    rank: int
    category: str
    name: str
    began: int
    ended: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    key: Key = NO_KEY
    row: int = 0


@dataclass(frozen=True, slots=True)
class Story:
    """What one rank did. end: the last time that the file speaks of."""

    rank: int
    start: int
    end: int
    operations: tuple[Operation, ...]
    spans: tuple[Span, ...]
    loads: Mapping[str, tuple[int, ...]]
    """How often each expert of a layer was chosen, added up."""

    def of(self, category: str) -> list[Span]:
        """Return the spans of a category, in the order of their ends."""
        return [span for span in self.spans if span.category == category]

    def moved(self, move: Callable[[int], int]) -> Story:
        """Return the same on another clock."""
        operations = tuple(
            replace(
                one,
                queued=move(one.queued),
                arrived=move(one.arrived),
                began=move(one.began),
                ended=move(one.ended),
            )
            for one in self.operations
        )
        spans = tuple(replace(one, began=move(one.began), ended=move(one.ended)) for one in self.spans)
        return replace(self, start=move(self.start), end=move(self.end), operations=operations, spans=spans)


def story(trace: Trace) -> Story:
    """Return what a timeline tells. What had not ended as the file did ends with it."""
    found = _Reading(trace)
    for event in trace.events:
        found.take(event)
    return found.story()


@dataclass(slots=True)
class _Open:
    """An event that has begun."""

    event: dict[str, Any]
    time: int
    queued: int = 0


class _Reading:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._now = trace.start
        self._calls: dict[int, str] = {}  # of each row
        self._rows: dict[int, list[_Open]] = {}
        self._asked: dict[int, int] = {}  # when the operation of a row of names was asked for
        self._queued: dict[Any, int] = {}
        self._launched: dict[tuple[str, int], int] = {}  # by the name of a group and the number of its call
        self._over: dict[tuple[Any, Any], list[_Open]] = {}  # what may overlap, by category and number
        self._operations: list[Operation] = []
        self._spans: list[Span] = []
        self._loads: dict[str, list[int]] = {}

    def take(self, event: dict[str, Any]) -> None:
        phase, args = event["ph"], _args(event)
        if phase == "M":
            if event.get("name") == "thread_name":
                self._calls[event.get("tid", 0)] = args.get("calls") or args.get("name", "")
            return
        self._now = max(self._now, self._trace.start + round(event.get("ts", 0) * 1e3))
        if phase == "B":
            self._rows.setdefault(event.get("tid", 0), []).append(_Open(event, self._now))
        elif phase == "E" and (stack := self._rows.get(event.get("tid", 0))):
            self._end(stack.pop(), self._now, args)
        elif phase == "b":
            self._begin_overlapping(event, args)
        elif phase == "e" and (stack := self._over.get((event.get("cat"), event.get("id")))):
            self._end_overlapping(stack.pop(), args)
        elif phase == "i" and event.get("cat") == "step":
            self._spans.append(Span(self._trace.rank, "step", event["name"], self._now, self._now, args))
        elif phase == "C" and event["name"].startswith("load of "):
            numbers = [int(number) for number in args.values()]
            before = self._loads.setdefault(event["name"].removeprefix("load of "), [0] * len(numbers))
            before[:] = [one + other for one, other in zip(before, numbers, strict=False)]

    def story(self) -> Story:
        for stacks in (self._rows, self._over):
            for stack in stacks.values():
                for opened in reversed(stack):
                    if opened.event["ph"] == "B":
                        self._end(opened, self._now, {"error": "unfinished"})
                    else:
                        self._end_overlapping(opened, {"error": "unfinished"})
        operations = tuple(sorted(self._operations, key=lambda one: one.began))
        loads = {name: tuple(numbers) for name, numbers in self._loads.items()}
        return Story(self._trace.rank, self._trace.start, self._now, operations, tuple(self._spans), loads)

    def _end(self, opened: _Open, ended: int, ending: Mapping[str, Any]) -> None:
        event, facts = opened.event, _args(opened.event)
        row, name = event.get("tid", 0), event.get("name", "")
        if "cat" in event:
            self._spans.append(Span(self._trace.rank, event["cat"], name, opened.time, ended, facts, NO_KEY, row))
        elif name.startswith(_NEGOTIATE):
            self._asked[row] = opened.time
        elif "sequence" in facts:
            key = (self._calls.get(row, ""), facts["sequence"])
            launched = facts.get("group", ""), facts["sequence"]
            queued = self._asked.pop(row, 0) or self._launched.pop(launched, opened.time)
            named = "by name" in key[0]
            arrived = queued if named else opened.time
            self._operation(opened, ended, ending, key=key, queued=queued, arrived=arrived)

    def _operation(
        self, opened: _Open, ended: int, ending: Mapping[str, Any], *, key: Key, queued: int, arrived: int
    ) -> None:
        facts = _args(opened.event)
        self._operations.append(
            Operation(
                self._trace.rank,
                key,
                opened.event.get("name", "").lower(),
                facts.get("call", ""),
                facts.get("bytes", -1),
                queued,
                arrived,
                opened.time,
                ended,
                bool(ending.get("exposed")),
                ending.get("error", ""),
                opened.event.get("tid", 0),
            )
        )

    def _begin_overlapping(self, event: dict[str, Any], args: Mapping[str, Any]) -> None:
        kind, number = event.get("cat"), event.get("id")
        self._over.setdefault((kind, number), []).append(_Open(event, self._now))

    def _end_overlapping(self, opened: _Open, ending: Mapping[str, Any]) -> None:
        event, kind, facts = opened.event, opened.event.get("cat", ""), _args(opened.event)
        ended = self._now
        if kind == "message":
            self._operation(opened, ended, ending, key=NO_KEY, queued=opened.time, arrived=opened.time)
        elif kind == "queue":  # its end knows which call it is
            self._launched[ending.get("group", ""), ending.get("sequence", 0)] = opened.time
        elif kind == "wait":
            key = (facts.get("calls", ""), facts.get("sequence", 0))
            self._spans.append(Span(self._trace.rank, kind, event["name"], opened.time, ended, facts, key))
        else:
            ended = ending.get("ended_ns", ended)
            self._spans.append(Span(self._trace.rank, kind, event["name"], opened.time, max(opened.time, ended), facts))


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}
