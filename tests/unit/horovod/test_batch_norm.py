"""Statistics of ranks that are combined, against those of all values at once."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from commlib.horovod import ProcessSet
from commlib.horovod.batch_norm import check_several, combine, next_layer, running_factors

ROWS = [5, 1, 0, 3]


def row(values, counts=1):
    """One rank's statistics of [rows, channels], with `counts` numbers of values."""
    mean = values.mean(0) if len(values) else np.zeros(values.shape[1])
    return np.concatenate([[len(values)] * counts, mean, np.square(values - mean).sum(0)])


@pytest.mark.parametrize("counts", [1, 3])
def test_combined_statistics_match_all_values(counts):
    parts = [np.random.default_rng(rank).normal(1e4, 0.1, (rows, 3)) for rank, rows in enumerate(ROWS)]
    combined = combine(np.stack([row(part, counts) for part in parts]), 3)
    whole = np.concatenate(parts)
    assert combined.count.tolist() == [9] * counts
    np.testing.assert_allclose(combined.mean, whole.mean(0), rtol=1e-15 * 9)
    # Means are rounded to 1e-12, of deviations of 0.1. A difference of squares would have lost 10 of 16 digits.
    np.testing.assert_allclose(combined.variance, whole.var(0), rtol=1e-9)


def test_counts_may_differ_between_channels():
    """As they do under a mask; a channel without any value has mean and variance 0."""
    a, b = [1.0, 0, 0, 5, 0, 0, 0, 0, 0], [3.0, 2, 0, 1, 4, 0, 6, 8, 0]
    combined = combine(np.array([a, b], np.float32), 3)
    assert combined.count.tolist() == [4, 2, 0]
    assert combined.mean.tolist() == [2, 4, 0]
    # Channel 0: one 5, and three of mean 1 whose squared deviations add up to 6.
    assert combined.variance.tolist() == [(6 + 3 * 1 + 1 * 9) / 4, 4, 0]
    assert combined.mean.dtype == combined.variance.dtype == np.float64


def test_zero_channels_are_combined():
    combined = combine(np.array([[4.0], [0.0]]), 0)
    assert combined.count.tolist() == [4] and combined.mean.shape == combined.variance.shape == (0,)


def test_a_single_value_is_refused():
    check_several("layer", 2)
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"layer: expected more than 1 value per channel .* together have {count}"):
            check_several("layer", count)


def test_running_statistics_follow_the_momentum():
    assert running_factors(0.25, 7, 3) == running_factors(0.25, None, 3) == (0.25, 1.5)
    assert running_factors(None, 4, 2) == (0.25, 2.0)  # the plain average of all batches
    average = 0.0
    for batch, value in enumerate([3.0, 5.0, 10.0], 1):
        average += running_factors(None, batch, 2)[0] * (value - average)
    assert average == 6


def test_layers_are_numbered_by_process_set():
    one, other = ProcessSet([0]), ProcessSet([0])
    assert [next_layer(one), next_layer(other), next_layer(one)] == [0, 0, 1]
    first = next_layer(None)
    assert next_layer(None) == first + 1
    del one  # and a deleted set leaves no numbers
    gc.collect()
    assert next_layer(other) == 1
