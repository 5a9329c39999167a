"""Files: identify the source of a trace file (the timeline of a rank, or the profile of a framework) and its clock."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from commlib.errors import UsageError
from commlib.trace.parse import parse, unpack
from commlib.trace.xplane import read_xplane

COMMLIB, TORCH, TENSORFLOW = "commlib", "PyTorch", "TensorFlow"

_FORMAT = 1  # of `commlib.observe.timeline.FORMAT`

_ON_THE_HOST = ("cpu_op", "user_annotation", "python_function")  # PyTorch's events whose pid is the process ID

_RANK_PREFIX = re.compile(r"(\d+)=(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Sample:
    """At `time` of this file's clock, the clock of rank `to` was ahead by `offset`, within `error`. Units: ns."""

    time: int
    offset: int
    error: int
    to: int


@dataclass(frozen=True, slots=True)
class Trace:
    """One file. rank: -1 if unknown. events: as in the file, their `ts` in us after `start`.

    start: ns, of the monotonic clock `clock` for a timeline, of the time of day for a profile. wall: the time of day at
    the same moment. process: the process ID on `host`, 0 if unknown. clock: "" if unknown. whole: the file is not
    truncated.
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
    """Return the traces in some files, timelines first, by rank; and notes for the reader.

    A name may give the rank of a profile: "3=profile.json". Raises UsageError for an unknown kind of file, for two
    timelines of one rank, and for a profile whose rank is unknown.
    """
    traces, notes = [], []
    for name in names:
        prefix = None if Path(name).exists() else _RANK_PREFIX.fullmatch(name)
        trace = read(name if prefix is None else prefix[2])
        if trace is None:
            notes.append(f"{name}: is empty, and skipped: was its rank killed at the start?")
            continue
        if not trace.whole:
            notes.append(f"{name}: ends early, like the file of a killed job; its complete events are used")
        traces.append(trace if prefix is None else replace(trace, rank=int(prefix[1])))
    timelines = sorted((trace for trace in traces if trace.kind == COMMLIB), key=lambda trace: trace.rank)
    if not timelines:
        raise UsageError(
            "trace: none of these files is a timeline of commlib: write one with "
            "commlib.timeline('trace{rank}.json') or COMMLIB_TIMELINE"
        )
    for one, other in pairwise(timelines):
        if one.rank == other.rank:
            raise UsageError(
                f"trace: {one.path} and {other.path} are both of rank {one.rank}: pass the files of one run"
            )
    profiles = [_assign_rank(trace, timelines) for trace in traces if trace.kind != COMMLIB]
    return [*timelines, *profiles], notes


def read(path: str) -> Trace | None:
    """Return the trace in a file; None if the file is empty. Raises UsageError for an unknown kind of file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"trace: cannot read {path}: {error.strerror or error}") from error
    if not data.strip():
        return None
    expected = (
        "expected a timeline of commlib, a trace of torch.profiler (export_chrome_trace) or a profile of TensorFlow "
        "(*.xplane.pb; its *.trace.json.gz has no start time)"
    )
    try:
        if path.endswith((".xplane.pb", ".xplane.pb.gz")):
            start, events = read_xplane(unpack(data))
            return Trace(path, TENSORFLOW, -1, events, start=start, wall=start)
        events, facts, whole = parse(data)
    except ValueError as error:
        raise UsageError(f"trace: {path}: {error}; {expected}") from error
    if "baseTimeNanoseconds" in facts or "schemaVersion" in facts:
        return _torch_trace(path, events, facts, whole=whole)
    heads = [event for event in events if event["ph"] == "M" and event.get("name") == "commlib"]
    if heads or any("sequence" in _args(event) for event in events):
        return _commlib_trace(path, events, heads, whole=whole)
    if not events and not whole:
        return None  # only the opening bracket was written
    raise UsageError(f"trace: {path}: is another kind of trace; {expected}")


def _args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _commlib_trace(path: str, events: list[dict[str, Any]], heads: list[dict[str, Any]], *, whole: bool) -> Trace:
    ranks = {event["pid"] for event in events if isinstance(event.get("pid"), int)}
    if len(ranks) != 1:
        raise UsageError(
            f"trace: {path}: has {len(ranks)} ranks, expected 1: already merged? Pass the files of the ranks"
        )
    (rank,) = ranks
    if not heads:
        return Trace(path, COMMLIB, rank, events, whole=whole)
    head = _args(heads[0])
    if head.get("format") != _FORMAT:
        raise UsageError(f"trace: {path}: has format {head.get('format')}, but this commlib reads {_FORMAT}")
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


def _torch_trace(path: str, events: list[dict[str, Any]], facts: dict[str, Any], *, whole: bool) -> Trace:
    """Since PyTorch 2.4 `ts` is relative to "baseTimeNanoseconds", a time of day; before, `ts` was a time of day."""
    base = int(facts.get("baseTimeNanoseconds") or 0)
    distributed = facts.get("distributedInfo")
    rank = distributed.get("rank", -1) if isinstance(distributed, dict) else -1
    processes = [
        event["pid"] for event in events if event.get("cat") in _ON_THE_HOST and isinstance(event.get("pid"), int)
    ]
    process = processes[0] if processes else 0
    host = str(facts.get("host_name", ""))
    return Trace(path, TORCH, int(rank), events, start=base, wall=base, host=host, process=process, whole=whole)


def _assign_rank(profile: Trace, timelines: Sequence[Trace]) -> Trace:
    """Return a profile with its rank: from the file, else from the timeline of the same process, else the only rank."""
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
                f"trace: {profile.path}: its rank is unknown: pass it as RANK=FILE, such as {ranks[0]}={profile.path}"
            )
        (rank,) = ranks
    if all(trace.rank != rank for trace in timelines):
        raise UsageError(f"trace: {profile.path}: is of rank {rank}, which has no timeline to align it with")
    return replace(profile, rank=rank)
