"""Cuts are as even as possible, compared with all possible cuts."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from commlib.errors import UsageError
from commlib.pipeline.batch import rows_of, shares
from commlib.pipeline.schedule.balance import balance


def stages_of(costs: list[int], counts: tuple[int, ...]) -> list[int]:
    ends = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return [sum(costs[start:end]) for start, end in pairwise(ends)]


def test_no_cut_is_better() -> None:
    chance = random.Random(0)
    for _ in range(200):
        costs = [chance.randint(0, 9) for _ in range(chance.randint(1, 9))]
        stages = chance.randint(1, len(costs))
        counts = balance(costs, stages)
        assert sum(counts) == len(costs) and min(counts) >= 1 and len(counts) == stages
        every = [
            tuple(end - start for start, end in pairwise((0, *cut, len(costs))))
            for cut in combinations(range(1, len(costs)), stages - 1)
        ]

        def merit(cut: tuple[int, ...], costs: list[int] = costs) -> tuple[int, int]:
            parts = stages_of(costs, cut)
            return max(parts), sum(part**2 for part in parts)

        assert merit(counts) == min(map(merit, every))


def test_impossible_cuts_are_refused() -> None:
    with pytest.raises(UsageError, match="2 layers cannot be cut into 3 stages"):
        balance([1, 2], 3)
    with pytest.raises(UsageError, match="no negative cost"):
        balance([1, -2], 2)


@pytest.mark.parametrize("rows", range(12))
@pytest.mark.parametrize("microbatches", range(1, 6))
def test_rows_are_divided_into_microbatches(rows: int, microbatches: int) -> None:
    cut = rows_of(rows, microbatches)
    assert [row for part in cut for row in range(rows)[part]] == list(range(rows))
    sizes = [part.stop - part.start for part in cut]
    assert len(cut) == microbatches and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert sum(shares(sizes)) == pytest.approx(1 if rows else 0)
