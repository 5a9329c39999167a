"""A fault is raised on all ranks, before anything is divided."""

from __future__ import annotations

from typing import Any

import pytest

from commlib.comparison.agreement import run_together
from commlib.errors import MismatchError, UsageError
from commlib.sharding.shards import Shard
from commlib.tensor_parallel import Column, Row, Sharding
from commlib.tensor_parallel.run.divisibility import Divisibility


class Ranks:
    """This rank, 0, and another one with a given message."""

    rank, size = 0, 2

    def __init__(self, other: str) -> None:
        self._other, self.asked = other, 0

    def all_gather_object(self, message: Any) -> list[Any]:
        self.asked += 1
        return [message, self._other]


def raising(error: Exception) -> Any:
    raise error


def test_all_ranks_raise_the_fault() -> None:
    assert run_together(Ranks(""), lambda: 3) == 3
    with pytest.raises(UsageError, match=r"theirs \(on ranks \[1\] of 2\)"):
        run_together(Ranks("theirs"), lambda: 3)
    with pytest.raises(UsageError, match=r"^same$"):
        run_together(Ranks("same"), lambda: raising(UsageError("same")))
    with pytest.raises(KeyError):  # a model's exception is raised unchanged, and the other ranks are notified
        run_together(Ranks(""), lambda: raising(KeyError("a")))
    ranks = Ranks("")
    with pytest.raises(MismatchError):  # all ranks of the group have raised it
        run_together(ranks, lambda: raising(MismatchError("theirs")))
    assert not ranks.asked


class AxisOf3:
    size, rank = 3, 0


def test_a_division_applies_completely_or_not_at_all() -> None:
    axis: Any = AxisOf3()
    division, weight, other = Divisibility(axis), object(), object()
    rows = Sharding((6, 4), 0)
    assert division.is_new("a", weight, Column())
    assert not division.is_new("b", weight, Column())
    with pytest.raises(UsageError, match="b and a are one layer"):
        division.is_new("b", weight, Row())
    assert division.add("a.weight", weight, None, rows)
    assert division.add("b.weight", weight, None, rows)  # tied
    with pytest.raises(UsageError, match=r"c\.weight is also a\.weight, .*tied weights need one style"):
        division.add("c.weight", weight, None, Sharding((6, 4), 1))
    assert not division.add("d.weight", other, Shard(axis, rows), rows)
    with pytest.raises(UsageError, match="is sharded already"):
        division.add("d.weight", other, Shard(AxisOf3(), rows), rows)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"2 units .* among 3 ranks"):
        division.add("e.weight", object(), None, Sharding((6, 4), 0, units=2))
