"""Meetings: the same operation on all ranks, and who waits for whom in it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commlib.trace.operations import NO_KEY, Key, Operation, Span, Story

TOGETHER = frozenset((
    "all_reduce", "all_gather", "all_gather_v", "all_gather_object", "reduce_scatter", "reduce_scatter_v",
    "all_to_all", "all_to_all_v", "barrier", "split", "empty", "compressed",
    "allreduce", "allgather", "alltoall", "reducescatter", "grouped_allreduce", "compressed_allreduce",
))  # fmt: skip
"""Verbs in which nobody has the result before all have come; the second row are Horovod's."""

FROM_ROOT = frozenset(("broadcast", "broadcast_object", "scatter"))
TO_ROOT = frozenset(("reduce", "gather"))

_ROOT = re.compile(r"\broot=(\d+)")


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank did in a meeting: from when it was there, launched or not, until it was done. Units: ns.

    launched: when this rank's program asked for it. exposed: its thread stood still from `arrived` on. row: of its
    timeline.
    """

    launched: int
    arrived: int
    ended: int
    exposed: bool
    row: int = 0


@dataclass(frozen=True, slots=True)
class Meeting:
    """One operation. waits: for which ranks each rank waits; of the ranks that left a timeline."""

    key: Key
    what: str
    nbytes: int
    parts: Mapping[int, Part]
    waits: Mapping[int, frozenset[int]]

    def last(self, rank: int) -> int:
        """Return the last rank to come of those that `rank` waits for, or itself if it came after them."""
        others = self.waits.get(rank, frozenset())
        return max((rank, *others), key=lambda one: (self.parts[one].arrived, one == rank))


def meetings(stories: Sequence[Story]) -> list[Meeting]:
    """Return the collectives of which two ranks tell, and the messages of pipelines, in the order of their ends."""
    found = [*_collectives(stories), *_messages(stories)]
    return sorted(found, key=lambda one: max(part.ended for part in one.parts.values()))


def _collectives(stories: Iterable[Story]) -> Iterable[Meeting]:
    alike: defaultdict[Key, dict[int, Operation]] = defaultdict(dict)
    for story in stories:
        for one in story.operations:
            if one.key != NO_KEY and one.key[1] and not one.error:
                alike[one.key][story.rank] = one
    for key, ranks in alike.items():
        if len(ranks) < 2:
            continue
        one = next(iter(ranks.values()))
        parts = {rank: Part(op.queued, op.arrived, op.ended, op.exposed, op.row) for rank, op in ranks.items()}
        yield Meeting(key, one.verb, one.nbytes, parts, _waits(one, frozenset(ranks)))


def _waits(one: Operation, ranks: frozenset[int]) -> dict[int, frozenset[int]]:
    if one.verb in TOGETHER:
        return {rank: ranks - {rank} for rank in ranks}
    told = _ROOT.search(one.text)
    root = -1 if told is None or one.key[0] != "world" else int(told[1])  # elsewhere it is not the rank of a timeline
    if root not in ranks:
        return {}
    if one.verb in FROM_ROOT:
        return {rank: frozenset((root,)) for rank in ranks - {root}}
    return {root: ranks - {root}} if one.verb in TO_ROOT else {}


def _messages(stories: Iterable[Story]) -> Iterable[Meeting]:
    """Of pipelines: the n-th message of a microbatch between two stages is the same for both of its ends."""
    sent: dict[tuple[str, int], tuple[int, Span]] = {}
    received: list[tuple[tuple[str, int], int, Span]] = []
    for story in stories:
        counts: defaultdict[str, int] = defaultdict(int)
        for span in story.of("pipeline"):
            kind = str(span.facts.get("kind", ""))
            ends = span.facts.get("stage"), span.facts.get("peer")
            if kind.startswith("RECV"):
                ends = ends[::-1]
            elif not kind.startswith("SEND"):
                continue
            text = f"{span.facts.get('calls')} {kind[-1]}{span.facts.get('microbatch')} {ends[0]}>{ends[1]}"
            counts[kind + text] += 1
            key = text, counts[kind + text]
            if kind.startswith("SEND"):
                sent[key] = story.rank, span
            else:
                received.append((key, story.rank, span))
    for key, rank, span in received:
        if key in sent and sent[key][0] != rank:
            peer, sending = sent[key]
            parts = {
                peer: Part(sending.began, sending.began, sending.ended, exposed=True, row=sending.row),
                rank: Part(span.began, span.began, span.ended, exposed=True, row=span.row),
            }
            yield Meeting(key, "message of a pipeline", -1, parts, {rank: frozenset((peer,))})
