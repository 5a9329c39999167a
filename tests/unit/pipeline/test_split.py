"""The number of layers of each stage, as specified."""

from __future__ import annotations

from typing import Any

import pytest

from commlib.errors import UsageError
from commlib.pipeline.split import even_counts, read_split

NAMES = ["a", "b", "c", "d"]


def test_splits_can_be_numbers_or_names() -> None:
    assert read_split([1, 3], NAMES, 2) == (1, 3)
    assert read_split(["b", "d"], NAMES, 3) == (1, 2, 1)
    assert read_split([], NAMES, 1) == (4,)


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
        (3, "split is 3, expected 'auto', 'time', numbers of layers, or names of layers"),
    ],
)
def test_wrong_splits_are_refused(split: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        read_split(split, NAMES, 2)
