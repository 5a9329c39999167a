"""Summary: the waits between ranks, the overlap of communication, the critical path of a step, and advice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from commlib.trace.advice import advise
from commlib.trace.critical import CriticalPaths
from commlib.trace.idle import IdleTime, find_idle_times, find_lost_time
from commlib.trace.intervals import Interval, length, union
from commlib.trace.matched_collectives import MatchedCall, match_calls
from commlib.trace.operations import RankActivity, TracedCall

_SMALL = 4096  # bytes


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank's time. Units: seconds, except for counts.

    span: from its first to its last event. communication: with operations running, or messages in flight. exposed: the
    part of it with an idle thread; hidden: the rest. lost: idle because another rank had not arrived. moving: the rest
    of `exposed`. came_last: how often another rank lost time to this one; kept_waiting: how much time all others lost
    to it. codec, packing: encoding and decoding; packing for fusion.
    """

    rank: int
    span: float
    communication: float
    exposed: float
    hidden: float
    lost: float
    moving: float
    lost_for: dict[int, float]
    came_last: int
    kept_waiting: float
    codec: float
    packing: float


@dataclass(frozen=True, slots=True)
class VerbFigures:
    """All calls of a verb, on all ranks. bytes: of each rank's arrays. seconds: from the turn of a call to its end."""

    verb: str
    calls: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PathPart:
    """A part of the critical path: `what` a rank did, and for how long, in seconds and as a share of the path."""

    rank: int
    what: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Training steps. marked_by: the source of the step marks: "user", "pipeline", "gradients"; "" if there are none.

    Without marks the whole run counts as one step. typical: the number of the step of median length, from 1. path: the
    composition of its critical path, the largest part first.
    """

    marked_by: str
    count: int
    seconds: float
    typical: int
    path: tuple[PathPart, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures from the timelines of some ranks."""

    ranks: tuple[RankFigures, ...]
    verbs: tuple[VerbFigures, ...]
    steps: StepFigures
    collectives: int
    advice: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-compatible values."""
        return asdict(self)


def summarise(stories: Sequence[RankActivity], notes: Sequence[str] = ()) -> Summary:
    """Return the summary of the ranks' activities, all on one clock. notes: remarks about the files."""
    met = match_calls(stories)
    stood = {story.rank: find_idle_times(story) for story in stories}
    lost_for = {story.rank: find_lost_time(story.rank, stood[story.rank], met) for story in stories}
    ranks = [_rank(story, stood[story.rank], lost_for) for story in stories]
    verbs = _verbs([one for story in stories for one in story.operations])
    steps = _steps(stories, stood, met)
    notes = list(notes)
    if len(stories) == 1:
        notes.append("the file of one rank only: pass the files of all ranks to see which ranks waited for which")
    figures = _figures(stories, ranks, met)
    return Summary(tuple(ranks), tuple(verbs), steps, len(met), tuple(advise(figures)), tuple(notes))


def _seconds(pieces: Sequence[Interval]) -> float:
    return length(pieces) / 1e9


LostTimes = Mapping[int, tuple[Mapping[int, list[Interval]], dict[int, int]]]


def _rank(story: RankActivity, standing: Sequence[IdleTime], lost_for: LostTimes) -> RankFigures:
    busy = [(one.began, one.ended) for one in story.operations]
    still = union((one.began, one.ended) for one in standing)
    communication = union([*busy, *still])
    pieces, _ = lost_for[story.rank]
    waited = union(piece for some in pieces.values() for piece in some)
    others = [found for rank, found in lost_for.items() if rank != story.rank]
    exposed, all_of_it, in_vain = _seconds(still), _seconds(communication), _seconds(waited)
    return RankFigures(
        rank=story.rank,
        span=(story.end - story.start) / 1e9,
        communication=all_of_it,
        exposed=exposed,
        hidden=all_of_it - exposed,
        lost=in_vain,
        moving=exposed - in_vain,
        lost_for={last: _seconds(found) for last, found in sorted(pieces.items())},
        came_last=sum(often.get(story.rank, 0) for _, often in others),
        kept_waiting=sum(_seconds(found.get(story.rank, [])) for found, _ in others),
        codec=_seconds(union((span.began, span.ended) for span in story.of("codec"))),
        packing=_seconds(union((span.began, span.ended) for span in story.of("pack"))),
    )


def _verbs(operations: Sequence[TracedCall]) -> list[VerbFigures]:
    found: dict[str, list[TracedCall]] = defaultdict(list)
    for one in operations:
        found[one.verb].append(one)
    figures = [
        VerbFigures(
            verb, len(some), sum(max(one.nbytes, 0) for one in some), sum(one.ended - one.began for one in some) / 1e9
        )
        for verb, some in found.items()
    ]
    return sorted(figures, key=lambda verb: -verb.seconds)


