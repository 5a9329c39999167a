"""The user's specification of row dimensions must fit the values."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from commlib.errors import UsageError
from commlib.pipeline.rows import Rows, check_result, each, number_of_rows, pad_microbatches, rows_option


class Pair(NamedTuple):
    one: Any
    other: Any


def specify(where: Any, *leaves: Any) -> Any:
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
def test_specifications_apply_to_nested_values(where: Any, value: Any, expected: Any) -> None:
    assert each(specify, where, value) == expected
    assert type(each(specify, where, value)) is type(expected)


def test_several_nested_values_are_combined() -> None:
    assert each(specify, (0, 1), (1, 2), (3, 4)) == ((0, 1, 3), (1, 2, 4))


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
def test_mismatched_specifications_are_refused(where: Any, value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        each(specify, where, value)


def test_invalid_options_are_refused() -> None:
    for given in (3, "x", [0]):
        with pytest.raises(UsageError, match=r"rows is .*, expected a dict with some of x, y and output"):
            rows_option(given)  # type: ignore[arg-type]
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


def test_tensors_with_rows_have_equal_numbers_of_them() -> None:
    assert number_of_rows([(0, (3, 2)), (1, (5, 3)), ("whole", (7,)), (0, ())], "x") == 3
    cases: list[tuple[list[Any], str]] = [
        ([(0, (3,)), (0, (4,))], "x: expected tensors with equal numbers .* got 2 different numbers: 3, 4; if rows"),
        ([(0, ()), ("whole", (2,))], "got no tensor with rows"),
        ([(1, (3,))], "rows gives dimension 1 for a tensor of shape \\(3,\\)"),
    ]
    for tensors, message in cases:
        with pytest.raises(UsageError, match=message):
            number_of_rows(tensors, "x")


def test_microbatches_of_a_user_are_padded_at_the_end() -> None:
    def count(part: str, what: str) -> int:
        assert what in ("x[0]", "x[1]", "x[2]")
        return len(part)

    assert pad_microbatches(["ab", "c"], 3, "x", count) == (["ab", "c", None], [2, 1, 0])
    assert pad_microbatches(["ab", ""], 2, "x", count) == (["ab", ""], [2, 0])
    for parts, message in [
        ("ab", "expected a list of at most 3 microbatches, got str"),
        ([], "got 0 microbatches"),
        (["a"] * 4, "got 4 microbatches"),
        (["a", "", "b"], "without rows must be the last ones, got \\[1, 0, 1\\] rows"),
    ]:
        with pytest.raises(UsageError, match=message):
            pad_microbatches(parts, 3, "x", count)


def test_results_have_the_rows_of_their_microbatch() -> None:
    check_result((5, 3), 1, 3, "output")
    for shape in ((3, 5), (3,)):
        with pytest.raises(UsageError, match="a microbatch of 3 rows has output of shape"):
            check_result(shape, 1, 3, "output")
