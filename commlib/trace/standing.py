"""Standing: when the thread of a rank's program stood still for communication, and for whom."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from commlib.trace.intervals import Piece, common, length, union
from commlib.trace.meetings import Meeting
from commlib.trace.operations import Key, Story

LATE = 20_000
"""ns: who comes less than this after the others has kept nobody waiting. Ranks wake up so far apart."""


@dataclass(frozen=True, slots=True)
class Stand:
    """The thread stood still. key: what for; ("", 0) if that is not known."""

    began: int
    ended: int
    key: Key
    what: str


def stands(story: Story) -> list[Stand]:
    """Return when a rank's thread stood still, in order: a wait within a wait is a part of it."""
    found = [Stand(one.began, one.ended, one.key, one.verb) for one in story.operations if one.exposed]
    found += [Stand(span.began, span.ended, span.key, span.name) for span in story.of("wait")]
    counts: dict[str, int] = {}
    for span in story.of("pipeline"):
        kind = str(span.facts.get("kind", ""))
        if kind.startswith("RECV"):
            text = f"{span.facts.get('calls')} {kind[-1]}{span.facts.get('microbatch')} "
            text += f"{span.facts.get('peer')}>{span.facts.get('stage')}"
            counts[text] = counts.get(text, 0) + 1
            found.append(Stand(span.began, span.ended, (text, counts[text]), "message of a pipeline"))
    outer: list[Stand] = []
    for one in sorted(found, key=lambda stand: (stand.began, -stand.ended)):
        if not outer or one.began >= outer[-1].ended:
            outer.append(one)
    return outer


def lost(
    rank: int, standing: Sequence[Stand], met: Sequence[Meeting]
) -> tuple[Mapping[int, list[Piece]], dict[int, int]]:
    """Return when a rank stood still because another one had not come, by that one; and how often for each.

    Of what it did meanwhile in the background, nothing is lost.
    """
    still = union((one.began, one.ended) for one in standing)
    begins, ends = [began for began, _ in still], [ended for _, ended in still]
    pieces: dict[int, list[Piece]] = {}
    often: dict[int, int] = {}
    for meeting in met:
        last = meeting.last(rank) if rank in meeting.parts else rank
        if last == rank:
            continue
        part, late = meeting.parts[rank], meeting.parts[last].arrived
        until = min(late, part.ended)
        near = still[bisect_right(ends, part.arrived) : bisect_left(begins, until)]  # all of it would take hours
        waited = common(near, union([(part.arrived, until)]))
        if length(waited) >= LATE:
            pieces.setdefault(last, []).extend(waited)
            often[last] = often.get(last, 0) + 1
    return {last: union(found) for last, found in pieces.items()}, often
