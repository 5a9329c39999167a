"""The number of layers of each stage, as specified."""

from __future__ import annotations

from typing import Any

import pytest

from commlib.errors import UsageError
from commlib.pipeline.split import counts_given, even_counts

NAMES = ["a", "b", "c", "d"]


def test_splits_can_be_numbers_or_names() -> None:
    assert counts_given([1, 3], NAMES, 2) == (1, 3)
    assert counts_given(["b", "d"], NAMES, 3) == (1, 2, 1)
    assert counts_given([], NAMES, 1) == (4,)


def test_sizes_are_even() -> None:
    assert even_counts([4, 4, 8], 2) == (2, 1)
    assert even_counts([0, 0, 0, 0], 2) == (2, 2)
    assert even_counts([100, 0, 0, 0], 2) == (1, 3)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ([1, 2], r"split is \[1, 2\]; expected 2 positive numbers that add up to the 4 layers"),
        ([0, 4], "expected 2 positive numbers"),
        ([1, 1, 2], "expected 2 positive numbers"),
        (["b", "c"], "names 2 layers; expected 1"),
        (["e"], "unknown layer 'e'; the layers are a, b, c, d"),
        (["a"], "without the first"),
        ([1.5], "expected names of layers"),
    ],
)
def test_wrong_splits_are_refused(split: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        counts_given(split, NAMES, 2)
