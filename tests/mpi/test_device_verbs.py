"""Every verb over MPI on arrays of a late device: the same bodies as for the host.

Each runs through host memory, and by messages that MPI reads from and writes to device memory.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from commlib.devices.arrays import as_contiguous
from commlib.dtypes import DTYPES, NUMPY
from commlib.errors import TransportError, UsageError
from commlib.schedule import algorithms
from commlib.transport.base import Space
from commlib.transport.mpi import MpiTransport
from tests.bodies import checks
from tests.late import LATE, LateArray, OnDevice
from tests.oracles.oracle import REDUCIBLE

pytestmark = [pytest.mark.usefixtures("no_races"), pytest.mark.any_mpi, pytest.mark.any_ranks]

PAIRS = [pair for number, pair in enumerate(REDUCIBLE) if number % 7 == 0]
SHAPES = ((), (0,), (5, 3), (3000,))


def is_direct(comm):
    return comm.group.transport.accepts("late")


@pytest.fixture(scope="module")
def comm(both_ways):
    return both_ways


@pytest.mark.parametrize("dtype, op", PAIRS)
def test_reductions(comm, dtype, op):
    on_device = OnDevice(comm)
    for shape in SHAPES:
        checks.all_reduce(on_device, dtype, shape, op)
        checks.reduce(on_device, dtype, shape, op, root=comm.size - 1)
    checks.reduce_scatter(on_device, dtype, (7, 3), op)


@pytest.mark.parametrize("dtype", DTYPES[::3])
def test_movement(comm, dtype):
    on_device, size = OnDevice(comm), comm.size
    for shape in SHAPES:
        checks.broadcast(on_device, dtype, shape, root=size - 1)
        checks.all_gather(on_device, dtype, shape)
        checks.gather(on_device, dtype, shape, root=size - 1)
        checks.send_recv(on_device, dtype, shape)
        checks.send_and_recv(on_device, dtype, shape, tag=7)
    checks.scatter(on_device, dtype, (4, 3), root=size - 1)
    checks.all_to_all(on_device, dtype, (4, 3))
    checks.all_gather_v(on_device, dtype, list(range(size)), (2,))
    checks.all_to_all_v(on_device, dtype, [[(a * b + 1) % 4 for b in range(size)] for a in range(size)], (2,))


@pytest.mark.parametrize("algorithm", ["auto", "ring", "native"])
def test_large_arrays_in_pieces(comm, algorithm):
    on_device = OnDevice(comm)
    checks.all_reduce(on_device, "float32", (1_000_001,), "sum", algorithm)
    checks.broadcast(on_device, "float32", (1_000_001,), root=comm.size - 1)


@pytest.mark.parametrize("dtype, op", REDUCIBLE[::3])
def test_native(comm, dtype, op):
    """MPI's own all-reduce; what it cannot do is refused, as on the host."""
    on_device = OnDevice(comm)
    try:
        comm.all_reduce(np.zeros(3, NUMPY[dtype]), op, algorithm="native")
    except UsageError as error:
        with pytest.raises(UsageError, match=re.escape(str(error))):
            on_device.all_reduce(np.zeros(3, NUMPY[dtype]), op, algorithm="native")
        return
    for shape in SHAPES:
        checks.all_reduce(on_device, dtype, shape, op, "native")


@pytest.mark.ranks(min=2)
def test_native_waits_for_the_device(comm, monkeypatch):
    """Its input is ready; without the wait, every rank gets a wrong result."""
    if not is_direct(comm):
        pytest.skip("through host memory it is that of the host")
    monkeypatch.setattr(LATE, "delay", 0.05)
    expected = np.full(600, comm.size)
    with LATE.using(LATE.stream()):
        result = comm.all_reduce(LATE.put(np.ones(600)), algorithm="native")
        np.testing.assert_array_equal(LATE.wrap(result, "x").copy().owner.numpy(), expected)
        started = comm.all_reduce_async(LATE.put(np.ones(600)), algorithm="native").wait()
        np.testing.assert_array_equal(LATE.wrap(started, "x").copy().owner.numpy(), expected)
        monkeypatch.setattr("commlib.collectives.host.native.wait_for", lambda event, on_wait: None)
        result = comm.all_reduce(LATE.put(np.ones(600)), algorithm="native")
        assert not np.array_equal(result.numpy(), expected)


@pytest.mark.parametrize("verb", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_every_schedule(comm, verb):
    if not is_direct(comm):
        pytest.skip("through host memory they are those of the host")
    for algorithm in algorithms(verb):
        getattr(checks, verb)(OnDevice(comm), "float32", (60,), algorithm=algorithm)


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


def test_split_groups_accept_the_same_devices(comm):
    accepts, transport = is_direct(comm), comm.group.transport
    assert not transport.accepts("cuda")
    half = comm.split(comm.rank % 2)
    parts = half.group.transport, half.private().group.transport, transport.space(Space.MESSAGES)
    assert [part.accepts("late") for part in (*parts, transport.among([comm.rank]))] == [accepts] * 4
    x = LATE.put(np.full(50, comm.rank + 1.0))
    members = range(comm.rank % 2, comm.size, 2)
    np.testing.assert_array_equal(half.all_reduce(x).numpy(), np.full(50, sum(members) + len(members)))
    half.close()


def test_mpi_gets_device_memory_only_where_declared(comm):
    x = as_contiguous(LATE.put(np.zeros(8, np.uint8)), "test")
    plain = MpiTransport(comm.native.Dup())
    with pytest.raises(TransportError, match="memory of late, which this transport does not accept"):
        plain.send(0, 1, x)
    plain.close()


@pytest.mark.ranks(min=2)
def test_a_message_without_a_wait_for_the_device_is_detected(comm, monkeypatch):
    """On every rank: the received data was not ready when another rank sent it."""
    if not is_direct(comm):
        pytest.skip("nothing goes by messages of the device's memory")
    monkeypatch.setattr(LATE, "delay", 0.02)
    checks.all_reduce(OnDevice(comm), "float32", (600,), "sum", "ring")
    monkeypatch.setattr("commlib.execution.streaming.wait_for", lambda event, on_wait: None)
    x = LATE.put(np.ones(600, np.float32))
    result = comm.all_reduce(x, algorithm="ring")
    assert not np.array_equal(result.numpy(), np.full(600, comm.size))
