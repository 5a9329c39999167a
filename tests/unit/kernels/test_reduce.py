"""The arithmetic kernels against numpy and ml_dtypes, to the last bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from commlib.dtypes import NUMPY, kernel_operation
from commlib.errors import UsageError
from commlib.execution.reduce_function import ReduceFunction
from commlib.kernels.host.reduce import BLOCK
from commlib.kernels.reductions import reduction
from tests.oracles.oracle import REDUCIBLE, assert_same, combined, values

LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def reduce(
    dtype: str,
    op: str,
    inputs: list[Any],
    outputs: list[Any],
    offset: int = 0,
    count: int | None = None,
    divisor: int | None = None,
) -> None:
    """Call the kernel on arrays, as the node's collectives do."""
    tables = [np.array([array.ctypes.data for array in arrays], np.int64) for arrays in (inputs, outputs)]
    if count is None:
        count = len(inputs[0])
    function = reduction(dtype, kernel_operation(dtype, op)).call
    if divisor is None:
        divisor = len(inputs)
    function(tables[0].ctypes.data, len(inputs), tables[1].ctypes.data, len(outputs), offset, count, divisor)


@pytest.mark.parametrize("dtype, op", REDUCIBLE)
def test_reductions_into_a_new_array_match_numpy(dtype, op):
    for length in LENGTHS:
        for n in range(1, 6):
            inputs = [values(dtype, length, 10 * n + k) for k in range(n)]
            originals, out = [x.copy() for x in inputs], np.empty(length, NUMPY[dtype])
            reduce(dtype, op, inputs, [out])
            assert_same(out, combined(originals, op))
            for x, before in zip(inputs, originals, strict=True):
                assert_same(x, before)


@pytest.mark.parametrize("dtype, op", REDUCIBLE)
def test_reductions_into_each_input_match_numpy(dtype, op):
    for length in (1, BLOCK, 2 * BLOCK + 3):
        for n in range(1, 6):
            for target in range(n):
                inputs = [values(dtype, length, 10 * n + k) for k in range(n)]
                expected = combined(inputs, op)
                reduce(dtype, op, inputs, [inputs[target]])
                assert_same(inputs[target], expected)


@pytest.mark.parametrize("dtype, op", REDUCIBLE)
def test_reductions_into_many_outputs_match_numpy(dtype, op):
    """Into all inputs (symmetric memory), in another order, and into other arrays."""
    for length in (1, BLOCK, 2 * BLOCK + 3):
        for n in range(1, 6):
            inputs = [values(dtype, length, 10 * n + k) for k in range(n)]
            expected, others = combined(inputs, op), [np.empty_like(inputs[0]) for _ in range(n)]
            reduce(dtype, op, inputs, others)
            reduce(dtype, op, [x.copy() for x in inputs], inputs[::-1])  # inputs are only written here
            for out in (*others, *inputs):
                assert_same(out, expected)
            inputs = [values(dtype, length, 10 * n + k) for k in range(n)]
            reduce(dtype, op, inputs, inputs)
            for out in inputs:
                assert_same(out, expected)


def test_offset_and_count_limit_writes():
    inputs = [values("int16", 100, k) for k in range(3)]
    expected, out = combined(inputs, "sum"), np.full(100, -99, np.int16)
    reduce("int16", "sum", inputs, [out], offset=2 * 30, count=20)
    assert_same(out[30:50], expected[30:50])
    assert (out[:30] == -99).all() and (out[50:] == -99).all()


@pytest.mark.parametrize("divisor", [1, 2, 4, 7, 13])
def test_a_mean_of_halves_divides(divisor):
    """Each quotient is between two neighbours; for 7 and 13, multiplying by the reciprocal would miss hundreds."""
    quotients = 1 + (2 * np.arange(1024) + 1) * 2.0**-11
    total = divisor * quotients
    first = total.astype(np.float16)
    inputs = [first, (total - first).astype(np.float16)]
    expected = quotients.astype(np.float16)
    reduce("float16", "mean", inputs, inputs, divisor=divisor)
    for out in inputs:
        assert_same(out, expected)


