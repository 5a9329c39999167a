"""Every verb over MPI on arrays of a late device: the same bodies as for the host."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.dtypes import DTYPES
from tests import checks
from tests.late import LATE, LateArray, OnDevice
from tests.oracle import REDUCIBLE

PAIRS = [pair for number, pair in enumerate(REDUCIBLE) if number % 7 == 0]
SHAPES = ((), (0,), (5, 3), (3000,))


@pytest.fixture(autouse=True)
def no_races():
    races = LATE.races
    yield
    assert LATE.races == races


@pytest.mark.parametrize("dtype, op", PAIRS)
def test_reductions(comm, dtype, op):
    there = OnDevice(comm)
    for shape in SHAPES:
        checks.all_reduce(there, dtype, shape, op)
        checks.reduce(there, dtype, shape, op, root=comm.size - 1)
    checks.reduce_scatter(there, dtype, (7, 3), op)


@pytest.mark.parametrize("dtype", DTYPES[::3])
def test_movement(comm, dtype):
    there, size = OnDevice(comm), comm.size
    for shape in SHAPES:
        checks.broadcast(there, dtype, shape, root=size - 1)
        checks.all_gather(there, dtype, shape)
        checks.gather(there, dtype, shape, root=size - 1)
        checks.send_recv(there, dtype, shape)
        checks.send_and_recv(there, dtype, shape, tag=7)
    checks.scatter(there, dtype, (4, 3), root=size - 1)
    checks.all_to_all(there, dtype, (4, 3))
    checks.all_gather_v(there, dtype, list(range(size)), (2,))
    checks.all_to_all_v(there, dtype, [[(a * b + 1) % 4 for b in range(size)] for a in range(size)], (2,))


@pytest.mark.parametrize("algorithm", ["auto", "ring", "native"])
def test_large_arrays_in_pieces(comm, algorithm):
    if algorithm == "native" and comm.native is None:
        pytest.skip("it needs MPI")
    there = OnDevice(comm)
    checks.all_reduce(there, "float32", (3_000_001,), "sum", algorithm)
    checks.broadcast(there, "float32", (3_000_001,), root=comm.size - 1)


def test_async_twins(comm):
    checks.every_verb(OnDevice(checks.Twins(comm)))


def test_plans(comm):
    x, out = LATE.put(np.full(700, comm.rank + 1.0)), LATE.empty((700,), "float64")
    plan = comm.plan_all_reduce(x, out=out)
    for step in range(3):
        assert (plan.start().wait() if step % 2 else plan()) is out
        total = (1 << step) * comm.size * (comm.size + 1) / 2
        np.testing.assert_array_equal(out.numpy(), np.full(700, total))
        LATE.kernels.scale(LATE.wrap(x, "x"), 2)


def test_symmetric_memory(comm):
    x = comm.empty((1000,), "float32", device=LATE)
    assert isinstance(x, LateArray)
    LATE.kernels.fill(LATE.wrap(x, "x"), comm.rank + 1)
    LATE.synchronise()
    comm.barrier()
    place = comm.group.symmetric_on(LATE).find(x.address, 4000)
    for rank, base in enumerate(place[1]):
        np.testing.assert_array_equal(LATE.at(base, (1000,), x.dtype, x).numpy(), np.full(1000, rank + 1))
    comm.barrier()
    assert comm.all_reduce(x, out=x) is x
    np.testing.assert_array_equal(x.numpy(), np.full(1000, comm.size * (comm.size + 1) / 2))
