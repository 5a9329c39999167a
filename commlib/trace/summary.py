"""Summary: the waits between ranks, the overlap of communication, the critical path of a step, and advice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from commlib.trace.advice import advise
from commlib.trace.critical import CriticalPaths
from commlib.trace.idle import IdleTime, find_idle_times, find_lost_time
from commlib.trace.intervals import Interval, common, length, union
from commlib.trace.matched_collectives import MatchedCall, match_calls
from commlib.trace.operations import RankActivity, TracedCall
from commlib.trace.steady import StepMarks, find_marks, find_steady_steps

_SMALL = 4096  # bytes


@dataclass(frozen=True, slots=True)
class RankFigures:
    """One rank's time. Units: seconds, except for counts.

    span: from its first to its last event. communication: with operations running, or messages in flight. exposed: the
    part of it with an idle thread; hidden: the rest. lost: idle because another rank had not arrived. moving: the rest
    of `exposed`. late_count: how often another rank lost time to this one; caused_wait: how much time all others lost
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
    late_count: int
    caused_wait: float
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
class LeftOut:
    """The part of a run that the advice leaves out. Units: seconds.

    start_up: until the end of step number `steps`, 0 if no steps are marked. after: from the end of the last step.
    small: subjects with too small a share of a step, with their shares.
    """

    steps: int
    start_up: float
    after: float
    small: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures from the timelines of some ranks.

    advice: for the steps after start-up.
    """

    ranks: tuple[RankFigures, ...]
    verbs: tuple[VerbFigures, ...]
    steps: StepFigures
    collectives: int
    advice: tuple[str, ...]
    left_out: LeftOut
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-compatible values."""
        return asdict(self)


def summarise(stories: Sequence[RankActivity], notes: Sequence[str] = ()) -> Summary:
    """Return the summary of the ranks' activities, all on one clock. notes: remarks about the files."""
    run = _analyse(stories)
    marks = find_marks(stories)
    verbs = _verbs([one for story in stories for one in story.operations])
    steps = _steps(run, marks)
    notes = list(notes)
    if len(stories) == 1:
        notes.append("the file of one rank only: pass the files of all ranks to see which ranks waited for which")
    steady = find_steady_steps(stories, marks)
    advice = advise(_figures(_analyse(steady.stories) if steady.first else run))
    left_out = LeftOut(max(0, steady.first - 1), steady.start_up / 1e9, steady.after / 1e9, tuple(advice.small))
    ranks = tuple(run.ranks)
    return Summary(ranks, tuple(verbs), steps, len(run.matched), tuple(advice.texts), left_out, tuple(notes))


@dataclass(frozen=True, slots=True)
class _Analysis:
    """The activities of ranks in some time, and the results of their analysis."""

    stories: Sequence[RankActivity]
    matched: list[MatchedCall]
    idle_times: dict[int, list[IdleTime]]
    ranks: list[RankFigures]


def _analyse(stories: Sequence[RankActivity]) -> _Analysis:
    matched = match_calls(stories)
    idle_times = {story.rank: find_idle_times(story) for story in stories}
    lost_for = {story.rank: find_lost_time(story.rank, idle_times[story.rank], matched) for story in stories}
    return _Analysis(
        stories, matched, idle_times, [_rank(story, idle_times[story.rank], lost_for) for story in stories]
    )


def _seconds(pieces: Sequence[Interval]) -> float:
    return length(pieces) / 1e9


LostTimes = Mapping[int, tuple[Mapping[int, list[Interval]], dict[int, int]]]


def _rank(story: RankActivity, standing: Sequence[IdleTime], lost_for: LostTimes) -> RankFigures:
    busy = [(one.began, one.ended) for one in story.operations]
    still = union((one.began, one.ended) for one in standing)
    communication = union([*busy, *still])
    pieces, _ = lost_for[story.rank]
    waiting = union(piece for some in pieces.values() for piece in some)
    others = [lost for rank, lost in lost_for.items() if rank != story.rank]
    exposed, all_of_it, in_vain = _seconds(still), _seconds(communication), _seconds(waiting)
    return RankFigures(
        rank=story.rank,
        span=(story.end - story.start) / 1e9,
        communication=all_of_it,
        exposed=exposed,
        hidden=all_of_it - exposed,
        lost=in_vain,
        moving=exposed - in_vain,
        lost_for={last: _seconds(lost) for last, lost in sorted(pieces.items())},
        late_count=sum(often.get(story.rank, 0) for _, often in others),
        caused_wait=sum(_seconds(lost.get(story.rank, [])) for lost, _ in others),
        codec=_seconds(union((span.began, span.ended) for span in story.of("codec"))),
        packing=_seconds(union((span.began, span.ended) for span in story.of("pack"))),
    )


