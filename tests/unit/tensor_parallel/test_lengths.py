"""Numbers that record how they were computed."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

from commlib.tensor_parallel.lengths import Length, NumberUses, length_at, sources_of


@pytest.fixture
def used():
    return NumberUses(lambda: "model.py:3")


def test_formulas_are_evaluated_for_a_rank(used):
    """Values that a model computes from its numbers of heads are recomputed with the numbers of a rank."""
    heads, width = Length.of(4, ("attn", "heads"), used), Length.of(16, (7, 2), used)
    features = 3 * heads * width
    assert features == 192 and isinstance(features, int)
    assert sources_of(features) == {("attn", "heads"), (7, 2)}
    assert length_at(features, {("attn", "heads"): 2}) == 96
    assert length_at(10 - heads // 2 + width % 5, {("attn", "heads"): 2}) == 10
    assert length_at(features // (heads + 2), {(7, 2): 8, ("attn", "heads"): 1}) == 8
    assert length_at(5, {(7, 2): 8}) == 5 and not sources_of(5)
    assert not used


@pytest.mark.parametrize(
    "use", [math.sqrt, float, lambda n: n**-0.5, lambda n: 1 / n, lambda n: n * 0.5, lambda n: n / 2]
)
def test_uses_as_a_number_are_recorded(used, use):
    """A scale by the number of features changes on a rank with fewer features."""
    assert use(Length.of(4, ("attn", "size"), used)) == use(4)
    assert used == {("attn", "size"): "model.py:3"}


def test_copies_are_plain_numbers(used):
    """A step with a length was sent to other ranks, but a formula cannot be pickled."""
    length = Length.of(4, ("attn", "heads"), used)
    assert [type(copied) for copied in (pickle.loads(pickle.dumps(length)), copy.deepcopy(length))] == [int, int]
