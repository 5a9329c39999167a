"""Groups come and go for as long as a job lasts."""

from __future__ import annotations

import pytest

# More groups than MPICH has communicators for. Open MPI's limit is far: there the order of freeing is tested.
HEAD = """
import commlib, gc, numpy as np
from mpi4py import MPI
cycles = 420 if "MPICH" in MPI.Get_library_version() else 60
"""

CYCLES = """
for step in range(cycles):
    comm = commlib.init()
    group = comm.split(comm.rank % 2, comm.rank)
    assert (comm.all_reduce(np.ones(3)) == comm.size).all()
    commlib.shutdown()
print("done")
"""

DROPPED = """
comm = commlib.init()
kept = []
for step in range(cycles):
    group = comm.split(comm.rank % 2 if step % 3 else 0, comm.rank)
    assert (group.all_reduce(np.ones(3)) == group.size).all()
    inner = group.split(0)
    if step % 20 == 0:
        kept.append((group, inner))  # still in use
    if comm.rank == 0 and step % 7:
        gc.collect()  # ranks drop theirs at different times
for group, inner in kept:
    assert (group.all_reduce(np.ones(3)) == group.size).all() and (inner.all_reduce(np.ones(3)) == inner.size).all()
print("done")
"""


@pytest.mark.parametrize("program", [CYCLES, DROPPED], ids=["init and shutdown", "dropped"])
def test_groups_that_are_no_longer_used_are_freed(mpirun, program):
    """MPICH has some 2,000 communicators: with 300 cycles of init, split and shutdown there were 'Too many'."""
    done = mpirun(2, HEAD + program, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["done"] * 2