def _verbs(operations: Sequence[TracedCall]) -> list[VerbFigures]:
    calls: dict[str, list[TracedCall]] = defaultdict(list)
    for one in operations:
        calls[one.verb].append(one)
    figures = [
        VerbFigures(
            verb, len(some), sum(max(one.nbytes, 0) for one in some), sum(one.ended - one.began for one in some) / 1e9
        )
        for verb, some in calls.items()
    ]
    return sorted(figures, key=lambda verb: -verb.seconds)


def _steps(run: _Analysis, marks: StepMarks) -> StepFigures:
    stories, who, ends = run.stories, marks.by, marks.ends
    paths = CriticalPaths(run.idle_times, run.matched)
    if not ends:
        start = min(story.start for story in stories)
        last = max(stories, key=lambda story: story.end)
        begin, end, rank, typical, count = start, last.end, last.rank, 1, 1
        middle = end - begin
    else:
        limits, lengths = marks.limits, marks.lengths
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


def _moving(matched: Sequence[MatchedCall]) -> int:
    """Return how long ranks were in collectives after the last one had arrived, summed over all ranks."""
    return sum(
        max(0, part.ended - max(one.arrived for one in call.parts.values()))
        for call in matched
        for part in call.parts.values()
    )


def _idle_in_queue(operations: Sequence[TracedCall], still: Mapping[int, list[Interval]]) -> float:
    """Return the seconds in which threads were idle while operations had not begun, summed over all ranks."""
    queued: dict[int, list[Interval]] = defaultdict(list)
    for one in operations:
        queued[one.rank].append((one.queued, one.began))
    return sum(_seconds(common(still.get(rank, []), union(pieces))) for rank, pieces in queued.items())


def _figures(part: _Analysis) -> dict[str, float | int | str]:
    """Return the figures for the rules of `advice`. Names that end in "_of_step" are shares of all ranks' time."""
    stories, ranks, matched = part.stories, part.ranks, part.matched
    operations = [one for story in stories for one in story.operations]
    span = sum(rank.span for rank in ranks) or 1.0
    inside = sum(rank.communication for rank in ranks) or 1.0
    all_lost = sum(rank.lost for rank in ranks)
    worst = max(ranks, key=lambda rank: rank.caused_wait)
    total_wait = sum(rank.caused_wait for rank in ranks) or 1.0
    named = [one for one in operations if "by name" in one.key[0]]
    others = [one for one in operations if "by name" not in one.key[0]]
    stage_waits = [s for story in stories for s in story.of("pipeline") if str(s.facts.get("kind")).startswith("RECV")]
    still = {rank: union((one.began, one.ended) for one in idle) for rank, idle in part.idle_times.items()}
    small_moving = _moving([one for one in matched if 0 <= one.nbytes <= _SMALL])
    of_stages = [story for story in stories if story.of("pipeline")]
    figures: dict[str, float | int | str] = {
        "lost_share": all_lost / span,
        "worst": worst.rank,
        "worst_share": worst.caused_wait / total_wait,
        "moving_share": sum(rank.moving for rank in ranks) / span,
        "exposed_share": sum(rank.exposed for rank in ranks) / span,
        "small_share": small_moving / (_moving(matched) or 1),
        "small_of_step": min(small_moving / 1e9, sum(rank.moving for rank in ranks)) / span,
        "codec_share": sum(rank.codec for rank in ranks) / inside,
        "codec_of_step": sum(rank.codec for rank in ranks) / span,
        "queue_of_step": _idle_in_queue(others, still) / span,
        "agreeing_of_step": _idle_in_queue(named, still) / span,
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
