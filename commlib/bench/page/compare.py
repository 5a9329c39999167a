"""Comparison of two runs: of each case that both have, which is faster, and whether that is more than noise."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from commlib.bench.page.runs import Entry, Run

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
class Comparison:
    """Two runs. mean: the geometric mean of the ratios. alone: how many cases only one of them has."""

    before: str
    after: str
    pairs: list[Pair]
    mean: float | None
    alone: tuple[int, int]

    def count(self, verdict: str) -> int:
        """Return how many pairs are so."""
        return sum(pair.verdict == verdict for pair in self.pairs)


def compare(before: Run, after: Run) -> Comparison:
    """Return what both have measured, beside each other, in the order of the first run."""
    others = {entry.case.name: entry for entry in after.entries}
    both = [(entry, others[entry.case.name]) for entry in before.entries if entry.case.name in others]
    pairs = [Pair(one, other, one.time() / other.time(), verdict(one, other)) for one, other in both]
    mean = statistics.geometric_mean(pair.ratio for pair in pairs) if pairs else None
    alone = len(before.entries) - len(pairs), len(after.entries) - len(pairs)
    return Comparison(before.name, after.name, pairs, mean, alone)


def verdict(before: Entry, after: Entry) -> str:
    """Return how the second entry is beside the first: they differ if the middle 80 % of their rounds lie apart."""
    if any(len(next(iter(entry.seconds.values()))) < FEWEST for entry in (before, after)):
        return "unknown"
    (low, high), (other_low, other_high) = before.range(), after.range()
    ratio = before.time() / after.time()
    if other_high < low and ratio > 1 + LEAST:
        return "better"
    if other_low > high and ratio < 1 / (1 + LEAST):
        return "worse"
    return "same"
