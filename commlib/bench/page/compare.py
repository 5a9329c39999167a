"""Comparison of two runs: for each common case, the faster run, and whether the difference exceeds the noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commlib.bench.page.runs import BenchRun, CaseEntry, middle_range
from commlib.bench.rows import OURS

FEWEST = 3  # rounds needed to estimate the noise
LEAST = 0.03  # smaller differences do not count, even if they exceed the noise


@dataclass(frozen=True, slots=True)
class Pair:
    """One case of two runs. ratio: the first run's time / the second run's: above 1 the second is faster.

    verdict: "better" (the second), "worse", "same", or "unknown" for too few rounds.
    """

    before: CaseEntry
    after: CaseEntry
    ratio: float
    verdict: str


@dataclass(frozen=True, slots=True)
class StepPair:
    """One training step of two runs, as lines of their files. ratio, verdict: as for a Pair."""

    before: dict[str, Any]
    after: dict[str, Any]
    ratio: float
    verdict: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs. mean: the geometric mean of the ratios, but for cases of too few rounds.

    alone: the number of cases that only one of them has.
    """

    before: str
    after: str
    pairs: list[Pair]
    steps: list[StepPair]
    mean: float | None
    alone: tuple[int, int]

    def count(self, verdict: str) -> int:
        """Return the number of pairs with this verdict."""
        return sum(pair.verdict == verdict for pair in self.pairs)


def compare(before: BenchRun, after: BenchRun) -> Comparison:
    """Return the common cases of both runs, in the order of the first."""
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
    counted = [pair.ratio for pair in pairs if pair.verdict != "unknown"]
    mean = statistics.geometric_mean(counted) if counted else None
    alone = len(before.entries) - len(pairs), len(after.entries) - len(pairs)
    return Comparison(before.name, after.name, pairs, trained, mean, alone)


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """Return the second run's verdict: they differ if the middle 80 % of their rounds do not overlap."""
    if min(len(before), len(after)) < FEWEST:
        return "unknown"
    (low, high), (other_low, other_high) = middle_range(before), middle_range(after)
    ratio = statistics.median(before) / statistics.median(after)
    if other_high < low and ratio > 1 + LEAST:
        return "better"
    if other_low > high and ratio < 1 / (1 + LEAST):
        return "worse"
    return "same"
