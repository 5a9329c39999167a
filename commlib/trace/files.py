"""Files: tell what a trace is of (the timeline of a rank, the profile of a framework), and of which clock."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from commlib.errors import UsageError
from commlib.trace.parse import parse, unpacked
from commlib.trace.xplane import read_xplane

COMMLIB, TORCH, TENSORFLOW = "commlib", "PyTorch", "TensorFlow"

_FORMAT = 1  # of `commlib.observe.timeline.FORMAT`

_ON_THE_HOST = ("cpu_op", "user_annotation", "python_function")  # PyTorch's events with the number of its process

_WHOSE = re.compile(r"(\d+)=(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Sample:
    """At `time` of this file's clock rank `to`'s was ahead by `offset`, but for `error`. Units: ns."""

    time: int
    offset: int
    error: int
    to: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One file. rank: -1 if it does not say. events: as in the file, their `ts` in us after `start`.

    start: ns, of the monotonic clock `clock` of a timeline, of the time of day of a profile. wall: the time of day at
    the same moment. process: its number on its `host`, 0 if unknown. clock: "" if it does not say. whole: its end is
    there.
    """

    path: str
    kind: str
    rank: int
    events: list[dict[str, Any]] = field(repr=False)
    start: int = 0
    wall: int = 0
    host: str = ""
    process: int = 0
    clock: str = ""
    samples: tuple[Sample, ...] = ()
    whole: bool = True


def read_all(names: Sequence[str]) -> tuple[list[Trace], list[str]]:
    """Return the traces of some files, timelines first, by rank; and what a reader should know about them.

    A name may say whose a profile is: "3=profile.json". Raises UsageError for a file that is none of these, for two
    timelines of one rank, and for a profile of which nobody knows whose it is.
    """
    found, notes = [], []
    for name in names:
        whose = None if Path(name).exists() else _WHOSE.fullmatch(name)
        trace = read(name if whose is None else whose[2])
        if trace is None:
            notes.append(f"{name}: is empty, and left out: was its rank killed as it began?")
            continue
        if not trace.whole:
            notes.append(f"{name}: ends early, as of a job that was killed; what is there is used")
        found.append(trace if whose is None else replace(trace, rank=int(whose[1])))
    timelines = sorted((trace for trace in found if trace.kind == COMMLIB), key=lambda trace: trace.rank)
    if not timelines:
        raise UsageError(
            "trace: no timeline of commlib among these files: write one by commlib.timeline('trace{rank}.json') or "
            "COMMLIB_TIMELINE"
        )
    for one, other in pairwise(timelines):
        if one.rank == other.rank:
            raise UsageError(f"trace: {one.path} and {other.path} are both of rank {one.rank}: give files of one run")
    profiles = [_whose(trace, timelines) for trace in found if trace.kind != COMMLIB]
    return [*timelines, *profiles], notes


def read(path: str) -> Trace | None:
    """Return the trace in a file; None if the file is empty. Raises UsageError for a file of another kind."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"trace: cannot read {path}: {error.strerror or error}") from error
    if not data.strip():
        return None
    expected = (
        "expected a timeline of commlib, a trace of torch.profiler (export_chrome_trace) or a profile of TensorFlow "
        "(*.xplane.pb; its *.trace.json.gz does not say when it was)"
    )
    try:
        if path.endswith((".xplane.pb", ".xplane.pb.gz")):
            start, events = read_xplane(unpacked(data))
            return Trace(path, TENSORFLOW, -1, events, start=start, wall=start)
        events, facts, whole = parse(data)
    except ValueError as error:
        raise UsageError(f"trace: {path}: {error}; {expected}") from error
    if "baseTimeNanoseconds" in facts or "schemaVersion" in facts:
        return _of_torch(path, events, facts, whole=whole)
    heads = [event for event in events if event["ph"] == "M" and event.get("name") == "commlib"]
    if heads or any("sequence" in _args(event) for event in events):
        return _of_commlib(path, events, heads, whole=whole)
    if not events and not whole:
        return None  # it had written no more than the bracket
    raise UsageError(f"trace: {path}: is a trace of another kind; {expected}")


def _args(event: dict[str, Any]) -> dict[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _of_commlib(path: str, events: list[dict[str, Any]], heads: list[dict[str, Any]], *, whole: bool) -> Trace:
    ranks = {event["pid"] for event in events if isinstance(event.get("pid"), int)}
    if len(ranks) != 1:
        raise UsageError(f"trace: {path}: has {len(ranks)} ranks: merged already? Give the files of the ranks")
    (rank,) = ranks
    if not heads:
        return Trace(path, COMMLIB, rank, events, whole=whole)
    head = _args(heads[0])
    if head.get("format") != _FORMAT:
        raise UsageError(f"trace: {path}: is of format {head.get('format')}, and this commlib reads {_FORMAT}")
    samples = tuple(
        Sample(facts["time_ns"], facts["offset_ns"], facts["error_ns"], facts["to"])
        for event in events
        if event["ph"] == "M" and event.get("name") == "commlib_clock" and (facts := _args(event))
    )
    return Trace(
        path,
        COMMLIB,
        rank,
        events,
        start=head["start_ns"],
        wall=head["wall_ns"],
        host=head["host"],
        process=head["process"],
        clock=head["clock"],
        samples=samples,
        whole=whole,
    )


def _of_torch(path: str, events: list[dict[str, Any]], facts: dict[str, Any], *, whole: bool) -> Trace:
    """Since 2.4 `ts` is after "baseTimeNanoseconds", which is a time of day; before, it was one itself."""
    base = int(facts.get("baseTimeNanoseconds") or 0)
    told = facts.get("distributedInfo")
    rank = told.get("rank", -1) if isinstance(told, dict) else -1
    processes = [
        event["pid"] for event in events if event.get("cat") in _ON_THE_HOST and isinstance(event.get("pid"), int)
    ]
    process = processes[0] if processes else 0
    host = str(facts.get("host_name", ""))
    return Trace(path, TORCH, int(rank), events, start=base, wall=base, host=host, process=process, whole=whole)


def _whose(profile: Trace, timelines: Sequence[Trace]) -> Trace:
    """Return a profile with its rank: as it says, or that of the timeline of the same process, or the only one."""
    rank = profile.rank
    if rank < 0:
        same = [
            trace.rank
            for trace in timelines
            if profile.process and trace.process == profile.process and profile.host in ("", trace.host)
        ]
        ranks = same or [trace.rank for trace in timelines]
        if len(ranks) > 1:
            raise UsageError(
                f"trace: {profile.path}: does not say whose it is: write its rank before it, {ranks[0]}={profile.path}"
            )
        (rank,) = ranks
    if all(trace.rank != rank for trace in timelines):
        raise UsageError(f"trace: {profile.path}: is of rank {rank}, of which there is no timeline to align it by")
    return replace(profile, rank=rank)
