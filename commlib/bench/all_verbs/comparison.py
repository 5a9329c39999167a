"""Comparison of two tables, cell by cell: commlib's time as a share of MPI's, and alone, against the noise of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.bench.all_verbs.cells import Cell, find_cells
from commlib.bench.all_verbs.text import head
from commlib.bench.options import BenchOptionsError

LEAST = 0.10  # a smaller difference is none
FEWEST = 5  # rounds that say something about noise
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Difference:
    """One cell of two tables. share, time: those after / before. verdict: see `judge`; "lost" without a figure after.

    slower: whether commlib's time is longer beyond the noise, whatever MPI's is.
    """

    before: Cell
    after: Cell
    share: float
    time: float
    verdict: str
    slower: bool

    @property
    def is_regression(self) -> bool:
        return self.verdict in ("slower", "lost")


@dataclass(frozen=True, slots=True)
class TableComparison:
    """The cells of both tables; and of one of them only."""

    differences: list[Difference]
    only_before: list[Cell]
    only_after: list[Cell]

    def of(self, verdict: str) -> list[Difference]:
        """Return the differences with this verdict."""
        return [one for one in self.differences if one.verdict == verdict]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> TableComparison:
    """Return the differences of two records. Raises BenchOptionsError if they have no cell in common."""
    first, second = ({cell.key: cell for cell in find_cells(record) if cell.is_measured} for record in (before, after))
    common = [key for key in first if key in second]
    if not common:
        raise BenchOptionsError(
            "the files have no cell in common: a cell is a verb, form, memory, size, number of ranks and MPI library"
        )
    return TableComparison(
        [_difference(first[key], second[key]) for key in common if first[key].ours],
        [cell for key, cell in first.items() if key not in second],
        [cell for key, cell in second.items() if not (key in first and first[key].ours)],
    )


def _difference(before: Cell, after: Cell) -> Difference:
    if not after.ours or after.wrong:
        return Difference(before, after, math.nan, math.nan, "lost", False)
    time = statistics.median(after.ours) / statistics.median(before.ours)
    slower = judge(before.ours, after.ours) == "slower"
    peer = before.best if before.best in after.peers else after.best
    if peer not in before.peers:
        return Difference(before, after, time, time, judge(before.ours, after.ours), slower)
    shares = [
        [ours / theirs for ours, theirs in zip(cell.ours, cell.peers[peer], strict=True)] for cell in (before, after)
    ]
    share = statistics.median(shares[1]) / statistics.median(shares[0])
    return Difference(before, after, share, time, judge(*shares), slower)


def judge(before: Sequence[float], after: Sequence[float]) -> str:
    """Return "slower" or "faster" for a difference of 10 % or more beyond the noise of both.

    Else "noisy" if the noise could hide such a difference, or "same". The noise is the interval that has the median
    of further rounds with a probability of about 95 %.
    """
    change = statistics.median(after) / statistics.median(before)
    is_less, is_more = change <= (1 + _ROUNDING) / (1 + LEAST), change >= (1 + LEAST) * (1 - _ROUNDING)
    if min(len(before), len(after)) < FEWEST:
        return "noisy"
    (low, high), (other_low, other_high) = median_interval(before), median_interval(after)
    if is_more and other_low > high:
        return "slower"
    if is_less and other_high < low:
        return "faster"
    widest = max(high / low, other_high / other_low)
    return "noisy" if is_more or is_less or widest > 1 + LEAST else "same"


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the interval of about 95 % for the median, from the order of the values."""
    ordered = sorted(values)
    low = max(0, math.floor((len(ordered) - 1) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[low], ordered[-1 - low]


def report(comparison: TableComparison, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the heads of both files, the cells with a verdict, and a summary."""
    for record in (before, after):
        yield from head(record["facts"])
    for verdict, meaning in (
        ("slower", f"regressed by {LEAST:.0%} or more"),
        ("lost", "regressed: no right result any more"),
        ("faster", f"faster by {LEAST:.0%} or more"),
        ("noisy", f"noisy: a difference of {LEAST:.0%} cannot be seen"),
    ):
        for one in comparison.of(verdict):
            yield f"{meaning}: {one.before.name}: {one.before.text()} -> {one.after.text()} us" + _factors(one)
    for one in comparison.differences:
        if one.slower and not one.is_regression:
            yield f"longer, but not as a share of MPI's time: {one.before.name}: time x {one.time:.2f}"
    for where, cells in (("first", comparison.only_before), ("second", comparison.only_after)):
        if cells:
            yield f"# only in the {where} file: {', '.join(cell.name for cell in cells[:5])}" + (
                f", and {len(cells) - 5} more cells" if len(cells) > 5 else ""
            )
    counts = {verdict: len(comparison.of(verdict)) for verdict in ("same", "faster", "noisy", "slower", "lost")}
    regressed = counts["slower"] + counts["lost"]
    yield f"# {len(comparison.differences)} cells in both files: " + ", ".join(
        [f"{regressed} regressed", *(f"{counts[name]} {name}" for name in ("faster", "noisy", "same"))]
    )


def _factors(one: Difference) -> str:
    return "" if one.verdict == "lost" else f", share of MPI's time x {one.share:.2f}, time x {one.time:.2f}"