def _steps(
    stories: Sequence[RankActivity], stood: Mapping[int, Sequence[IdleTime]], met: Sequence[MatchedCall]
) -> StepFigures:
    who, ends = _marks(stories)
    paths = CriticalPaths(stood, met)
    if ends:
        limits = [max(at) for at in zip(*ends.values(), strict=True)]
        lengths = [later - earlier for earlier, later in pairwise(limits)]
    if not ends or not lengths:
        who, start = "", min(story.start for story in stories)
        last = max(stories, key=lambda story: story.end)
        begin, end, rank, typical, count = start, last.end, last.rank, 1, 1
        middle = end - begin
    else:
        middle = sorted(lengths)[len(lengths) // 2]
        place = lengths.index(middle)
        begin, end, typical, count = limits[place], limits[place + 1], place + 2, len(limits)
        rank = max(ends, key=lambda one: ends[one][place + 1])
    shares: dict[tuple[int, str], int] = defaultdict(int)
    for segment in paths.back(rank, end, begin):
        shares[segment.rank, segment.what] += segment.ended - segment.began
    whole = max(1, end - begin)
    parts = sorted(shares.items(), key=lambda item: -item[1])
    path = tuple(PathPart(rank, what, took / 1e9, took / whole) for (rank, what), took in parts)
    return StepFigures(who, count, middle / 1e9, typical, path)


def _marks(stories: Sequence[RankActivity]) -> tuple[str, dict[int, list[int]]]:
    """Return the source of the step marks, and their times by rank: the same number for each, the least of all."""
    for who in ("user", "pipeline", "gradients"):
        ends = {
            story.rank: [span.ended for span in story.of("step") if span.facts.get("by") == who] for story in stories
        }
        least = min(map(len, ends.values()))
        if least >= 2:
            return who, {rank: at[:least] for rank, at in ends.items()}
    return "", {}


def _moving(met: Sequence[MatchedCall]) -> int:
    """Return how long ranks were in collectives after the last one had arrived, summed over all ranks."""
    return sum(
        max(0, part.ended - max(one.arrived for one in meeting.parts.values()))
        for meeting in met
        for part in meeting.parts.values()
    )


def _figures(
    stories: Sequence[RankActivity], ranks: Sequence[RankFigures], met: Sequence[MatchedCall]
) -> dict[str, float | int | str]:
    """Return the figures for the rules of `advice`."""
    operations = [one for story in stories for one in story.operations]
    span = sum(rank.span for rank in ranks) or 1.0
    inside = sum(rank.communication for rank in ranks) or 1.0
    all_lost = sum(rank.lost for rank in ranks)
    worst = max(ranks, key=lambda rank: rank.kept_waiting)
    kept = sum(rank.kept_waiting for rank in ranks) or 1.0
    named = [one for one in operations if "by name" in one.key[0]]
    others = [one for one in operations if "by name" not in one.key[0]]
    stage_waits = [s for story in stories for s in story.of("pipeline") if str(s.facts.get("kind")).startswith("RECV")]
    of_stages = [story for story in stories if story.of("pipeline")]
    figures: dict[str, float | int | str] = {
        "lost_share": all_lost / span,
        "lost_share_is_small": float(all_lost / span < 0.05),
        "worst": worst.rank,
        "worst_share": worst.kept_waiting / kept,
        "moving_share": sum(rank.moving for rank in ranks) / span,
        "exposed_share_is_small": float(sum(rank.exposed for rank in ranks) / span < 0.05),
        "small_share": _moving([one for one in met if 0 <= one.nbytes <= _SMALL]) / (_moving(met) or 1),
        "codec_share": sum(rank.codec for rank in ranks) / inside,
        "queue_share": sum(one.began - one.queued for one in others)
        / (sum(one.ended - one.queued for one in others) or 1),
        "agreeing_share": sum(one.began - one.queued for one in named)
        / (sum(one.ended - one.queued for one in named) or 1),
        "stages_share": sum(s.ended - s.began for s in stage_waits)
        / (sum(story.end - story.start for story in of_stages) or 1),
    }
    loads: dict[str, list[int]] = {}
    for story in stories:
        for layer, load in story.loads.items():
            before = loads.setdefault(layer, [0] * len(load))
            before[:] = [one + other for one, other in zip(before, load, strict=False)]
    ratios = {layer: max(load) * len(load) / sum(load) for layer, load in loads.items() if sum(load)}
    if ratios:
        busiest = max(ratios, key=lambda layer: ratios[layer])
        figures |= {"busiest": busiest, "imbalance": ratios[busiest]}
    return figures
