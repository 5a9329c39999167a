"""Checks that hold between hosts in every layout, run by all ranks on one of them; test_hosts.py starts it.

Not called test_*.py, because on one host tests/mpi tests the same.
"""

from __future__ import annotations

import numpy as np
import pytest

import commlib
from commlib.dtypes import OPERATIONS
from commlib.errors import MismatchError, StallError
from tests.bodies import checks
from tests.oracles.oracle import REDUCIBLE

DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "uint8", "bool", "complex64"]
SHAPES = ((), (0,), (1,), (5, 3), (3000,))


def test_the_last_axis_of_a_mesh_stays_on_a_host(comm):
    with commlib.Mesh(dp=2, tp=-1) as mesh:
        assert mesh["tp"].one_node and not mesh["dp"].one_node
        assert mesh.picture() == mesh.shape.picture(ranks_per_node=2)
        assert "tp   │ 2    │ 2      │ inside" in mesh.picture()


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(comm, dtype):
    for op in OPERATIONS:
        if (dtype, op) in REDUCIBLE:
            for shape in SHAPES:
                checks.all_reduce(comm, dtype, shape, op)
            checks.reduce(comm, dtype, (5, 3), op, root=comm.size - 1)
            checks.reduce_scatter(comm, dtype, (7, 3), op)


@pytest.mark.parametrize("dtype", DTYPES)
def test_movement(comm, dtype):
    size = comm.size
    for shape in SHAPES:
        checks.broadcast(comm, dtype, shape, root=size - 1)
        checks.all_gather(comm, dtype, shape)
        checks.gather(comm, dtype, shape, root=size - 1)
        checks.send_recv(comm, dtype, shape)
    checks.scatter(comm, dtype, (4, 3), root=size - 1)
    checks.all_to_all(comm, dtype, (4, 3))
    checks.all_gather_v(comm, dtype, list(range(size)), (2,))
    checks.all_to_all_v(comm, dtype, [[(a * b + 1) % 4 for b in range(size)] for a in range(size)], (2,))


def test_a_mismatch_after_many_calls_names_the_ranks(comm):
    """Too late to be compared in advance: it is found once the ranks have waited for each other."""
    group, last = comm.split(0), comm.size - 1
    for _ in range(80):
        group.barrier()
    with pytest.raises(MismatchError) as caught:
        group.all_reduce(np.ones(3), "max" if comm.rank == last else "sum")
    text = str(caught.value)
    assert f"rank {comm.rank}: all_reduce of 3 x float64" in text and "op=max" in text and "op=sum" in text
    assert comm.rank == last or f"rank {last}: " in text
    checks.all_reduce(comm, "float32", (3000,))  # other groups are not affected


def test_a_late_rank_on_another_host_is_waited_for(comm):
    work = comm.barrier_async() if comm.rank < comm.size - 1 else None
    if work is not None:
        with pytest.raises(StallError, match=r"barrier: not done after 1.5 s"):
            work.wait(1.5)
        comm.send(np.zeros(1), comm.size - 1)
    else:
        for rank in range(comm.size - 1):
            comm.recv(np.zeros(1), rank)
        work = comm.barrier_async()
    work.wait()
    checks.all_reduce(comm, "float32", (5,))
