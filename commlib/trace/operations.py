"""Operations: convert the events of a timeline to operations, waits and spans with a begin and an end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from commlib.trace.files import Trace

Key = tuple[str, int]
"""(group key, number of the call): the same on all ranks. ("", 0) for messages."""

NO_KEY: Key = ("", 0)

_NEGOTIATE = "NEGOTIATE_"


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One operation of a rank. Times: ns of the file's clock, or of the common one.

    queued: when it was launched. arrived: when this rank was ready for it: it had requested a named operation, or
    another operation had its turn. exposed: it ran in its caller's thread. key: ("", 0) for messages. row: in the file.
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
class TracedSpan:
    """An activity other than an operation. category: "wait", "pack", "codec", "pipeline", "bucket" or "step".

    key: for a wait, the awaited operation.
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
class RankActivity:
    """The activity of one rank. end: the last time in the file."""

    rank: int
    start: int
    end: int
    operations: tuple[TracedCall, ...]
    spans: tuple[TracedSpan, ...]
    loads: Mapping[str, tuple[int, ...]]
    """How often each expert of a layer was chosen, in total."""

    def of(self, category: str) -> list[TracedSpan]:
        """Return the spans of a category, ordered by their ends."""
        return [span for span in self.spans if span.category == category]

    def moved(self, move: Callable[[int], int]) -> RankActivity:
        """Return the same activity on another clock."""
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


def read_activity(trace: Trace) -> RankActivity:
    """Return the operations and spans of a timeline. Unfinished ones end at the end of the file."""
    reader = _TimelineReader(trace)
    for event in trace.events:
        reader.take(event)
    return reader.story()


@dataclass(slots=True)
class _Open:
    """An event that has begun."""

    event: dict[str, Any]
    time: int
    queued: int = 0


class _TimelineReader:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._now = trace.start
        self._calls: dict[int, str] = {}  # of each row
        self._rows: dict[int, list[_Open]] = {}
        self._requested: dict[int, int] = {}  # when the named operation of a row was requested
        self._queued: dict[Any, int] = {}
        self._launched: dict[tuple[str, int], int] = {}  # by the name of a group and the number of its call
        self._overlapping: dict[tuple[Any, Any], list[_Open]] = {}  # open asynchronous events, by category and number
        self._operations: list[TracedCall] = []
        self._spans: list[TracedSpan] = []
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
        elif phase == "e" and (stack := self._overlapping.get((event.get("cat"), event.get("id")))):
            self._end_overlapping(stack.pop(), args)
        elif phase == "i" and event.get("cat") == "step":
            self._spans.append(TracedSpan(self._trace.rank, "step", event["name"], self._now, self._now, args))
        elif phase == "C" and event["name"].startswith("load of "):
            numbers = [int(number) for number in args.values()]
            before = self._loads.setdefault(event["name"].removeprefix("load of "), [0] * len(numbers))
            before[:] = [one + other for one, other in zip(before, numbers, strict=False)]

    def story(self) -> RankActivity:
        for stacks in (self._rows, self._overlapping):
            for stack in stacks.values():
                for opened in reversed(stack):
                    if opened.event["ph"] == "B":
                        self._end(opened, self._now, {"error": "unfinished"})
                    else:
                        self._end_overlapping(opened, {"error": "unfinished"})
        operations = tuple(sorted(self._operations, key=lambda one: one.began))
        loads = {name: tuple(numbers) for name, numbers in self._loads.items()}
        return RankActivity(self._trace.rank, self._trace.start, self._now, operations, tuple(self._spans), loads)

    def _end(self, opened: _Open, ended: int, ending: Mapping[str, Any]) -> None:
        event, facts = opened.event, _args(opened.event)
        row, name = event.get("tid", 0), event.get("name", "")
        if "cat" in event:
            self._spans.append(TracedSpan(self._trace.rank, event["cat"], name, opened.time, ended, facts, NO_KEY, row))
        elif name.startswith(_NEGOTIATE):
            self._requested[row] = opened.time
        elif "sequence" in facts:
            key = (self._calls.get(row, ""), facts["sequence"])
            launched = facts.get("group", ""), facts["sequence"]
            queued = self._requested.pop(row, 0) or self._launched.pop(launched, opened.time)
            named = "by name" in key[0]
            arrived = queued if named else opened.time
            self._operation(opened, ended, ending, key=key, queued=queued, arrived=arrived)

    def _operation(
        self, opened: _Open, ended: int, ending: Mapping[str, Any], *, key: Key, queued: int, arrived: int
    ) -> None:
        facts = _args(opened.event)
        self._operations.append(
            TracedCall(
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
        self._overlapping.setdefault((kind, number), []).append(_Open(event, self._now))

    def _end_overlapping(self, opened: _Open, ending: Mapping[str, Any]) -> None:
        event, kind, facts = opened.event, opened.event.get("cat", ""), _args(opened.event)
        ended = self._now
        if kind == "message":
            self._operation(opened, ended, ending, key=NO_KEY, queued=opened.time, arrived=opened.time)
        elif kind == "queue":  # its end event has the number of the call
            self._launched[ending.get("group", ""), ending.get("sequence", 0)] = opened.time
        elif kind == "wait":
            key = (facts.get("calls", ""), facts.get("sequence", 0))
            self._spans.append(TracedSpan(self._trace.rank, kind, event["name"], opened.time, ended, facts, key))
        else:
            ended = ending.get("ended_ns", ended)
            self._spans.append(
                TracedSpan(self._trace.rank, kind, event["name"], opened.time, max(opened.time, ended), facts)
            )


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}
