"""The variants of a test that the usual run selects."""

from __future__ import annotations

import pytest

from tests.plugins.variants import spread


@pytest.mark.parametrize(
    ("count", "most", "places"),
    [(1, 4, [0]), (4, 4, [0, 1, 2, 3]), (5, 2, [0, 4]), (9, 3, [0, 4, 8]), (100, 4, [0, 33, 66, 99])],
)
def test_selected_variants_are_spread_evenly(count: int, most: int, places: list[int]) -> None:
    assert spread(count, most) == places


def test_a_single_variant_can_be_any() -> None:
    selections = [spread(4, 1, f"tests/test_some.py::test_{number}") for number in range(100)]
    assert sorted({place for (place,) in selections}) == [0, 1, 2, 3]
    assert selections == [spread(4, 1, f"tests/test_some.py::test_{number}") for number in range(100)]