def test_a_reducer_combines_any_number_of_operands():
    first, second = np.arange(5, dtype=np.float32), np.full(5, 2, np.float32)
    ReduceFunction("float32", "sum").combine([first, second], second)
    assert_same(second, np.arange(5, dtype=np.float32) + 2)
    third = np.empty(5, np.float32)
    ReduceFunction("float32", "max").combine([first, np.full(5, 3, np.float32), np.zeros(5, np.float32)], third)
    assert_same(third, np.maximum(first, 3))
    ReduceFunction("float32", "mean", 4).combine([second], second)
    assert_same(second, (np.arange(5, dtype=np.float32) + 2) / np.float32(4))


# Half precision


def all_bits(dtype: str) -> Any:
    return np.arange(1 << 16, dtype=np.uint16).view(HALVES[dtype])


def same_bits_but_nan(actual: Any, expected: Any) -> None:
    """A NaN may change its payload, but stays a NaN with the same sign."""
    nan = np.isnan(expected.astype(np.float32))
    assert (np.isnan(actual.astype(np.float32)) == nan).all()
    assert (actual.view(np.uint16)[~nan] == expected.view(np.uint16)[~nan]).all()
    assert (np.signbit(actual[nan].astype(np.float32)) == np.signbit(expected[nan].astype(np.float32))).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "mean"])
def test_every_half_survives_a_round_trip(dtype, op):
    x = all_bits(dtype)
    out = np.empty_like(x)
    reduce(dtype, op, [x], [out])
    same_bits_but_nan(out, x)


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_with_halves_are_rounded_once(dtype):
    x = all_bits(dtype)
    for other in (0.0, 1.0, 2.0**-9, 2.0**-12, -65504.0, 3e38, np.inf, -np.inf, np.nan, 6e-8, 1e-40):
        with np.errstate(all="ignore"):
            y = np.full(len(x), other, np.float32).astype(HALVES[dtype])
            expected = (x.astype(np.float32) + y.astype(np.float32)).astype(HALVES[dtype])
        out = np.empty_like(x)
        reduce(dtype, "sum", [x, y], [out])
        nan = np.isnan(expected.astype(np.float32))
        assert (np.isnan(out.astype(np.float32)) == nan).all(), other
        assert (out.view(np.uint16)[~nan] == expected.view(np.uint16)[~nan]).all(), other


@pytest.mark.parametrize("dtype, digits", [("float16", 10), ("bfloat16", 7)])
def test_ties_go_to_even(dtype, digits):
    """1 + odd * half a unit is between two neighbours; so are sums slightly above or below after a third term."""
    kind, half = HALVES[dtype], 2.0 ** -(digits + 1)
    ones = [kind(1 + 2 * half * k) for k in range(4)]
    for k, x in enumerate(ones):
        even = kind(1 + 2 * half * (k + k % 2))
        up, down = kind(1 + 2 * half * (k + 1)), kind(1 + 2 * half * k)
        for third, expected in ((0.0, even), (half / 64, up), (-half / 64, down)):
            arrays = [np.array([value], kind) for value in (x, half, third)]
            out = np.empty(1, kind)
            reduce(dtype, "sum", arrays, [out])
            assert out[0] == expected, (k, third, out, expected)


@pytest.mark.parametrize("dtype, big", [("float16", 2048), ("bfloat16", 256)])
def test_halves_are_not_rounded_between_the_terms(dtype, big):
    """Ones that are added to `big` one by one would be lost in half precision."""
    kind = HALVES[dtype]
    assert kind(big) + kind(1) == kind(big)
    inputs = [np.array([big], kind)] + [np.array([1], kind)] * 4
    out = np.empty(1, kind)
    reduce(dtype, "sum", inputs, [out])
    assert out[0] == kind(big + 4) != kind(big)


@pytest.mark.parametrize("dtype, largest", [("float16", 65504.0), ("bfloat16", float(ml_dtypes.finfo("bfloat16").max))])
def test_overflow_is_infinite_with_its_sign(dtype, largest):
    kind = HALVES[dtype]
    for sign in (1, -1):
        out, x = np.empty(1, kind), np.array([sign * largest], kind)
        reduce(dtype, "sum", [x, x], [out])
        assert np.isinf(out[0]) and np.sign(out[0].astype(np.float32)) == sign
        if dtype == "float16":  # the float32 sum is finite, so the mean is too
            reduce(dtype, "mean", [x, x], [out])
            assert out[0] == x[0]


