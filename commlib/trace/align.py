"""Align: put the times of several ranks on one clock.

Ranks of one machine have one clock. Those of several have compared theirs by messages, and their files say so. Where
they have not, collectives say it: a rank cannot have its result before the last one has come, so each one bounds how
far two clocks are apart, from both sides; the ends of collectives, which are about simultaneous, say where between.
Bounds are rigorous, so what was measured is moved into them where a clock has drifted since.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from commlib.errors import UsageError
from commlib.trace.files import COMMLIB, Sample, Trace
from commlib.trace.meetings import TOGETHER
from commlib.trace.operations import Key, Operation, Story

_WINDOWS, _LEAST = 16, 12  # pieces of a run in which clocks are compared; collectives in one of them at least

SAME, MEASURED, COLLECTIVES = "one clock", "measured by messages", "by the ends of collectives"


@dataclass(frozen=True, slots=True)
class Clock:
    """How the clock of some ranks becomes that of all. points: (time of its own, what to add), by time. Units: ns.

    error: what is added is right but for so much. how: where it is from.
    """

    points: tuple[tuple[int, float], ...]
    how: str
    error: float = 0.0

    def offset(self, time: int) -> float:
        """Return what to add: between two points on their line, beyond them as at the nearest."""
        points = self.points
        at = bisect_right(points, (time, float("inf")))
        if at in (0, len(points)):
            return points[min(at, len(points) - 1)][1]
        (before, low), (after, high) = points[at - 1], points[at]
        return low + (high - low) * (time - before) / (after - before) if after > before else high

    def move(self, time: int) -> int:
        return time + round(self.offset(time))


@dataclass(frozen=True, slots=True)
class Alignment:
    """The clock of each rank, and what a reader should know of them."""

    clocks: Mapping[int, Clock]
    notes: tuple[str, ...]

    def of(self, trace: Trace, timelines: Mapping[int, Trace]) -> Clock:
        """Return the clock of a file's times: of a profile they are times of day, of which its timeline knows one."""
        clock = self.clocks[trace.rank]
        if trace.kind == COMMLIB:
            return clock
        timeline = timelines[trace.rank]
        lag = timeline.wall - timeline.start  # what a time of day is ahead of the monotonic clock
        return Clock(tuple((time + lag, offset - lag) for time, offset in clock.points), clock.how, clock.error)


def align(traces: Sequence[Trace], stories: Sequence[Story]) -> Alignment:
    """Return the clocks of the ranks that have a timeline. Raises UsageError where nothing relates two of them."""
    timelines = {trace.rank: trace for trace in traces if trace.kind == COMMLIB}
    told = {story.rank: story for story in stories}
    groups: dict[str, list[int]] = {}
    for rank in sorted(timelines):
        groups.setdefault(timelines[rank].clock or f"of rank {rank} alone", []).append(rank)
    if len(groups) == 1:
        (ranks,) = groups.values()
        return Alignment(dict.fromkeys(ranks, Clock(((0, 0.0),), SAME)), ())
    found: dict[int, Clock] = {}
    notes: list[str] = []
    root, measured = _measured(groups, timelines)
    for name, ranks in sorted(groups.items(), key=lambda item: (item[0] != root, item[0] not in measured, item[1])):
        if name == root:
            clock = Clock(((0, 0.0),), SAME)
        else:
            clock = _placed(ranks, measured.get(name), found, told, notes)
        found.update(dict.fromkeys(ranks, clock))
    return Alignment(found, tuple(notes))


def _measured(groups: Mapping[str, list[int]], timelines: Mapping[int, Trace]) -> tuple[str, dict[str, Clock]]:
    """Return whose clock is that of all, and those that were compared with it by messages."""
    samples = {
        name: sorted({sample for rank in ranks for sample in timelines[rank].samples}, key=lambda one: one.time)
        for name, ranks in groups.items()
    }
    references = {sample.to for found in samples.values() for sample in found}
    to = min(references, default=-1)
    root = next((name for name, ranks in groups.items() if to in ranks), "")
    if not root and to < 0:
        return min(groups, key=lambda name: groups[name]), {}
    clocks = {}
    for name, found in samples.items():
        if (said := [one for one in found if one.to == to]) and name != root:
            clocks[name] = Clock(_extended(said), MEASURED, max(one.error for one in found))
    if not root:  # the timeline of the rank that all compared with is not here: one of them stands for its clock
        root = min(clocks, key=lambda name: groups[name])
        own = clocks.pop(root)
        clocks = {
            name: Clock(tuple((time, add - own.offset(time)) for time, add in clock.points), MEASURED, clock.error)
            for name, clock in clocks.items()
        }
    return root, clocks


