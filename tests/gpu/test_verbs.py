"""Every verb on arrays of a GPU, between the memories of the ranks' GPUs and through the host."""

from __future__ import annotations

import numpy as np
import pytest

from commlib.dtypes import DTYPES
from tests.bodies import checks
from tests.late import OnDevice
from tests.oracles.oracle import REDUCIBLE

SHAPES = ((), (0,), (5, 3), (3000,), (70_001,))


@pytest.fixture
def on_gpu(comm, gpu):
    return OnDevice(comm, gpu)


@pytest.mark.parametrize("dtype, op", REDUCIBLE)
def test_reductions(on_gpu, dtype, op):
    for shape in SHAPES:
        checks.all_reduce(on_gpu, dtype, shape, op)
    checks.reduce(on_gpu, dtype, (70_001,), op, root=on_gpu.size - 1)
    checks.reduce_scatter(on_gpu, dtype, (30_000, 3), op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_movement(on_gpu, dtype):
    size = on_gpu.size
    for shape in SHAPES:
        checks.broadcast(on_gpu, dtype, shape, root=size - 1)
        checks.all_gather(on_gpu, dtype, shape)
        checks.gather(on_gpu, dtype, shape, root=size - 1)
        checks.send_recv(on_gpu, dtype, shape)
        checks.send_and_recv(on_gpu, dtype, shape, tag=7)
    checks.scatter(on_gpu, dtype, (4, 3), root=size - 1)
    checks.all_to_all(on_gpu, dtype, (4, 30_000))
    checks.all_gather_v(on_gpu, dtype, list(range(size)), (2,))
    checks.all_to_all_v(on_gpu, dtype, [[(a * b + 1) % 4 for b in range(size)] for a in range(size)], (2,))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_scatter(on_gpu, dtype):
    """Longer than a rank's part of a slot."""
    for root in range(on_gpu.size):
        for part in ((0,), (3,), (100_001, 3)):
            checks.scatter(on_gpu, dtype, part, root)


def test_long_messages(on_gpu):
    """In pieces: out of the GPU, to the other rank and into its GPU."""
    checks.send_recv(on_gpu, "float32", (1_500_001,))
    checks.send_and_recv(on_gpu, "float64", (700_001,), tag=7)


def test_async_twins(comm, gpu):
    checks.every_verb(OnDevice(checks.Twins(comm), gpu))


@pytest.mark.parametrize("count", [1000, 300_000])
def test_symmetric_memory(comm, gpu, count):
    """Reduced in place in its own memory, repeatedly, among ordinary arrays of the same kind."""
    size = comm.size
    x, y = comm.empty((count,), "float32", device="cuda"), gpu.device.empty((count,), "float32")
    assert not gpu.fetch(x).any()
    for step in range(3):
        for array in (x, y):
            gpu.fill(array, comm.rank + step)
            assert comm.all_reduce(array, out=array) is array
            expected = np.full(count, size * (size - 1) / 2 + size * step, np.float32)
            np.testing.assert_array_equal(gpu.fetch(array), expected)


def test_ranks_with_arrays_of_different_kinds(comm, gpu):
    """One rank's is symmetric and another's is not: all see that, and the result is the same."""
    size, count = comm.size, 100_000
    x = comm.empty((count,), "float32", device=gpu.device)
    array = gpu.device.empty((count,), "float32") if comm.rank == size - 1 else x
    gpu.fill(array, comm.rank + 1)
    np.testing.assert_array_equal(gpu.fetch(comm.all_reduce(array)), np.full(count, size * (size + 1) / 2, np.float32))


def test_large_exchanges_of_symmetric_memory(comm, gpu):
    size, rows = comm.size, 40_000
    x = comm.empty((size * rows,), "float32", device=gpu.device)
    mine = np.arange(size * rows, dtype=np.float32) + 1000 * comm.rank
    gpu.device.copy(gpu.device.wrap(x, "x"), gpu.device.wrap(gpu.put(mine), "mine"))
    everyone = [np.arange(size * rows, dtype=np.float32) + 1000 * rank for rank in range(size)]
    part = slice(comm.rank * rows, (comm.rank + 1) * rows)
    np.testing.assert_array_equal(gpu.fetch(comm.reduce_scatter(x)), np.sum(everyone, axis=0)[part])
    np.testing.assert_array_equal(gpu.fetch(comm.all_to_all(x)), np.concatenate([each[part] for each in everyone]))
    np.testing.assert_array_equal(gpu.fetch(comm.all_gather(x)), np.concatenate(everyone))
    comm.all_gather(x[part], out=x)
    np.testing.assert_array_equal(
        gpu.fetch(x), np.concatenate([each[rank * rows : (rank + 1) * rows] for rank, each in enumerate(everyone)])
    )
    gpu.fill(x, comm.rank)
    comm.broadcast(x, root=size - 1)
    np.testing.assert_array_equal(gpu.fetch(x), np.full(size * rows, size - 1, np.float32))


def test_plans(comm, gpu):
    x, out = gpu.put(np.full(700, comm.rank + 1.0)), gpu.device.empty((700,), "float64")
    plan = comm.plan_all_reduce(x, out=out)
    for step in range(3):
        assert (plan.start().wait() if step % 2 else plan()) is out
        np.testing.assert_array_equal(gpu.fetch(out), np.full(700, comm.size * (comm.size + 1) / 2))
