"""Arrays on GPUs between hosts, on the stand-in for CuPy: run by all ranks on several hosts; test_gpus.py starts it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bodies import checks
from tests.cuda import standin
from tests.cuda.gpu import Gpu
from tests.cuda.gpu import gpu as find
from tests.late import OnDevice


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return find()


@pytest.fixture
def on_device(comm, gpu):
    races = standin.ENGINE.races
    yield OnDevice(comm, gpu)
    assert standin.ENGINE.races == races and not standin.VIOLATIONS


@pytest.mark.parametrize("dtype, op", [("float32", "sum"), ("bfloat16", "mean"), ("int8", "mean"), ("bool", "max")])
def test_all_reduce(on_device, dtype, op):
    for shape in ((), (0,), (5, 3), (3000,), (300_001,)):
        checks.all_reduce(on_device, dtype, shape, op)
    checks.all_reduce(on_device, dtype, (3000,), op, "hierarchical")


@pytest.mark.parametrize("dtype, op", [("float32", "sum"), ("bfloat16", "mean"), ("int8", "mean"), ("bool", "max")])
def test_reduce_scatter(on_device, dtype, op):
    for shape in ((0, 3), (5, 3), (100_001, 3)):
        checks.reduce_scatter(on_device, dtype, shape, op)
    checks.reduce_scatter(on_device, dtype, (3000,), op, "hierarchical")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "complex128"])
def test_movement(on_device, dtype):
    for shape in ((), (0,), (5, 3), (100_001,)):
        for root in range(on_device.size):
            checks.broadcast(on_device, dtype, shape, root)
        checks.all_gather(on_device, dtype, shape)
    for part in ((0,), (5, 3), (20_001,)):
        checks.all_to_all(on_device, dtype, part)
    for verb in (checks.broadcast, checks.all_gather, checks.all_to_all):
        verb(on_device, dtype, (3000,), algorithm="hierarchical")


def test_async_twins(comm, gpu):
    checks.every_verb(OnDevice(checks.Twins(comm), gpu))


def test_the_bytes_that_leave_the_gpus(comm, gpu, monkeypatch):
    """Each rank of a node sends its share of the node's sum, and no more."""
    copied, copy = [], gpu.device.copy

    def counting(target, source):
        if isinstance(source, np.ndarray) or isinstance(target, np.ndarray):
            copied.append(target.nbytes)
        copy(target, source)

    x = gpu.put(np.full(300_000, comm.rank + 1.0, np.float32))
    comm.all_reduce(x)
    comm.barrier()
    monkeypatch.setattr(gpu.device, "copy", counting)
    result = comm.all_reduce(x)
    comm.barrier()
    on_device = sum(copied)
    monkeypatch.undo()
    np.testing.assert_array_equal(gpu.fetch(result), comm.size * (comm.size + 1) / 2)
    whole, rails = 4 * 300_000, comm.group.topology.rails
    on_rail = comm.group.hierarchy.place < rails
    assert abs(on_device - 2 * whole / rails * on_rail) <= 64  # out, and in again


def test_all_other_verbs(on_device):
    checks.every_verb(on_device)