def test_bfloat16_rounding_of_random_floats_equals_ml_dtypes():
    """Through the mean, whose quotient can be any float32: all bits take part in the rounding."""
    random = np.random.default_rng(0)
    inputs = [random.normal(size=50000).astype(ml_dtypes.bfloat16) for _ in range(3)]
    out = np.empty_like(inputs[0])
    reduce("bfloat16", "mean", inputs, [out])
    assert_same(out, combined(inputs, "mean"))


# Integers


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_mean_truncates_toward_zero(dtype):
    totals = range(-9, 10)
    for n in (2, 3, 4):
        inputs = [np.array(totals, dtype)] + [np.zeros(len(totals), dtype)] * (n - 1)
        out = np.empty(len(totals), dtype)
        reduce(dtype, "mean", inputs, [out])
        assert out.tolist() == [int(total / n) for total in totals]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_mean_of_the_largest_does_not_overflow(dtype):
    for value in (np.iinfo(dtype).max, np.iinfo(dtype).min):
        for n in (2, 3, 5):
            out, x = np.empty(1, dtype), np.array([value], dtype)
            reduce(dtype, "mean", [x] * n, [out])
            assert out[0] == value


def test_means_of_extreme_64_bit_integers_are_exact():
    for dtype, terms in (
        ("uint64", [2**63, 2**62]),
        ("uint64", [2**64 - 3, 1]),
        ("int64", [2**62, 2**61]),
        ("int64", [-(2**62), -(2**62)]),  # the sum is the lowest number, which has no opposite
        ("int64", [-(2**62), -(2**62) + 1]),
    ):
        out = np.empty(1, dtype)
        reduce(dtype, "mean", [np.array([term], dtype) for term in terms], [out])
        assert int(out[0]) == (abs(sum(terms)) // 2) * (1 if sum(terms) > 0 else -1), terms


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_sums_and_products_wrap_around_as_in_numpy(dtype):
    high = np.array([np.iinfo(dtype).max], dtype)
    for op in ("sum", "prod"):
        out = np.empty(1, dtype)
        reduce(dtype, op, [high] * 3, [out])
        assert_same(out, combined([high] * 3, op))


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_unsigned_numbers_are_ordered_as_unsigned(dtype):
    x, y = np.array([np.iinfo(dtype).max, 1], dtype), np.array([1, np.iinfo(dtype).max], dtype)
    out = np.empty(2, dtype)
    reduce(dtype, "max", [x, y], [out])
    assert (out == np.iinfo(dtype).max).all()
    reduce(dtype, "min", [x, y, y], [out])
    assert (out == 1).all()


# NaN, infinity, truth


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["min", "max", "sum", "mean", "prod"])
@pytest.mark.parametrize("n", [2, 3])
def test_nan_wins_wherever_it_is(dtype, op, n):
    for place in range(n):
        inputs = [np.array([1.0], NUMPY[dtype]) for _ in range(n)]
        inputs[place][0] = np.nan
        out = np.empty(1, NUMPY[dtype])
        reduce(dtype, op, inputs, [out])
        assert np.isnan(out[0]), place


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_infinity_stays_infinite(dtype):
    x, y = np.array([np.inf, -np.inf, np.inf], NUMPY[dtype]), np.array([1, 1, -np.inf], NUMPY[dtype])
    out = np.empty(3, NUMPY[dtype])
    reduce(dtype, "sum", [x, y], [out])
    assert np.real(out[0]) == np.inf and np.real(out[1]) == -np.inf and np.isnan(out[2])


def test_any_nonzero_byte_is_true():
    """numpy takes every byte but 0 for True."""
    x, y = np.array([2, 0, 1], np.uint8).view(bool), np.array([1, 0, 4], np.uint8).view(bool)
    out = np.empty(3, bool)
    reduce("bool", "prod", [x, y], [out])
    assert (out.view(np.uint8) != 0).tolist() == [True, False, True]


@pytest.mark.parametrize("dtype, op", [("bool", "mean"), ("complex64", "min"), ("complex128", "max"), ("int8", "xor")])
def test_operations_without_a_meaning_are_refused(dtype, op):
    with pytest.raises(UsageError, match=f"{op}|mean of bool"):
        kernel_operation(dtype, op)
