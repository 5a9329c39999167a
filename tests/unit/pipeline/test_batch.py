"""Digests show whether the ranks of the first and the last stage got one batch."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.pipeline.batch import NONE, BatchDigests, difference, digest, sort_by_key, wants_x


def test_a_digest_is_of_the_values() -> None:
    values = np.arange(12.0).reshape(3, 4)
    assert digest([values]) == digest([np.asfortranarray(values)]) == digest([values[:2], values[2:]])
    assert digest([values]) != digest([values[::-1]])
    assert digest([values]) != NONE != digest([])


@pytest.mark.parametrize(
    ("first", "last", "what"),
    [
        (BatchDigests(y=1), BatchDigests(y=1), ""),
        (BatchDigests(y=1), BatchDigests(y=2), "y"),
        (BatchDigests(y=1, sample_weight=3), BatchDigests(y=1, sample_weight=4), "sample_weight"),
        (BatchDigests(y=1, sample_weight=3), BatchDigests(y=1), "sample_weight"),
        (BatchDigests(y=1), BatchDigests(y=1, sample_weight=3), ""),
        (BatchDigests(x=5), BatchDigests(x=6, y=1), "x"),
        (BatchDigests(x=5), BatchDigests(y=1), ""),
        (BatchDigests(), BatchDigests(), ""),
    ],
)
def test_differences_are_named(first: BatchDigests, last: BatchDigests, what: str) -> None:
    """Ranks in between may have any batch."""
    text = difference(0, 2, [first, BatchDigests(7, 8, 9), last])
    assert text.startswith(f"pipeline: ranks 0 and 2 got different {what}, so x and ") if what else not text


def test_x_is_wanted_if_only_the_last_stage_has_targets() -> None:
    """If the first stage's rank has no targets, and the last stage's has."""
    assert wants_x(0, 1, [BatchDigests(), BatchDigests(y=1)])
    assert not any(
        wants_x(0, 1, both)
        for both in (
            [BatchDigests(y=1), BatchDigests(y=1)],
            [BatchDigests(), BatchDigests()],
            [BatchDigests(y=1), BatchDigests()],
        )
    )


def test_nested_values_are_compared_by_key() -> None:
    """Ranks may have filled their dicts in other orders."""
    one, other = {"b": [1, {"d": 2, "c": 3}], "a": 4}, {"a": 4, "b": [1, {"c": 3, "d": 2}]}
    assert sort_by_key(one) == sort_by_key(other) == [4, [1, [3, 2]]]
    assert sort_by_key((1, "two", None)) == [1, "two", None]
