"""Idle: the times when a rank's thread was idle in communication, and the late ranks that caused them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commlib.trace.intervals import Interval, common, length, union
from commlib.trace.matched_collectives import MatchedCall
from commlib.trace.operations import Key, RankActivity

LATE = 20_000
"""ns: a rank that arrives within this time after the others is not late. Wake-ups of ranks differ by this much."""


@dataclass(frozen=True, slots=True)
class IdleTime:
    """A time in which a thread was idle. key: the awaited operation; ("", 0) if unknown."""

    began: int
    ended: int
    key: Key
    what: str


def find_idle_times(story: RankActivity) -> list[IdleTime]:
    """Return the idle times of a rank's thread, in order. A wait within a wait is part of the outer one."""
    result = [IdleTime(one.began, one.ended, one.key, one.verb) for one in story.operations if one.exposed]
    result += [IdleTime(span.began, span.ended, span.key, span.name) for span in story.of("wait")]
    counts: dict[str, int] = {}
    for span in story.of("pipeline"):
        kind = str(span.facts.get("kind", ""))
        if kind.startswith("RECV"):
            text = f"{span.facts.get('calls')} {kind[-1]}{span.facts.get('microbatch')} "
            text += f"{span.facts.get('peer')}>{span.facts.get('stage')}"
            counts[text] = counts.get(text, 0) + 1
            result.append(IdleTime(span.began, span.ended, (text, counts[text]), "message of a pipeline"))
    outer: list[IdleTime] = []
    for one in sorted(result, key=lambda one_time: (one_time.began, -one_time.ended)):
        if not outer or one.began >= outer[-1].ended:
            outer.append(one)
    return outer


def find_lost_time(
    rank: int, standing: Sequence[IdleTime], matched: Sequence[MatchedCall]
) -> tuple[Mapping[int, list[Interval]], dict[int, int]]:
    """Return the times when a rank was idle because another had not arrived, by the late rank; and how often for each.

    Time in which the rank worked while the operation ran in the background is not lost.
    """
    still = union((one.began, one.ended) for one in standing)
    begins, ends = [began for began, _ in still], [ended for _, ended in still]
    pieces: dict[int, list[Interval]] = {}
    often: dict[int, int] = {}
    for call in matched:
        last = call.last(rank) if rank in call.parts else rank
        if last == rank:
            continue
        part, late = call.parts[rank], call.parts[last].arrived
        until = min(late, part.ended)
        near = still[
            bisect_right(ends, part.arrived) : bisect_left(begins, until)
        ]  # scanning all of it would take hours
        waiting = common(near, union([(part.arrived, until)]))
        if length(waiting) >= LATE:
            pieces.setdefault(last, []).extend(waiting)
            often[last] = often.get(last, 0) + 1
    return {last: union(intervals) for last, intervals in pieces.items()}, often
