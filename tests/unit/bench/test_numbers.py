"""The data of the checks: exact in every dtype, for any number of ranks, and different wherever it matters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlib.bench import numbers
from commlib.dtypes import DTYPES, NUMPY
from tests.oracles.oracle import REDUCIBLE, assert_same, combined

SIZES = st.sampled_from([1, 2, 3, 4, 6, 7, 8, 16, 113, 127, 128, 129, 256, 257, 300, 600])


@pytest.mark.parametrize("dtype, op", REDUCIBLE)
@settings(deadline=None, max_examples=25)
@given(size=SIZES, block=st.integers(0, 5))
def test_the_combination_is_exact(dtype, op, size, block):
    """The oracle rounds as commlib does; a combination without any rounding gives the same."""
    tables = [numbers.reduction_input(dtype, op, rank, size, block) for rank in range(size)]
    expected = numbers.reduction_result(dtype, op, size, block)
    assert_same(combined(tables, op), expected)
    if op != "mean" and dtype != "bool":
        ufunc = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
        in_dtype = tables[0].copy()
        for table in reversed(tables[1:]):  # in another order, rounded to the dtype each time
            in_dtype = ufunc(in_dtype, table)
        assert_same(in_dtype, expected)


@pytest.mark.parametrize("dtype, op", REDUCIBLE)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_missing_or_repeated_rank_is_detected(dtype, op, size):
    expected = numbers.reduction_result(dtype, op, size)
    if op == "mean":
        op = "sum"
        expected = numbers.reduction_result(dtype, op, size)
    tables = [numbers.reduction_input(dtype, op, rank, size) for rank in range(size)]
    for rank in range(size):
        others = [table for other, table in enumerate(tables) if other != rank]
        assert (combined(others, op) != expected).any()
        if dtype != "bool" and op in ("sum", "prod"):  # for the others, twice is once
            assert (combined([*tables, tables[rank]], op) != expected).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_data_encodes_source_and_destination(dtype):
    tables = [numbers.exchange_input(dtype, source, target) for source in range(5) for target in range(5)]
    assert all(table.dtype == NUMPY[dtype] and len(table) == numbers.PERIOD for table in tables)
    assert len({table.tobytes() for table in tables}) == 25
    assert all((np.roll(tables[0], shift) != tables[0]).any() for shift in (1, 16, 64, 100))
