"""Scales, neutral elements, and Adasum of two ranks."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.coordinator.adasum import combine
from commlib.coordinator.scaling import neutral_element, scale
from commlib.dtypes import COMPLEX, FLOATS, INTEGERS, NUMPY


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *COMPLEX])
def test_a_scale_rounds_once_and_truncates_integers(dtype):
    array = np.array([0, 1, 3, 7], NUMPY[dtype])
    if dtype.startswith("int"):
        array[1] = -3
    exact = array.astype(np.complex128 if dtype in COMPLEX else np.float64) * 0.3
    scale(array, 0.3)
    if dtype in INTEGERS:
        assert array.tolist() == np.trunc(exact).astype(int).tolist()
    else:
        # The factor is rounded to the dtype in which the product is formed, and then the product is.
        product = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 0) + (
            2.0**-52 if dtype in ("float64", "complex128") else 2.0**-23
        )
        np.testing.assert_allclose(array.astype(exact.dtype), exact, rtol=1.01 * product)


def test_half_precision_is_scaled_in_float32():
    array = np.array([60000], np.float16)
    scale(array, 1 / 3)
    assert array[0] == np.float16(np.float32(60000) * np.float32(1 / 3))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
def test_neutral_elements_change_nothing(dtype, op):
    x = np.array([0, 1, 5, 100], NUMPY[dtype])
    nothing = np.full(4, neutral_element(dtype, op), NUMPY[dtype])
    how = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}[op]
    np.testing.assert_array_equal(how(x, nothing), x)


@pytest.mark.parametrize(
    "op, how", [("sum", np.logical_or), ("max", np.logical_or), ("min", np.logical_and), ("prod", np.logical_and)]
)
def test_neutral_elements_of_bool_change_nothing(op, how):
    x = np.array([True, False])
    assert how(x, np.full(2, neutral_element("bool", op))).tolist() == [True, False]


def test_adasum_adds_orthogonal_and_averages_parallel_vectors():
    a, b = np.array([1.0, 0, 2]), np.array([0.0, 5, 0])
    assert combine(a, b).tolist() == [1, 5, 2]
    assert combine(a, a).tolist() == a.tolist()
    assert combine(a, np.zeros(3)).tolist() == a.tolist()
    assert combine(np.zeros(3), b).tolist() == b.tolist()
    c = np.array([1.0, 1, 0])
    expected = (1 - 1 / (2 * 5)) * a + (1 - 1 / (2 * 2)) * c
    np.testing.assert_allclose(combine(a, c), expected, rtol=1e-15)
