"""More ranks on a node than cores, by far."""

from __future__ import annotations

import pytest

PROGRAM = """
import commlib
from tests.bodies import checks

comm = commlib.init()
for count in (5, 30_000):
    checks.all_reduce(comm, "float32", (count,), "mean")
    checks.all_reduce(comm, "bfloat16", (count,))
    checks.reduce_scatter(comm, "float32", (count,))
    checks.all_gather(comm, "int64", (count,))
    checks.broadcast(comm, "float32", (count,), root=comm.size - 1)
    checks.all_to_all(comm, "float16", (count // 5,))
    checks.reduce(comm, "float64", (count,), "max", root=3)
    x = comm.empty(count)
    x[:] = comm.rank
    comm.all_reduce(x, out=x)
    assert (x == comm.size * (comm.size - 1) // 2).all()
for _ in range(100):
    comm.barrier()
if comm.rank == 0:
    print("all", comm.size)
"""


@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks", [8, pytest.param(16, marks=pytest.mark.long)])
def test_more_ranks_than_cores(mpirun, ranks):
    done = mpirun(ranks, PROGRAM, timeout=110)
    assert done.returncode == 0, done.stderr
    assert f"all {ranks}" in done.stdout
