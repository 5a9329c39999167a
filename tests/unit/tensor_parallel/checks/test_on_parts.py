"""Trials: a layer that takes parts of a sequence is run on parts, and on the joined sequence."""

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


def try_layer(layer: Layer, *given: Any) -> str | None:
    return try_positions([call(layer)], given, 1)


X, MASK = numbers(2, 4, 3), np.ones((2, 4), bool)
IDS = np.array([[3, 1, 2, 0], [0, 1, 2, 3]])


@pytest.mark.parametrize("layer", [
    lambda x: x - x.mean(1, keepdims=True),
    lambda x: np.cumsum(x, 1),
    lambda x: x[:, ::-1],
    lambda x: x * x.shape[1],
])  # fmt: skip
def test_a_layer_that_reads_other_positions_is_found(layer: Layer) -> None:
    assert try_layer(layer, X) is None


@pytest.mark.parametrize("layer", [
    lambda x, mask: np.where(mask[..., None], x, x.mean(1, keepdims=True)),
    lambda x, mask: x + (~mask).mean(1)[:, None, None],
    lambda x, mask: x * mask.all(1)[:, None, None],
])  # fmt: skip
def test_a_layer_that_reads_other_positions_by_a_mask_is_found(layer: Layer) -> None:
    """All masks were true, also those of the other part."""
    assert try_layer(layer, X, MASK) is None


@pytest.mark.parametrize("layer", [
    lambda x, p: x + (p - p.min(1, keepdims=True))[..., None],
    lambda x, p: x + (p / (1 + p.max(1, keepdims=True)))[..., None],
    lambda x, p: x + (p - p.mean(1, keepdims=True))[..., None],
    lambda x, p: x / (1 + p.max(1))[:, None, None],
])  # fmt: skip
def test_a_layer_that_reads_other_positions_by_integers_is_found(layer: Layer) -> None:
    """The other part had the same integers in another order."""
    assert try_layer(layer, X, IDS) is None


@pytest.mark.parametrize("layer", [
    lambda x: np.tanh(x) * x.sum(-1, keepdims=True),
    lambda x: np.sort(x, -1),
])  # fmt: skip
def test_a_layer_that_reads_its_positions_only_passes(layer: Layer) -> None:
    assert try_layer(layer, X) == ""
    assert try_layer(lambda x, mask, p: np.where(mask[..., None], layer(x), p[..., None]), X, MASK, IDS) == ""
    assert try_layer(lambda x, table: x @ table, X, numbers(3, 3)) == ""


def windows(x: Any) -> Any:
    """Subtract the mean of each pair of neighbours; the last value stands alone in an odd length."""
    pairs = [x[:, at : at + 2] for at in range(0, x.shape[1], 2)]
    return np.concatenate([one - one.mean(1, keepdims=True) for one in pairs], 1)


def test_windows_pass_if_parts_end_at_window_boundaries() -> None:
    assert try_layer(windows, X) == BY_LENGTH
    assert try_layer(windows, numbers(2, 3, 3)) is None
    assert (
        try_layer(lambda x: windows(x) if x.shape[1] % 2 == 0 else 1 / 0, X) == ""
    )  # a call of another length shows it


def test_layers_that_draw_may_be_untried() -> None:
    draw = np.random.default_rng(1)
    draws = call(lambda x: x + draw.normal(size=x.shape))
    mixes, keeps = call(lambda x: x - x.mean(1, keepdims=True)), call(lambda x: x)
    assert try_positions([draws], [X], 1) == UNTRIED
    assert try_positions([draws, keeps], [X], 1) == UNTRIED  # its effects other than drawing are unknown
    assert try_positions([draws, mixes], [X], 1) is None
    assert try_positions([keeps, mixes], [X], 1) == ""


def test_a_layer_of_fixed_length_is_untried() -> None:
    assert try_layer(lambda x: x + numbers(4, 1), X) == UNTRIED


def test_a_layer_that_communicates_is_not_blamed() -> None:
    def moves(x: Any) -> Any:
        raise CommunicatingLayer("as it is")

    assert try_layer(moves, X) == ""
