"""Every verb over MPI: the same checks as in tests/unit/test_communicator.py, with fewer cases and larger arrays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from commlib.dtypes import DTYPES
from commlib.schedule import algorithms
from tests.bodies import checks
from tests.oracles.oracle import REDUCIBLE
from tests.oracles.reducible import pairs

SHAPES = ((), (0,), (5, 3), (3000,))


@pairs()
def test_reductions(comm, dtype, op):
    for shape in SHAPES:
        checks.all_reduce(comm, dtype, shape, op)
        checks.reduce(comm, dtype, shape, op, root=comm.size - 1)
    checks.reduce_scatter(comm, dtype, (7, 3), op)
    checks.reduce_scatter_v(comm, dtype, [(3 * rank + 2) % 5 for rank in range(comm.size)], (3,), op)
    if op != "mean":
        checks.scan(comm, dtype, (7, 3), op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_movement(comm, dtype):
    size = comm.size
    for shape in SHAPES:
        checks.broadcast(comm, dtype, shape, root=size - 1)
        checks.all_gather(comm, dtype, shape)
        checks.gather(comm, dtype, shape, root=size - 1)
        checks.send_recv(comm, dtype, shape)
        checks.send_and_recv(comm, dtype, shape, tag=7)
    checks.scatter(comm, dtype, (4, 3), root=size - 1)
    checks.all_to_all(comm, dtype, (4, 3))
    checks.all_gather_v(comm, dtype, list(range(size)), (2,))
    checks.all_to_all_v(comm, dtype, [[(a * b + 1) % 4 for b in range(size)] for a in range(size)], (2,))


@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_all_reduce_algorithms(comm, algorithm):
    for count in (0, 1, 1000, 300_000):
        checks.all_reduce(comm, "float32", (count,), "sum", algorithm)
        checks.all_reduce(comm, "bfloat16", (count,), "mean", algorithm)


@pytest.mark.parametrize("verb", ["reduce_scatter", "all_gather", "all_to_all"])
def test_other_algorithms(comm, verb):
    for algorithm in ("auto", *algorithms(verb)):
        for shape in ((0,), (1,), (70_000, 3)):
            getattr(checks, verb)(comm, "int16", shape, algorithm=algorithm)


@pytest.mark.parametrize("verb", ["broadcast", "reduce", "gather", "scatter"])
def test_rooted_algorithms(comm, verb):
    for algorithm in ("auto", *algorithms(verb)):
        for root in range(comm.size):
            for shape in ((0,), (1,), (70_000, 3)):
                getattr(checks, verb)(comm, "int16", shape, root=root, algorithm=algorithm)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_large_arrays(comm, dtype):
    """Through many pieces of the shared slots, and through messages above every eager limit."""
    checks.all_reduce(comm, dtype, (3_000_001,), "mean")
    checks.all_gather(comm, dtype, (300_001,))
    checks.scan(comm, dtype, (300_001,))  # on a node, too, by messages
    checks.broadcast(comm, dtype, (3_000_001,), root=comm.size - 1)
    checks.all_to_all(comm, dtype, (300_001,))
    checks.send_recv(comm, dtype, (3_000_001,))


def test_small_and_large_calls_in_turn(comm):
    """Calls of different kinds share the slots: a fast rank must not overwrite what a slow one still reads."""
    for step in range(300):
        checks.all_reduce(comm, "float64", (3 + step % 5,), "sum")
        checks.all_reduce(comm, "float64", (600 + step,), "max")


def test_async_twins(comm):
    checks.async_twins(comm)


def test_objects(comm):
    for root in range(comm.size):
        checks.objects(comm, root)


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    case=st.sampled_from(REDUCIBLE),
    numbers=st.lists(st.integers(0, 6), min_size=20, max_size=20),
)
def test_any_shape_root_and_split(comm, shape, case, numbers):
    (dtype, op), size, root = case, comm.size, numbers[-1] % comm.size
    checks.all_reduce(comm, dtype, shape, op)
    checks.reduce_scatter(comm, dtype, shape, op)
    checks.reduce(comm, dtype, shape, op, root)
    checks.broadcast(comm, dtype, shape, root)
    checks.gather(comm, dtype, shape, root)
    checks.scatter(comm, dtype, shape, root)
    checks.all_to_all(comm, dtype, shape)
    checks.all_gather_v(comm, dtype, numbers[:size], shape[1:])
    checks.all_to_all_v(comm, dtype, [numbers[a * size : (a + 1) * size] for a in range(size)], shape[1:])


def test_user_messages_never_collide(comm):
    """The same tags, peers and order on MPI.COMM_WORLD, in flight while commlib works."""
    import numpy as np

    world, size = MPI.COMM_WORLD, comm.size
    right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
    for step in range(20):
        theirs, mine = np.full(1000, -1), np.array([comm.rank])
        receive = world.Irecv(theirs, left, tag=0)
        pending = world.Iallreduce(mine, total := np.zeros(1, int))
        work = comm.all_reduce_async(np.full(5000, step))
        out = np.zeros(1000)
        message = comm.recv_async(out, left, tag=0)
        send = comm.send_async(np.full(1000, 1.5 * step), right, tag=0)
        world.Isend(np.full(1000, step), right, tag=0).Wait()
        checks.all_reduce(comm, "float32", (5000,), "sum", "ring")
        receive.Wait()
        pending.Wait()
        send.wait()
        assert (work.wait() == step * size).all()
        assert (theirs == step).all() and total[0] == sum(range(size))
        assert message.wait() is out and (out == 1.5 * step).all()
