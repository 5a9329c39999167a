"""Messages on a node at the end of jobs and groups: ranks that exit or die, groups that are closed."""

from __future__ import annotations

import pytest

from tests.launch.ends import prints

HEAD = """
import os, signal, sys, time
import numpy as np, commlib
from commlib.errors import PeerError
comm = commlib.init()
"""

LEFT = """
many = 20_000
if comm.rank == 0:
    for step in range(many):
        comm.send(np.full(1 + step % 50, step), 1, step % 2)
    {end}
else:
    time.sleep(1.5)
    for tag in (1, 0):
        for step in range(tag, many, 2):
            assert (comm.recv(np.zeros(1 + step % 50, int), 0, tag) == step).all()
    try:
        comm.recv(np.zeros(1), 0)
    except PeerError as error:
        print("received, and then", "rank 0" in str(error))
"""


@pytest.mark.parametrize(
    "end", ["commlib.shutdown()", pytest.param("sys.exit()", marks=pytest.mark.any_mpi)], ids=["shutdown", "exit"]
)
def test_messages_of_a_rank_that_has_exited(mpirun, end):
    """More than one ring of them, all unreceived when it exited."""
    done = mpirun(2, HEAD + LEFT.format(end=end), timeout=60)
    assert (done.returncode, done.stdout) == (0, "received, and then True\n"), done.stderr[-3000:]


GROUPS = """
from tests.oracles.resources import count_resources

x, peer = np.ones(300), 1 - comm.rank
def cycle(step):
    group = comm.split(0)
    if step % 2 == 0:
        for _ in range(5):
            group.send(x, peer, step % 3)
        if step % 4 == 0:  # else nobody receives any of them
            group.recv(np.zeros(300), peer, step % 3)
    comm.barrier()
    group.close()
for step in range(40):
    cycle(step)
before = count_resources()
for step in range(200):
    cycle(step)
after = count_resources()
assert after == before, (before, after)
print("done")
"""


@pytest.mark.any_mpi
def test_closed_groups_discard_unreceived_messages(mpirun):
    """MPICH passed a later group an earlier one's messages, which referred to freed memory."""
    done = mpirun(2, HEAD + GROUPS, timeout=110)
    prints(done, "done", "done")


DIES = """
if comm.rank == 0:
    comm.send(np.ones(3), 1)
    comm.recv(np.zeros(3), 1)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    comm.recv(np.zeros(3), 0)
    comm.send(np.ones(3), 0)
    comm.recv(np.zeros(3), 0)
    print("went on", flush=True)
"""


def test_a_receive_from_a_rank_that_dies_ends(mpirun):
    """With an error, or with the job where the launcher is faster."""
    done = mpirun(2, HEAD + DIES, timeout=60)
    assert done.returncode != 0 and "went on" not in done.stdout, done.stdout
