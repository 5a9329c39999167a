"""Balance: cut a sequence of layers into stages of equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from commlib.errors import UsageError


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has, so that the most expensive stage costs least. No stage is empty.

    Of all cuts that are as good, this is the one whose other stages are as even as can be: the sum of the squares of
    their costs is least. Raises UsageError if there are fewer layers than stages.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise UsageError(f"{count} layers cannot be cut into {stages} stages: each needs one layer at least")
    if min(costs) < 0:
        raise UsageError(f"a layer costs {min(costs)}; expected no negative cost")
    before = [0.0, *accumulate(costs)]
    limit = _least(before, stages)
    squares: list[float] = [0.0, *([inf] * count)]  # of the first n layers in so many stages, none above the limit
    starts: list[list[int]] = []  # of the last of these stages
    for _ in range(stages):
        row, start = [inf] * (count + 1), [0] * (count + 1)
        for n in range(1, count + 1):
            for k in range(n - 1, -1, -1):
                cost = before[n] - before[k]
                if cost > limit:
                    break
                if squares[k] + cost**2 < row[n]:
                    row[n], start[n] = squares[k] + cost**2, k
        squares = row
        starts.append(start)
    cuts = [count]
    for start in reversed(starts):
        cuts.append(start[cuts[-1]])
    return tuple(end - start for end, start in pairwise(cuts))[::-1]


def _least(before: Sequence[float], stages: int) -> float:
    """Return what the most expensive stage costs at least."""
    count = len(before) - 1
    best = [inf if n else 0.0 for n in range(count + 1)]
    for _ in range(stages):
        best = [min((max(best[k], before[n] - before[k]) for k in range(n)), default=inf) for n in range(count + 1)]
    return best[count]
