"""Critical path: the chain of computation and waits that determines the length of a step, found backwards from its end.

A rank computes until it waits for communication. The wait ends when the last rank has arrived and the data has moved.
The path therefore continues on that last rank, with its preceding work.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commlib.trace.idle import IdleTime
from commlib.trace.matched_collectives import MatchedCall
from commlib.trace.operations import Key

COMPUTE = "computes"

_MOST = 100_000  # segments, in case a broken trace makes the search endless


@dataclass(frozen=True, slots=True)
class PathSegment:
    """A piece of the path: the activity of `rank`. Units: ns."""

    rank: int
    what: str
    began: int
    ended: int


class CriticalPaths:
    """Finds critical paths. idle_times: the idle times of each rank's thread."""

    def __init__(self, idle_times: Mapping[int, Sequence[IdleTime]], matched: Iterable[MatchedCall]) -> None:
        self._idle_times = idle_times
        self._ends = {rank: [one.ended for one in times] for rank, times in idle_times.items()}
        self._matched = {call.key: call for call in matched}
        before: dict[tuple[int, str], list[tuple[int, Key]]] = defaultdict(list)
        for call in self._matched.values():
            for rank, part in call.parts.items():
                before[rank, call.key[0]].append((part.ended, call.key))
        self._before = {place: sorted(ends) for place, ends in before.items()}

    def back(self, rank: int, end: int, start: int) -> list[PathSegment]:
        """Return the path that ends at `end` on `rank` and begins at `start`, the first segment first."""
        segments: list[PathSegment] = []
        now = end
        while now > start and len(segments) < _MOST:
            idle = self._last_idle(rank, now)
            if idle is None or idle.ended <= start:
                segments.append(PathSegment(rank, COMPUTE, start, now))
                break
            if idle.ended < now:
                segments.append(PathSegment(rank, COMPUTE, idle.ended, now))
                now = idle.ended
            before = rank, now
            rank, now = self._walk_back(rank, now, idle, start, segments)
            if (rank, now) == before:  # clocks differ slightly: the awaited operation began no earlier
                now = max(idle.began, start)
                segments.append(PathSegment(rank, idle.what, now, before[1]))
        return [one for one in reversed(segments) if one.ended > one.began]

    def _last_idle(self, rank: int, now: int) -> IdleTime | None:
        """Return the last idle time that began before `now`, cut off at `now`."""
        times = self._idle_times.get(rank, ())
        at = bisect_left(self._ends.get(rank, []), now)
        if at < len(times) and times[at].began < now:
            one = times[at]
            return IdleTime(one.began, now, one.key, one.what)
        return times[at - 1] if at else None

    def _walk_back(
        self, rank: int, now: int, idle: IdleTime, start: int, segments: list[PathSegment]
    ) -> tuple[int, int]:
        """Walk back through the awaited operations; return the rank and time at which the path continues."""
        call, what = self._matched.get(idle.key), idle.what
        while call is not None and rank in call.parts and len(segments) < _MOST:
            last = call.last(rank)
            part = call.parts[last]
            arrival = min(max(part.arrived, start), now)
            segments.append(PathSegment(rank, what, arrival, now))
            rank, now = last, arrival
            earlier = self._find_blocker(rank, part.launched, now, call)
            if earlier is None:
                if part.launched < now and not part.exposed:  # it was launched before it had its turn
                    launched = max(part.launched, start)
                    segments.append(PathSegment(rank, what, launched, now))
                    now = launched
                return rank, now
            call, what = earlier, earlier.what
        began = max(idle.began, start)
        if began < now:
            segments.append(PathSegment(rank, what, began, now))
        return rank, min(now, began)

    def _find_blocker(self, rank: int, launched: int, now: int, call: MatchedCall) -> MatchedCall | None:
        """Return the operation of the same group that delayed this one: it ended between this launch and its turn."""
        ends = self._before.get((rank, call.key[0]), [])
        at = bisect_left(ends, (now + 1, call.key)) - 1
        while at >= 0 and ends[at][1] == call.key:
            at -= 1
        if at < 0 or ends[at][0] <= launched or ends[at][0] > now:
            return None
        return self._matched[ends[at][1]]
