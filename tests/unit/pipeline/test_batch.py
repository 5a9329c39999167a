"""Whether the first and the last stage's rank were given one batch."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.pipeline.batch import NONE, Given, by_key, difference, digest, wants_x


def test_a_digest_is_of_the_values() -> None:
    values = np.arange(12.0).reshape(3, 4)
    assert digest([values]) == digest([np.asfortranarray(values)]) == digest([values[:2], values[2:]])
    assert digest([values]) != digest([values[::-1]])
    assert digest([values]) != NONE != digest([])


@pytest.mark.parametrize(
    ("first", "last", "what"),
    [
        (Given(y=1), Given(y=1), ""),
        (Given(y=1), Given(y=2), "y"),
        (Given(y=1, sample_weight=3), Given(y=1, sample_weight=4), "sample_weight"),
        (Given(y=1, sample_weight=3), Given(y=1), "sample_weight"),
        (Given(y=1), Given(y=1, sample_weight=3), ""),
        (Given(x=5), Given(x=6, y=1), "x"),
        (Given(x=5), Given(y=1), ""),
        (Given(), Given(), ""),
    ],
)
def test_what_differs(first: Given, last: Given, what: str) -> None:
    """The ranks between may have anything."""
    text = difference(0, 2, [first, Given(7, 8, 9), last])
    assert text.startswith(f"pipeline: ranks 0 and 2 were given different {what}, so x and ") if what else not text


def test_when_x_is_wanted() -> None:
    """Where the first stage's rank has no targets, and the last one's has."""
    assert wants_x(0, 1, [Given(), Given(y=1)])
    assert not any(
        wants_x(0, 1, both) for both in ([Given(y=1), Given(y=1)], [Given(), Given()], [Given(y=1), Given()])
    )


def test_a_nest_by_its_keys() -> None:
    """Ranks may have filled their dicts in other orders."""
    one, other = {"b": [1, {"d": 2, "c": 3}], "a": 4}, {"a": 4, "b": [1, {"c": 3, "d": 2}]}
    assert by_key(one) == by_key(other) == [4, [1, [3, 2]]]
    assert by_key((1, "two", None)) == [1, "two", None]