def _extended(said: Sequence[Sample]) -> tuple[tuple[int, float], ...]:
    """Return what comparisons say as points, with the line of the first and the last one continued a day to both sides.

    It is as steep as they prove: what they differ by within their errors is no drift.
    """
    points = tuple((one.time, float(one.offset)) for one in said)
    (first, low), (last, high) = points[0], points[-1]
    if last <= first:
        return points[:1]
    drift = max(0.0, abs(high - low) - said[0].error - said[-1].error)
    slope, day = (drift if high > low else -drift) / (last - first), 86_400 * 10**9
    return ((first - day, low - slope * day), *points, (last + day, high + slope * day))


@dataclass(frozen=True, slots=True)
class _Bound:
    """What one collective says of two clocks: the offset is in [low, high], and about `guess`. time: of the placed."""

    time: int
    low: int
    high: int
    guess: int

    def nearest(self, offset: float) -> float:
        """Return the possible offset that is nearest to this one; the middle where none is, for want of room."""
        if self.low > self.high:
            return (self.low + self.high) / 2
        return min(max(offset, float(self.low)), float(self.high))


def _placed(
    ranks: Sequence[int],
    measured: Clock | None,
    placed: Mapping[int, Clock],
    stories: Mapping[int, Story],
    notes: list[str],
) -> Clock:
    """Return the clock of some ranks, given those of others."""
    bounds = _bounds(ranks, placed, stories)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    if measured is None:
        if not bounds:
            raise UsageError(
                f"trace: nothing says how the clock of {who} relates to that of the others: no common collective, and "
                "the file has no comparison by messages; commlib.timeline and COMMLIB_TIMELINE with {rank} make one"
            )
        windows = _windows(bounds)
        points = tuple((one.time, one.nearest(one.guess)) for one in windows)
        error = max(abs(one.high - one.low) for one in windows) / 2
        notes.append(f"{who}: aligned {COLLECTIVES}, to {error / 1e3:.0f} us: clocks were not compared by messages")
        return Clock(points, COLLECTIVES, error)
    corrected, worst = [], 0.0
    for one in _windows(bounds) if bounds else ():
        said = measured.offset(one.time)
        right = one.nearest(said)
        worst = max(worst, abs(right - said))
        corrected.append((one.time, right))
    if worst <= measured.error + 1e3:
        return measured
    notes.append(
        f"{who}: the clock ran away by {worst / 1e3:.0f} us after it was compared by messages: corrected {COLLECTIVES}"
    )
    return Clock(tuple(corrected), f"{MEASURED}, corrected {COLLECTIVES}", measured.error)


def _bounds(ranks: Sequence[int], placed: Mapping[int, Clock], stories: Mapping[int, Story]) -> list[_Bound]:
    there = {rank: _together(stories[rank].operations) for rank in (*ranks, *placed)}
    known: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
    for rank, clock in placed.items():
        for key, one in there[rank].items():
            known[key].append((clock.move(one.arrived), clock.move(one.ended)))
    found = []
    for rank in ranks:
        for key, one in there[rank].items():
            if others := known.get(key):
                low = max(arrived for arrived, _ in others) - one.ended
                high = min(ended for _, ended in others) - one.arrived
                guess = min(ended for _, ended in others) - one.ended
                found.append(_Bound(one.ended, low, high, guess))
    return sorted(found, key=lambda one: one.time)


def _together(operations: Iterable[Operation]) -> dict[Key, Operation]:
    return {one.key: one for one in operations if one.verb in TOGETHER and one.key[1] and not one.error}


def _windows(bounds: Sequence[_Bound]) -> list[_Bound]:
    """Return one bound for each part of the run: a clock may drift from one to the next."""
    count = max(1, min(_WINDOWS, len(bounds) // _LEAST))
    edges = [len(bounds) * part // count for part in range(count + 1)]
    found = []
    for start, stop in pairwise(edges):
        some = bounds[start:stop]
        found.append(
            _Bound(
                int(median(one.time for one in some)),
                max(one.low for one in some),
                min(one.high for one in some),
                int(median(one.guess for one in some)),
            )
        )
    return found
