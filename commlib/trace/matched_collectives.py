"""Matched collectives: join the same operation of all ranks, and find the ranks that wait for each other in it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commlib.trace.operations import NO_KEY, Key, RankActivity, TracedCall, TracedSpan

TOGETHER = frozenset((
    "all_reduce", "all_gather", "all_gather_v", "all_gather_object", "reduce_scatter", "reduce_scatter_v",
    "all_to_all", "all_to_all_v", "barrier", "split", "empty", "compressed",
    "allreduce", "allgather", "alltoall", "reducescatter", "grouped_allreduce", "compressed_allreduce",
))  # fmt: skip
"""Verbs in which no rank has the result before all ranks have arrived; the last row has Horovod's names."""

FROM_ROOT = frozenset(("broadcast", "broadcast_object", "scatter"))
TO_ROOT = frozenset(("reduce", "gather"))

_ROOT = re.compile(r"\broot=(\d+)")


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of one rank in an operation, from its arrival to its end. Units: ns.

    launched: when this rank's program launched it. exposed: its thread was idle from `arrived` on. row: in its
    timeline.
    """

    launched: int
    arrived: int
    ended: int
    exposed: bool
    row: int = 0


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """One operation. waits: for each rank, the ranks that it waits for; only ranks with a timeline."""

    key: Key
    what: str
    nbytes: int
    parts: Mapping[int, RankPart]
    waits: Mapping[int, frozenset[int]]

    def last(self, rank: int) -> int:
        """Return the last to arrive of the ranks that `rank` waits for, or `rank` if it arrived after them."""
        others = self.waits.get(rank, frozenset())
        return max((rank, *others), key=lambda one: (self.parts[one].arrived, one == rank))


def match_calls(stories: Sequence[RankActivity]) -> list[MatchedCall]:
    """Return the collectives recorded by two ranks or more, and the messages of pipelines, ordered by their ends."""
    matched = [*_collectives(stories), *_messages(stories)]
    return sorted(matched, key=lambda one: max(part.ended for part in one.parts.values()))


def _collectives(stories: Iterable[RankActivity]) -> Iterable[MatchedCall]:
    by_key: defaultdict[Key, dict[int, TracedCall]] = defaultdict(dict)
    for story in stories:
        for one in story.operations:
            if one.key != NO_KEY and one.key[1] and not one.error:
                by_key[one.key][story.rank] = one
    for key, ranks in by_key.items():
        if len(ranks) < 2:
            continue
        one = next(iter(ranks.values()))
        parts = {rank: RankPart(op.queued, op.arrived, op.ended, op.exposed, op.row) for rank, op in ranks.items()}
        yield MatchedCall(key, one.verb, one.nbytes, parts, _waits(one, frozenset(ranks)))


def _waits(one: TracedCall, ranks: frozenset[int]) -> dict[int, frozenset[int]]:
    if one.verb in TOGETHER:
        return {rank: ranks - {rank} for rank in ranks}
    root_text = _ROOT.search(one.text)
    root = -1 if root_text is None or one.key[0] != "world" else int(root_text[1])  # else not a world rank
    if root not in ranks:
        return {}
    if one.verb in FROM_ROOT:
        return {rank: frozenset((root,)) for rank in ranks - {root}}
    return {root: ranks - {root}} if one.verb in TO_ROOT else {}


def _messages(stories: Iterable[RankActivity]) -> Iterable[MatchedCall]:
    """Match the messages of pipelines: the n-th message of a microbatch between two stages is the same at both ends."""
    sends: dict[tuple[str, int], tuple[int, TracedSpan]] = {}
    received: list[tuple[tuple[str, int], int, TracedSpan]] = []
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
                sends[key] = story.rank, span
            else:
                received.append((key, story.rank, span))
    for key, rank, span in received:
        if key in sends and sends[key][0] != rank:
            peer, sending = sends[key]
            parts = {
                peer: RankPart(sending.began, sending.began, sending.ended, exposed=True, row=sending.row),
                rank: RankPart(span.began, span.began, span.ended, exposed=True, row=span.row),
            }
            yield MatchedCall(key, "message of a pipeline", -1, parts, {rank: frozenset((peer,))})
