"""Heads of queries with heads of keys and values: the units in which ranks divide them."""

from __future__ import annotations

import pytest

from commlib.tensor_parallel.heads import units_of_queries


@pytest.mark.parametrize(
    ("queries", "keys", "size", "units"),
    [
        (8, 4, 2, 4),  # groups stay whole
        (6, 3, 2, 3),
        (8, 2, 4, 8),  # two ranks share each
        (7, 1, 3, 7),  # all share one
        (6, 2, 4, 0),  # a rank would have queries of both
        (6, 2, 3, 0),
        (2, 1, 3, 0),  # a rank would have none
    ],
)
def test_queries_are_divided_in_units(queries: int, keys: int, size: int, units: int) -> None:
    assert units_of_queries(queries, keys, size) == units
