"""Align: put the times of several ranks on one clock.

Ranks of one machine share a clock. Ranks of several machines compare their clocks by messages and record the result in
their files. Without such a comparison, collectives give bounds: a rank cannot have its result before the last rank has
arrived, so each collective bounds the offset of two clocks from both sides. Ranks finish a collective at about the same
time, which gives an estimate within the bounds. The bounds are rigorous, so measured offsets are clamped to them where
a clock has drifted since.
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
from commlib.trace.matched_collectives import TOGETHER
from commlib.trace.operations import Key, RankActivity, TracedCall

_WINDOWS, _LEAST = 16, 12  # windows of a run in which clocks are compared; least collectives in a window

SAME, MEASURED, COLLECTIVES = "one clock", "measured by messages", "by the ends of collectives"


@dataclass(frozen=True, slots=True)
class Clock:
    """Converts the clock of some ranks to the common clock. Units: ns.

    points: (time of this clock, offset to add), by time. error: the bound on the error of the offset. how: its source.
    """

    points: tuple[tuple[int, float], ...]
    how: str
    error: float = 0.0

    def offset(self, time: int) -> float:
        """Return the offset to add: linear between two points, constant before the first and after the last."""
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
    """The clock of each rank, and notes for the reader."""

    clocks: Mapping[int, Clock]
    notes: tuple[str, ...]

    def of(self, trace: Trace, timelines: Mapping[int, Trace]) -> Clock:
        """Return the clock for a file's times.

        The times of a profile are times of day; the timeline of its rank relates them to the common clock.
        """
        clock = self.clocks[trace.rank]
        if trace.kind == COMMLIB:
            return clock
        timeline = timelines[trace.rank]
        lag = timeline.wall - timeline.start  # the offset of the time of day from the monotonic clock
        return Clock(tuple((time + lag, offset - lag) for time, offset in clock.points), clock.how, clock.error)


def align(traces: Sequence[Trace], stories: Sequence[RankActivity]) -> Alignment:
    """Return the clocks of the ranks with a timeline. Raises UsageError if nothing relates two of them."""
    timelines = {trace.rank: trace for trace in traces if trace.kind == COMMLIB}
    by_rank = {story.rank: story for story in stories}
    groups: dict[str, list[int]] = {}
    for rank in sorted(timelines):
        groups.setdefault(timelines[rank].clock or f"of rank {rank} alone", []).append(rank)
    if len(groups) == 1:
        (ranks,) = groups.values()
        return Alignment(dict.fromkeys(ranks, Clock(((0, 0.0),), SAME)), ())
    clocks: dict[int, Clock] = {}
    notes: list[str] = []
    root, measured = _measured_clocks(groups, timelines)
    for name, ranks in sorted(groups.items(), key=lambda item: (item[0] != root, item[0] not in measured, item[1])):
        if name == root:
            clock = Clock(((0, 0.0),), SAME)
        else:
            clock = _align_group(ranks, measured.get(name), clocks, by_rank, notes)
        clocks.update(dict.fromkeys(ranks, clock))
    return Alignment(clocks, tuple(notes))


def _measured_clocks(groups: Mapping[str, list[int]], timelines: Mapping[int, Trace]) -> tuple[str, dict[str, Clock]]:
    """Return the group of ranks with the reference clock, and the clocks that were compared with it by messages."""
    samples = {
        name: sorted({sample for rank in ranks for sample in timelines[rank].samples}, key=lambda one: one.time)
        for name, ranks in groups.items()
    }
    references = {sample.to for samples_of_rank in samples.values() for sample in samples_of_rank}
    to = min(references, default=-1)
    root = next((name for name, ranks in groups.items() if to in ranks), "")
    if not root and to < 0:
        return min(groups, key=lambda name: groups[name]), {}
    clocks = {}
    for name, samples_of_rank in samples.items():
        if (chosen := [one for one in samples_of_rank if one.to == to]) and name != root:
            clocks[name] = Clock(_extrapolate(chosen), MEASURED, max(one.error for one in samples_of_rank))
    if not root:  # the reference rank has no timeline here: use the clock of another rank as the reference
        root = min(clocks, key=lambda name: groups[name])
        own = clocks.pop(root)
        clocks = {
            name: Clock(tuple((time, add - own.offset(time)) for time, add in clock.points), MEASURED, clock.error)
            for name, clock in clocks.items()
        }
    return root, clocks


def _extrapolate(samples: Sequence[Sample]) -> tuple[tuple[int, float], ...]:
    """Return the comparisons as points, extrapolated by a day on both sides along the line from the first to the last.

    The slope is the least that the measurements prove: differences within their errors do not count as drift.
    """
    points = tuple((one.time, float(one.offset)) for one in samples)
    (first, low), (last, high) = points[0], points[-1]
    if last <= first:
        return points[:1]
    drift = max(0.0, abs(high - low) - samples[0].error - samples[-1].error)
    slope, day = (drift if high > low else -drift) / (last - first), 86_400 * 10**9
    return ((first - day, low - slope * day), *points, (last + day, high + slope * day))


@dataclass(frozen=True, slots=True)
class _Bound:
    """The bounds that one collective gives for two clocks: the offset is in [low, high], about `guess`.

    time: of the new clock.
    """

    time: int
    low: int
    high: int
    guess: int

    def nearest(self, offset: float) -> float:
        """Return the possible offset nearest to this one; the middle if the bounds contradict each other."""
        if self.low > self.high:
            return (self.low + self.high) / 2
        return min(max(offset, float(self.low)), float(self.high))


def _align_group(
    ranks: Sequence[int],
    measured: Clock | None,
    placed: Mapping[int, Clock],
    stories: Mapping[int, RankActivity],
    notes: list[str],
) -> Clock:
    """Return the clock of some ranks, given the clocks of others."""
    bounds = _bounds(ranks, placed, stories)
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    if measured is None:
        if not bounds:
            raise UsageError(
                f"trace: cannot relate the clock of {who} to the clocks of the others: no common collective, and "
                "no comparison by messages in the file; commlib.timeline and COMMLIB_TIMELINE with {rank} write one"
            )
        windows = _windows(bounds)
        points = tuple((one.time, one.nearest(one.guess)) for one in windows)
        error = max(abs(one.high - one.low) for one in windows) / 2
        notes.append(f"{who}: aligned {COLLECTIVES}, to {error / 1e3:.0f} us: clocks were not compared by messages")
        return Clock(points, COLLECTIVES, error)
    corrected, worst = [], 0.0
    for one in _windows(bounds) if bounds else ():
        offset = measured.offset(one.time)
        right = one.nearest(offset)
        worst = max(worst, abs(right - offset))
        corrected.append((one.time, right))
    if worst <= measured.error + 1e3:
        return measured
    notes.append(
        f"{who}: the clock drifted by {worst / 1e3:.0f} us after its comparison by messages: corrected {COLLECTIVES}"
    )
    return Clock(tuple(corrected), f"{MEASURED}, corrected {COLLECTIVES}", measured.error)


def _bounds(ranks: Sequence[int], placed: Mapping[int, Clock], stories: Mapping[int, RankActivity]) -> list[_Bound]:
    by_rank = {rank: _synchronizing(stories[rank].operations) for rank in (*ranks, *placed)}
    intervals: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
    for rank, clock in placed.items():
        for key, one in by_rank[rank].items():
            intervals[key].append((clock.move(one.arrived), clock.move(one.ended)))
    bounds = []
    for rank in ranks:
        for key, one in by_rank[rank].items():
            if others := intervals.get(key):
                low = max(arrived for arrived, _ in others) - one.ended
                high = min(ended for _, ended in others) - one.arrived
                guess = min(ended for _, ended in others) - one.ended
                bounds.append(_Bound(one.ended, low, high, guess))
    return sorted(bounds, key=lambda one: one.time)


def _synchronizing(operations: Iterable[TracedCall]) -> dict[Key, TracedCall]:
    return {one.key: one for one in operations if one.verb in TOGETHER and one.key[1] and not one.error}


def _windows(bounds: Sequence[_Bound]) -> list[_Bound]:
    """Return one bound for each window of the run: a clock may drift from one to the next."""
    count = max(1, min(_WINDOWS, len(bounds) // _LEAST))
    edges = [len(bounds) * part // count for part in range(count + 1)]
    windows = []
    for start, stop in pairwise(edges):
        some = bounds[start:stop]
        windows.append(
            _Bound(
                int(median(one.time for one in some)),
                max(one.low for one in some),
                min(one.high for one in some),
                int(median(one.guess for one in some)),
            )
        )
    return windows
