"""Sums of squares: exact where possible, of wide range, and not finite for nonfinite input."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.errors import UsageError
from commlib.kernels.norm import sum_of_squares

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.integers(-128, 128), max_size=100), start=st.integers(0, 3))
def test_squares_of_integers_are_exact(dtype: type, values: list[int], start: int) -> None:
    """bfloat16 has 8 bits, and squares of those add up exactly in float64; slices start anywhere."""
    array: Any = np.array(values, dtype)[start:]
    assert sum_of_squares(array) == sum(value * value for value in values[start:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_may_exceed_the_range_of_the_dtype(dtype: type) -> None:
    largest = 1e100 if dtype is np.float64 else float(ml_dtypes.finfo(dtype).max)
    squares = sum_of_squares(np.full(8, largest, dtype))
    assert squares == pytest.approx(8 * float(np.array(largest, dtype)) ** 2, rel=1e-14)
    smallest = 1e-100 if dtype is np.float64 else float(ml_dtypes.finfo(dtype).smallest_subnormal)
    assert sum_of_squares(np.full(8, smallest, dtype)) == 8 * smallest**2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 17, 40])
def test_nonfinite_input_gives_nonfinite_sums(dtype: type, place: int) -> None:
    array: Any = np.ones(41, dtype)
    array[place] = -math.inf
    assert sum_of_squares(array) == math.inf
    array[place] = math.nan
    assert math.isnan(sum_of_squares(array))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 511, 512, 513, 5000])
def test_the_order_of_additions_is_the_same_on_every_cpu(dtype: type, count: int) -> None:
    """Bit for bit the result of a scalar loop, for any vector width of the compiler."""
    values: Any = np.random.default_rng(count).standard_normal(count).astype(dtype)
    sums = [0.0] * 512
    for i, value in enumerate(values.tolist()):
        sums[i % 512] += float(value) * float(value)
    assert sum_of_squares(values) == sum(sums)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match="floats, got int32"):
        sum_of_squares(np.ones(3, np.int32))
