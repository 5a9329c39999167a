"""Comparison of two runs: of each case that both have, which is faster, and whether that is more than noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commlib.bench.page.runs import Entry, Run, middle
from commlib.bench.rows import OURS

FEWEST = 3  # rounds from which there is a noise to speak of
LEAST = 0.03  # a smaller difference is of no interest, however sure it is


@dataclass(frozen=True, slots=True)
class Pair:
    """One case of two runs. ratio: the first one's time / the second one's: above 1 the second is faster.

    verdict: "better" (the second), "worse", "same", or "unknown" for too few rounds.
    """

    before: Entry
    after: Entry
    ratio: float
    verdict: str


@dataclass(frozen=True, slots=True)
class StepPair:
    """One step of training of two runs, as their lines say it. ratio, verdict: as of a Pair."""

    before: dict[str, Any]
    after: dict[str, Any]
    ratio: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs. mean: the geometric mean of the ratios. alone: how many cases only one of them has."""

    before: str
    after: str
    pairs: list[Pair]
    steps: list[StepPair]
    mean: float | None
    alone: tuple[int, int]

    def count(self, verdict: str) -> int:
        """Return how many pairs are so."""
        return sum(pair.verdict == verdict for pair in self.pairs)


def compare(before: Run, after: Run) -> Comparison:
    """Return what both have measured, beside each other, in the order of the first run."""
    others = {entry.case.name: entry for entry in after.entries}
    both = [(entry, others[entry.case.name]) for entry in before.entries if entry.case.name in others]
    pairs = [
        Pair(one, other, one.time() / other.time(), verdict(one.seconds[OURS], other.seconds[OURS]))
        for one, other in both
    ]
    steps = {line["key"]: line for line in after.steps}
    trained = [
        StepPair(line, other, line["step"] / other["step"], verdict(line["seconds"][OURS], other["seconds"][OURS]))
        for line in before.steps
        if (other := steps.get(line["key"])) is not None
    ]
    mean = statistics.geometric_mean(pair.ratio for pair in pairs) if pairs else None
    alone = len(before.entries) - len(pairs), len(after.entries) - len(pairs)
    return Comparison(before.name, after.name, pairs, trained, mean, alone)


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """Return how the second one's rounds are beside the first one's: they differ if the middle 80 % lie apart."""
    if min(len(before), len(after)) < FEWEST:
        return "unknown"
    (low, high), (other_low, other_high) = middle(before), middle(after)
    ratio = statistics.median(before) / statistics.median(after)
    if other_high < low and ratio > 1 + LEAST:
        return "better"
    if other_low > high and ratio < 1 / (1 + LEAST):
        return "worse"
    return "same"
