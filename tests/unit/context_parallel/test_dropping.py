"""Dropped weights: the given share, each drawn independently, the same in every number format."""

from __future__ import annotations

from operator import rshift
from typing import Any

import numpy as np
import pytest

from commlib.context_parallel.dropout import check_rate, hash_key, hash_number, keep_threshold, start_hashes
from commlib.errors import UsageError

EXAMPLES, QUERIES, KEYS = 8, 200, 200


def keep_mask(seed: int, rate: float) -> Any:
    """Return numpy's mask, for (examples, queries, keys)."""
    of_rows, of_keys = (np.array([start]) for start in start_hashes(seed, rshift))
    rows = hash_number(hash_number(of_rows, np.arange(EXAMPLES), rshift)[:, None], np.arange(QUERIES), rshift)
    return hash_number(rows[..., None], hash_key(of_keys, np.arange(KEYS), rshift), rshift) >= keep_threshold(rate)


@pytest.mark.parametrize("seed", [0, 1, 2, 1 << 61, (1 << 62) - 1])
@pytest.mark.parametrize("rate", [0.02, 0.5, 0.9])
def test_weights_are_drawn_independently(seed: int, rate: float) -> None:
    """Means within some deviations, of all, rows, columns and examples; of these no two go together."""
    mask = keep_mask(seed, rate).astype(np.float64)
    for axes in (None, 1, 2, (1, 2)):
        means = mask.mean(axes)
        deviation = (rate * (1 - rate) * np.size(means) / mask.size) ** 0.5
        assert np.abs(means - (1 - rate)).max() < (5 if axes is None else 6) * deviation
    others = keep_mask(seed + 1, rate)
    for pair in (
        (mask[1:], mask[:-1]),
        (mask[:, 1:], mask[:, :-1]),
        (mask[..., 1:], mask[..., :-1]),
        (mask, others),
    ):
        together = np.corrcoef(pair[0].ravel(), pair[1].ravel())[0, 1]
        assert abs(together) < 5 / pair[0].size ** 0.5


def test_python_and_numpy_integers_give_the_same_mask() -> None:
    """64-bit integers overflow where Python's do not."""
    of_rows, of_keys = start_hashes(12345, rshift)
    mask = keep_mask(12345, 0.5)
    for example, query, key in ((0, 0, 0), (7, 199, 3), (2, 5, 199)):
        row = hash_number(hash_number(of_rows, example, rshift), query, rshift)
        assert (hash_number(row, hash_key(of_keys, key, rshift), rshift) >= keep_threshold(0.5)) == mask[
            example, query, key
        ]


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_an_invalid_rate_is_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="at least 0, and less than 1"):
        check_rate("attention", rate)
