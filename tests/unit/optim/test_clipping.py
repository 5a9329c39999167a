"""The clipping factor, with the rules of both frameworks, and its norm."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commlib.errors import UsageError
from commlib.optim.clipping import check_limit, clip_factor, norm_of, norm_of_arrays

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("norm", "limit", "as_torch", "as_tensorflow"),
    [
        (2.0, 1.0, 1 / (2 + 1e-6), 0.5),
        (1.0, 2.0, 1.0, 1.0),
        (1.0, 1.0, 1 / (1 + 1e-6), 1.0),
        (1.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 1.0),
        (0.0, 1.0, 1.0, 1.0),
        (1.0, INF, 1.0, 1.0),
        (INF, 1.0, 0.0, NAN),
        (INF, INF, NAN, NAN),
        (NAN, 1.0, NAN, NAN),
    ],
)
def test_the_factor_follows_the_rules_of_both_frameworks(norm, limit, as_torch, as_tensorflow):
    np.testing.assert_equal(clip_factor(norm, limit, epsilon=1e-6), as_torch)
    np.testing.assert_equal(clip_factor(norm, limit, infinite_is_nan=True), as_tensorflow)


def test_the_norm_covers_all_gradients():
    assert norm_of([]) == norm_of_arrays([]) == 0
    assert norm_of([9.0, 16.0]) == 5
    half = np.array([[3.0], [0.0]], np.float16)
    assert norm_of_arrays([half, np.array(4.0), np.zeros(0, np.float32), np.zeros(2, ml_dtypes.bfloat16)]) == 5
    assert math.isnan(norm_of_arrays([np.array([NAN])]))
    with pytest.raises(UsageError, match="floats, got int32"):
        norm_of_arrays([np.zeros(2, np.int32)])


def test_invalid_limits_are_refused():
    assert check_limit("clip", "max_norm", 0) == 0.0 and type(check_limit("clip", "max_norm", 3)) is float
    wrong: Any = (-1.0, NAN, "x", None)
    for limit in wrong:
        with pytest.raises(UsageError, match=f"clip: max_norm must be a non-negative number, got {limit!r}"):
            check_limit("clip", "max_norm", limit)
