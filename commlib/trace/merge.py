"""Merge: combine the events of all ranks, and of profiles, into one trace for Perfetto and chrome://tracing.

Each rank is a process, followed by one process for each process in its profiles. Times are on the common clock, in us
from the first event. Arrows go from the last rank of a collective to the ranks that waited for it.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from commlib.errors import UsageError
from commlib.trace.align import Alignment, Clock
from commlib.trace.files import COMMLIB, Trace
from commlib.trace.matched_collectives import MatchedCall
from commlib.trace.operations import RankActivity

TraceEvent = dict[str, Any]

_EXPOSED = 1_000_000  # the row for the waits of a rank's thread: no row of a timeline has this number

_ARROW = 10_000  # ns: shorter waits get no arrow


def merge_events(
    traces: Sequence[Trace], stories: Sequence[RankActivity], alignment: Alignment, matched: Sequence[MatchedCall] = ()
) -> list[TraceEvent]:
    """Return the events of one trace, by time. stories, matched: on the common clock; `matched` are drawn as arrows."""
    timelines = {trace.rank: trace for trace in traces if trace.kind == COMMLIB}
    named: list[TraceEvent] = []
    events: list[tuple[int, TraceEvent]] = []
    pid = len(timelines) and max(timelines) + 1
    order = {rank: 1000 * place for place, rank in enumerate(sorted(timelines))}
    for trace in traces:
        clock = alignment.of(trace, timelines)
        if trace.kind == COMMLIB:
            named += _process(
                trace.rank, f"rank {trace.rank}" + f" ({trace.host})" * bool(trace.host), order[trace.rank]
            )
            events += _rank_events(trace, clock, named)
        else:
            pids = {}
            for number in dict.fromkeys(event.get("pid") for event in trace.events):
                pids[number], pid = pid, pid + 1
                order[trace.rank] += 1
                named += _process(pids[number], f"rank {trace.rank}: {trace.kind}", order[trace.rank])
            events += _profile_events(trace, clock, pids, named)
    for story in stories:
        named.append(_row(story.rank, _EXPOSED, "exposed wait"))
        events += _wait_events(story)
    events += _arrows(matched, {story.rank: story for story in stories})
    events.sort(key=lambda pair: pair[0])
    first = events[0][0] if events else 0
    return [*named, *({**event, "ts": round((time - first) / 1e3, 3)} for time, event in events)]


def write(events: Iterable[TraceEvent], path: str) -> None:
    """Write a trace atomically, compressed if its name ends in .gz.

    Raises UsageError if it cannot be written.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    text = ",\n".join(map(json.dumps, events))
    data = f'{{"displayTimeUnit": "ms", "traceEvents": [\n{text}\n]}}\n'.encode()
    try:
        partial.write_bytes(gzip.compress(data, 6, mtime=0) if path.endswith(".gz") else data)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"trace merge: cannot write {path}: {error.strerror or error}") from error


def _process(pid: int, name: str, order: int) -> list[TraceEvent]:
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": order}},
    ]


def _row(pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _rank_events(trace: Trace, clock: Clock, named: list[TraceEvent]) -> Iterator[tuple[int, TraceEvent]]:
    for event in trace.events:
        if event["ph"] == "M":
            if event.get("name") == "thread_name":
                named.append(_row(trace.rank, event.get("tid", 0), event["args"]["name"]))
        elif "ts" in event and event.get("cat") != "wait":  # waits share a row with blocking calls
            changed = {**event, "pid": trace.rank}
            if "id" in event:  # viewers join equal IDs across processes
                changed["id"] = f"{trace.rank}: {event['id']}"
            time = trace.start + round(event["ts"] * 1e3)
            args = event.get("args")
            if isinstance(args, dict) and "ended_ns" in args:
                time = int(args["ended_ns"])
            yield clock.move(time), changed


def _profile_events(
    trace: Trace, clock: Clock, pids: Mapping[Any, int], named: list[TraceEvent]
) -> Iterator[tuple[int, TraceEvent]]:
    tids: dict[Any, int] = {}
    for event in trace.events:
        changed = {**event, "pid": pids[event.get("pid")]}
        if "tid" in event:
            thread = event["tid"]
            changed["tid"] = thread if isinstance(thread, int) else tids.setdefault(thread, 10_000_000 + len(tids))
        if event["ph"] == "M":
            changed.pop("ts", None)
            if event.get("name") in ("thread_name", "thread_sort_index"):
                named.append(changed)
        elif isinstance(event.get("ts"), int | float):
            if "id" in event:
                changed["id"] = f"{trace.path}: {event['id']}"
            yield clock.move(trace.start + round(event["ts"] * 1e3)), changed


def _wait_events(story: RankActivity) -> Iterator[tuple[int, TraceEvent]]:
    """Yield the waits of a rank's user threads, in one row: blocking calls, and waits on work handles."""
    waits = [(one.began, one.ended, one.verb) for one in story.operations if one.exposed]
    waits += [(span.began, span.ended, span.name) for span in story.of("wait")]
    until = 0
    for began, ended, name in sorted(waits, key=lambda wait: (wait[0], -wait[1])):
        if began >= until:  # otherwise it is part of an enclosing wait
            until = ended
            length = round((ended - began) / 1e3, 3)
            yield began, {"ph": "X", "pid": story.rank, "tid": _EXPOSED, "name": name, "cat": "wait", "dur": length}


def _arrows(matched: Sequence[MatchedCall], stories: Mapping[int, RankActivity]) -> Iterator[tuple[int, TraceEvent]]:
    for number, call in enumerate(matched):
        for rank, part in call.parts.items():
            last = call.last(rank)
            late = call.parts[last]
            if last == rank or late.arrived - part.arrived < _ARROW or {rank, last} - stories.keys():
                continue
            arrow = {"cat": "waits", "name": f"{call.what} waits", "id": f"waits {number}.{rank}"}
            yield late.arrived, {"ph": "s", "pid": last, "tid": late.row, **arrow}
            within = max(part.arrived, part.ended - 1000)  # within the slice, so viewers bind the arrow to it
            yield within, {"ph": "f", "bp": "e", "pid": rank, "tid": part.row, **arrow}
