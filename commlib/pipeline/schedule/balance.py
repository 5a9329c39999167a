"""Balance: cut a sequence of layers into stages of equal cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from commlib.errors import UsageError


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the number of layers in each stage that minimizes the cost of the most expensive stage. No stage is empty.

    Of all optimal cuts, returns the one with the most even other stages: the least sum of squared costs. Raises
    UsageError if there are fewer layers than stages.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise UsageError(f"{count} layers cannot be cut into {stages} stages: each needs at least one layer")
    if min(costs) < 0:
        raise UsageError(f"a layer costs {min(costs)}; expected no negative cost")
    before = [0.0, *accumulate(costs)]
    limit = _least(before, stages)
    squares: list[float] = [0.0, *([inf] * count)]  # of the first n layers in the stages so far, none above the limit
    starts: list[list[int]] = []  # of the last stage, by n
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
    """Return the least possible cost of the most expensive stage."""
    count = len(before) - 1
    best = [inf if n else 0.0 for n in range(count + 1)]
    for _ in range(stages):
        best = [min((max(best[k], before[n] - before[k]) for k in range(n)), default=inf) for n in range(count + 1)]
    return best[count]
