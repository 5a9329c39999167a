"""Trials: a layer that takes parts of a sequence is run on parts, and on these put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from commlib.tensor_parallel.checks.position_checks import BY_LENGTH, UNTRIED, CommunicatingLayer, try_positions

Layer = Callable[..., Any]


def call(layer: Layer) -> Callable[[Sequence[Any]], list[Any]]:
    return lambda given: [layer(*given)]


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def looked(layer: Layer, *given: Any) -> str | None:
    return try_positions([call(layer)], given, 1)


X, MASK = numbers(2, 4, 3), np.ones((2, 4), bool)
IDS = np.array([[3, 1, 2, 0], [0, 1, 2, 3]])


@pytest.mark.parametrize("layer", [
    lambda x: x - x.mean(1, keepdims=True),
    lambda x: np.cumsum(x, 1),
    lambda x: x[:, ::-1],
    lambda x: x * x.shape[1],
])  # fmt: skip
def test_a_layer_that_looks_at_other_positions(layer: Layer) -> None:
    assert looked(layer, X) is None


@pytest.mark.parametrize("layer", [
    lambda x, mask: np.where(mask[..., None], x, x.mean(1, keepdims=True)),
    lambda x, mask: x + (~mask).mean(1)[:, None, None],
    lambda x, mask: x * mask.all(1)[:, None, None],
])  # fmt: skip
def test_one_that_does_so_by_a_mask(layer: Layer) -> None:
    """All masks were true, and those of the other part, too."""
    assert looked(layer, X, MASK) is None


@pytest.mark.parametrize("layer", [
    lambda x, p: x + (p - p.min(1, keepdims=True))[..., None],
    lambda x, p: x + (p / (1 + p.max(1, keepdims=True)))[..., None],
    lambda x, p: x + (p - p.mean(1, keepdims=True))[..., None],
    lambda x, p: x / (1 + p.max(1))[:, None, None],
])  # fmt: skip
def test_one_that_does_so_by_integers(layer: Layer) -> None:
    """The other part was of the same integers in another order."""
    assert looked(layer, X, IDS) is None


@pytest.mark.parametrize("layer", [
    lambda x: np.tanh(x) * x.sum(-1, keepdims=True),
    lambda x: np.sort(x, -1),
])  # fmt: skip
def test_one_that_does_not(layer: Layer) -> None:
    assert looked(layer, X) == ""
    assert looked(lambda x, mask, p: np.where(mask[..., None], layer(x), p[..., None]), X, MASK, IDS) == ""
    assert looked(lambda x, table: x @ table, X, numbers(3, 3)) == ""


def windows(x: Any) -> Any:
    """Subtract the mean of each two neighbours, of the last one alone where there is no other."""
    pairs = [x[:, at : at + 2] for at in range(0, x.shape[1], 2)]
    return np.concatenate([one - one.mean(1, keepdims=True) for one in pairs], 1)


def test_windows_are_right_where_parts_end_with_one() -> None:
    assert looked(windows, X) == BY_LENGTH
    assert looked(windows, numbers(2, 3, 3)) is None
    assert looked(lambda x: windows(x) if x.shape[1] % 2 == 0 else 1 / 0, X) == ""  # a call of another length tells


def test_one_that_draws() -> None:
    draw = np.random.default_rng(1)
    draws = call(lambda x: x + draw.normal(size=x.shape))
    mixes, keeps = call(lambda x: x - x.mean(1, keepdims=True)), call(lambda x: x)
    assert try_positions([draws], [X], 1) == UNTRIED
    assert try_positions([draws, keeps], [X], 1) == UNTRIED  # of what it does beside drawing nobody knows
    assert try_positions([draws, mixes], [X], 1) is None
    assert try_positions([keeps, mixes], [X], 1) == ""


def test_one_that_takes_no_other_length() -> None:
    assert looked(lambda x: x + numbers(4, 1), X) == UNTRIED


def test_one_that_moves_values_between_ranks() -> None:
    def moves(x: Any) -> Any:
        raise CommunicatingLayer("as it is")

    assert looked(moves, X) == ""
