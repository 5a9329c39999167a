"""Groups that are created and dropped throughout a job."""

from __future__ import annotations

import pytest

from tests.launch.ends import prints

# More groups than MPICH has communicators. Open MPI's limit is far off: there this tests the order of freeing.
HEAD = """
import commlib, gc, numpy as np
from mpi4py import MPI
cycles = 420 if "MPICH" in MPI.Get_library_version() else 60
closed = 2000 if "MPICH" in MPI.Get_library_version() else 500
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
kept, handles = [], set()
for step in range(60):
    group = comm.split(comm.rank % 2 if step % 3 else 0, comm.rank)
    assert (group.all_reduce(np.ones(3)) == group.size).all()
    inner = group.split(0)
    handles |= {group.native.py2f(), inner.native.py2f()}
    if step % 20 == 0:
        kept.append((group, inner))  # still in use
    if comm.rank == 0 and step % 7:
        gc.collect()  # ranks drop theirs at different times
for group, inner in kept:
    assert (group.all_reduce(np.ones(3)) == group.size).all() and (inner.all_reduce(np.ones(3)) == inner.size).all()
assert len(handles) < 90, handles  # of 120 communicators: MPI uses those of freed ones again
print("done")
"""


@pytest.mark.parametrize(
    "program", [CYCLES, pytest.param(DROPPED, marks=pytest.mark.long)], ids=["init and shutdown", "dropped"]
)
def test_unused_groups_are_freed(mpirun, program):
    """MPICH has some 2,000 communicators: 300 cycles of init, split and shutdown raised 'Too many'."""
    done = mpirun(2, HEAD + program, timeout=110)
    prints(done, "done", "done")


CLOSED = """
from tests.oracles.resources import count_resources, resident_bytes

comm = commlib.init()
def cycle(step):
    group = comm.split(0)
    if step % 4 == 0:  # one that has been used has a board, a thread and kernels' tables
        assert (group.all_reduce(np.ones(3)) == group.size).all()
        group.all_reduce_async(np.ones(3000)).wait()
    group.close()
for step in range(100):
    cycle(step)
before, size = count_resources(), resident_bytes()
for step in range(closed):
    cycle(step)
after, grown = count_resources(), resident_bytes() - size
assert after == before, (before, after)
assert grown < closed << 12, grown  # a group's board would be 1 MiB, its objects 10 KiB
print("done")
"""


@pytest.mark.long
@pytest.mark.any_mpi
def test_closed_groups_free_everything(mpirun):
    """Memory, descriptors and threads; communicators too: MPICH has fewer than these cycles."""
    done = mpirun(2, HEAD + CLOSED, timeout=110)
    prints(done, "done", "done")


UNUSED = """
from tests.oracles.resources import mappings

comm = commlib.init()
before = mappings()
assert before  # the world's own
groups = [comm.split(0, name=f"group {number}") for number in range(64)]
assert mappings() == before
mesh = commlib.Mesh(a=2, b=-1)
assert mappings() == before
assert (groups[7].all_reduce(np.ones(3)) == comm.size).all() and (mesh["b"].all_reduce(np.ones(3)) == 2).all()
assert mappings() == before + comm.size + mesh["b"].size, (mappings(), before)
print("done")
"""


@pytest.mark.any_mpi
def test_groups_use_no_shared_memory_before_their_first_use(mpirun):
    done = mpirun(4, HEAD + UNUSED)
    prints(done, *["done"] * 4)


LEFT = """
import time
comm = commlib.init()
group = comm.split(0)
if comm.rank == 0:
    try:
        group.all_reduce(np.ones(3))
    except commlib.PeerError as error:
        assert "rank 1 has shut commlib down" in str(error), error
        print("told")
else:
    time.sleep(0.5)
    commlib.shutdown()
    time.sleep(2)
"""


def test_a_group_without_a_board_notices_exited_ranks(mpirun):
    """It uses its parent's board; without farewell messages of their own, 129 groups end in 2 s instead of 20."""
    done = mpirun(2, HEAD + LEFT)
    prints(done, "told")


@pytest.mark.any_mpi
def test_leaving_many_groups_is_fast(mpirun):
    """Between nodes each group took 0.15 s, one after the other, because ranks left them in different orders."""
    done = mpirun(
        4,
        """
import time
import numpy as np
import commlib
comm = commlib.init()
groups = [comm.split(0) for _ in range(64)]
for group in groups:
    group.all_reduce(np.ones(3))
begin = time.perf_counter()
commlib.shutdown()
took = time.perf_counter() - begin
print(f"left in {took:.2f} s" if took < 3 else f"took {took}")
""",
        env={"COMMLIB_NODE_PATH": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left in") == 4, done.stdout
