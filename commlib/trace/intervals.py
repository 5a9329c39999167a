"""Intervals: sets of times as sorted, disjoint pieces (begin, end) that do not touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]


def union(pieces: Iterable[Interval]) -> list[Interval]:
    """Return the union of the pieces."""
    found: list[Interval] = []
    for began, ended in sorted(pieces):
        if ended <= began:
            continue
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], ended))
        else:
            found.append((began, ended))
    return found


def common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two sets."""
    found, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        began, ended = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if began < ended:
            found.append((began, ended))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(pieces: Iterable[Interval]) -> int:
    """Return the total duration of a set."""
    return sum(ended - began for began, ended in pieces)
