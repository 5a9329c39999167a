"""Where rows are, as a user says it, fits the values that there are."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from commlib.errors import UsageError
from commlib.pipeline.rows import Rows, each, rows_option


class Pair(NamedTuple):
    one: Any
    other: Any


def told(where: Any, *leaves: Any) -> Any:
    return (where, *leaves)


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        (1, 3, (1, 3)),
        (1, [3, (4,)], [(1, 3), ((1, 4),)]),
        ((0, "whole"), (3, 4), ((0, 3), ("whole", 4))),
        ([0, 1], Pair(3, [4]), Pair((0, 3), [(1, 4)])),
        ({"b": 1}, {"a": 3, "b": [4, 5]}, {"a": (0, 3), "b": [(1, 4), (1, 5)]}),
    ],
)
def test_what_is_said_of_nests(where: Any, value: Any, expected: Any) -> None:
    assert each(told, where, value) == expected
    assert type(each(told, where, value)) is type(expected)


def test_several_nests_go_together() -> None:
    assert each(told, (0, 1), (1, 2), (3, 4)) == ((0, 1, 3), (1, 2, 4))


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ((0, 1), 3, "for one value"),
        ((0, 1), (3,), "for 1 values"),
        ((0, 1), {"a": 3}, "for a dict"),
        ({"b": 0}, {"a": 3}, "rows has the unknown name 'b'; expected some of a"),
        ({"b": 0}, (3,), "for 1 values"),
    ],
)
def test_what_does_not_fit(where: Any, value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        each(told, where, value)


def test_options() -> None:
    assert rows_option(None) == Rows()
    assert rows_option({"x": (0, "whole")}) == Rows(x=(0, "whole"))
    for rows, text in (
        ({"z": 0}, "'z'"),
        ({"x": ("all",)}, "'all' for x"),
        ({"y": -1}, "-1 for y"),
        ({"y": 1.5}, "1.5"),
    ):
        with pytest.raises(UsageError, match=text):
            rows_option(rows)
