"""Batch: cut it into microbatches, and say what each counts in the mean over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def rows_of(rows: int, microbatches: int) -> list[slice]:
    """Return the rows of each microbatch: as even as can be, the larger ones first, the last ones empty if need be."""
    size, larger = divmod(rows, microbatches)
    ends = [number * size + min(number, larger) for number in range(microbatches + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def shares(counts: Sequence[float]) -> list[float]:
    """Return what each microbatch's mean counts in the mean of all, given how many terms each has."""
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]


def shares_in_updates(counts: Sequence[float], every: int) -> list[float]:
    """Return what each microbatch's mean counts in its update: one follows every so many; 0: one follows them all."""
    step = every or len(counts)
    return [share for start in range(0, len(counts), step) for share in shares(counts[start : start + step])]
