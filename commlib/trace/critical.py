"""Critical path: what a step would be shorter by, if it took no time. Found backwards, from who ends it last.

A rank computes until it stands still; what it stands still for ends when the last rank has come and data has moved; so
the path goes on there, with what that rank did before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commlib.trace.meetings import Meeting
from commlib.trace.operations import Key
from commlib.trace.standing import Stand

COMPUTE = "computes"

_MOST = 100_000  # segments, should a trace be so broken that the way back does not end


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the path: what `rank` did. Units: ns."""

    rank: int
    what: str
    began: int
    ended: int


class Paths:
    """Finds critical paths. stood: when each rank's thread stood still."""

    def __init__(self, stood: Mapping[int, Sequence[Stand]], met: Iterable[Meeting]) -> None:
        self._stood = stood
        self._ends = {rank: [one.ended for one in stands] for rank, stands in stood.items()}
        self._met = {meeting.key: meeting for meeting in met}
        before: dict[tuple[int, str], list[tuple[int, Key]]] = defaultdict(list)
        for meeting in self._met.values():
            for rank, part in meeting.parts.items():
                before[rank, meeting.key[0]].append((part.ended, meeting.key))
        self._before = {place: sorted(ends) for place, ends in before.items()}

    def back(self, rank: int, end: int, start: int) -> list[Segment]:
        """Return the path that ends at `end` on `rank` and begins at `start`, the first segment first."""
        found: list[Segment] = []
        now = end
        while now > start and len(found) < _MOST:
            stand = self._standing(rank, now)
            if stand is None or stand.ended <= start:
                found.append(Segment(rank, COMPUTE, start, now))
                break
            if stand.ended < now:
                found.append(Segment(rank, COMPUTE, stand.ended, now))
                now = stand.ended
            before = rank, now
            rank, now = self._through(rank, now, stand, start, found)
            if (rank, now) == before:  # clocks that are a little apart: what it stood still for began no earlier
                now = max(stand.began, start)
                found.append(Segment(rank, stand.what, now, before[1]))
        return [one for one in reversed(found) if one.ended > one.began]

    def _standing(self, rank: int, now: int) -> Stand | None:
        """Return the last time before `now` that the thread stood still."""
        stands = self._stood.get(rank, ())
        at = bisect_left(self._ends.get(rank, []), now)
        if at < len(stands) and stands[at].began < now:
            one = stands[at]
            return Stand(one.began, now, one.key, one.what)
        return stands[at - 1] if at else None

    def _through(self, rank: int, now: int, stand: Stand, start: int, found: list[Segment]) -> tuple[int, int]:
        """Go back through what is waited for; return where the path goes on."""
        meeting, what = self._met.get(stand.key), stand.what
        while meeting is not None and rank in meeting.parts and len(found) < _MOST:
            last = meeting.last(rank)
            part = meeting.parts[last]
            came = min(max(part.arrived, start), now)
            found.append(Segment(rank, what, came, now))
            rank, now = last, came
            earlier = self._queued_behind(rank, part.launched, now, meeting)
            if earlier is None:
                if part.launched < now and not part.exposed:  # it was launched, and its turn came later
                    launched = max(part.launched, start)
                    found.append(Segment(rank, what, launched, now))
                    now = launched
                return rank, now
            meeting, what = earlier, earlier.what
        began = max(stand.began, start)
        if began < now:
            found.append(Segment(rank, what, began, now))
        return rank, min(now, began)

    def _queued_behind(self, rank: int, launched: int, now: int, meeting: Meeting) -> Meeting | None:
        """Return the operation of the same group that had to end first: between the launch and the turn of this one."""
        ends = self._before.get((rank, meeting.key[0]), [])
        at = bisect_left(ends, (now + 1, meeting.key)) - 1
        while at >= 0 and ends[at][1] == meeting.key:
            at -= 1
        if at < 0 or ends[at][0] <= launched or ends[at][0] > now:
            return None
        return self._met[ends[at][1]]
