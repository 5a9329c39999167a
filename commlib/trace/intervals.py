"""Intervals: sets of times as sorted, disjoint pieces (begin, end) that do not touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(pieces: Iterable[Interval]) -> list[Interval]:
    """Return the union of the pieces."""
    result: list[Interval] = []
    for began, ended in sorted(pieces):
        if ended <= began:
            continue
        if result and began <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], ended))
        else:
            result.append((began, ended))
    return result


def common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two sets."""
    result, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        began, ended = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if began < ended:
            result.append((began, ended))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return result


def length(pieces: Iterable[Interval]) -> int:
    """Return the total duration of a set."""
    return sum(ended - began for began, ended in pieces)
