"""MPI's own all-reduce, by name, and as an oracle."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from commlib.dtypes import accumulator_dtype
from commlib.errors import UsageError
from tests.bodies import checks
from tests.oracles.oracle import REDUCIBLE, values
from tests.oracles.reducible import pairs

NATIVE = [(dtype, op) for dtype, op in REDUCIBLE if accumulator_dtype(dtype, op) == dtype]
REFUSED = [case for case in REDUCIBLE if case not in NATIVE]


@pairs(NATIVE)
def test_native(comm, dtype, op):
    for shape in ((), (0,), (5, 3), (3000,)):
        checks.all_reduce(comm, dtype, shape, op, "native")


def test_native_in_pieces(comm):
    checks.all_reduce(comm, "float64", (400_001,), "sum", "native")  # 3.2 MB: four pieces


@pairs(REFUSED)
def test_dtypes_that_mpi_would_round_repeatedly_are_refused(comm, dtype, op):
    with pytest.raises(UsageError, match=f"'native': MPI cannot reduce {dtype} by {op} without losing digits"):
        comm.all_reduce(values(dtype, 3, 0), op, algorithm="native")


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex128"])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "native"])
def test_results_match_mpi(comm, dtype, algorithm):
    for count in (1, 1000, 200_000):
        x = values(dtype, count, comm.rank)
        expected = np.empty_like(x)
        MPI.COMM_WORLD.Allreduce(x, expected, MPI.SUM)
        np.testing.assert_array_equal(comm.all_reduce(x, algorithm=algorithm), expected)
