"""Steady steps: the part of a run for advice, without start-up and without the time after the last step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from commlib.trace.operations import RankActivity

SLOW = 2.0
"""A step at the beginning that takes this many times the median of all later ones belongs to the start-up."""


@dataclass(frozen=True, slots=True)
class StepMarks:
    """The ends of steps, in ns, by rank: the same number for each. by: "user", "pipeline", "gradients"; "" if none."""

    by: str
    ends: dict[int, list[int]]

    @property
    def limits(self) -> list[int]:
        """The end of each step on its last rank."""
        return [max(at) for at in zip(*self.ends.values(), strict=True)]

    @property
    def lengths(self) -> list[int]:
        """The length of each step but the first, whose beginning is unknown."""
        return [later - earlier for earlier, later in pairwise(self.limits)]


def find_marks(stories: Sequence[RankActivity]) -> StepMarks:
    """Return the marks of the most reliable source with at least two on each rank."""
    for by in ("user", "pipeline", "gradients"):
        ends = {
            story.rank: [span.ended for span in story.of("step") if span.facts.get("by") == by] for story in stories
        }
        least = min(map(len, ends.values()))
        if least >= 2:
            return StepMarks(by, {rank: at[:least] for rank, at in ends.items()})
    return StepMarks("", {})


@dataclass(frozen=True, slots=True)
class SteadySteps:
    """The activity of the ranks in the steps after start-up. Units: ns.

    first: the number of the first of these steps, from 1; 0 if no steps are marked, so that nothing is left out.
    start_up: the time before it. after: the time after the last step.
    """

    stories: tuple[RankActivity, ...]
    first: int = 0
    start_up: int = 0
    after: int = 0


def find_steady_steps(stories: Sequence[RankActivity], marks: StepMarks) -> SteadySteps:
    """Return the steps after start-up: after the first step, and after slow ones that follow it directly."""
    if not marks.ends:
        return SteadySteps(tuple(stories))
    lengths, slow = marks.lengths, 0
    while slow < len(lengths) // 2 and lengths[slow] > SLOW * statistics.median(lengths[slow + 1 :]):
        slow += 1
    parts = tuple(_cut(story, marks.ends[story.rank][slow], marks.ends[story.rank][-1]) for story in stories)
    start_up = marks.limits[slow] - min(story.start for story in stories)
    after = max(0, max(story.end for story in stories) - marks.limits[-1])
    return SteadySteps(parts, slow + 2, start_up, after)


def _cut(story: RankActivity, start: int, end: int) -> RankActivity:
    """Return what began within a time. It counts as a whole, even if it ended later."""
    operations = tuple(one for one in story.operations if start <= one.began < end)
    spans = tuple(one for one in story.spans if start <= one.began < end)
    return replace(story, start=start, end=end, operations=operations, spans=spans)
