"""Starts of jobs on two Slurm nodes: by srun, and by MPI's own launcher in an allocation; a wrong --mpi is named."""

from __future__ import annotations

import json

import pytest

from tests.slurm.cluster import Cluster, is_open_mpi

MEET = """\
import socket, sys
import numpy as np
import commlib

world = commlib.init()
node = world.node()
total = world.all_reduce(np.full(100_000, world.rank + 1.0))
assert (total == world.size * (world.size + 1) / 2).all()
print("rank", world.rank, "of", world.size, "is", node.rank, "of", node.size, "on", socket.gethostname(), flush=True)
sys.exit(3 if "fail" in sys.argv else 0)
"""

FOUR = [f"rank {rank} of 4 is {rank % 2} of 2 on h{rank // 2}" for rank in range(4)]


def test_srun_in_a_batch_job(cluster: Cluster, srun: str) -> None:
    """The library found on the login node determines --mpi."""
    program = cluster.program(MEET)
    done = cluster.commlib("run", "-N", "2", "--ntasks-per-node", "2", "--wait", "--", "python", program)
    assert done.returncode == 0, done.stdout + done.stderr
    [number, *lines] = done.stdout.splitlines()
    assert sorted(line for line in lines if line.startswith("rank")) == FOUR
    assert f"srun --mpi={srun} " in (cluster.folder / f"slurm-jobs/{number}.sh").read_text()
    assert done.stderr.splitlines()[-1].startswith(f"job {number}: COMPLETED on h[0-1]")
    protocol = json.loads((cluster.folder / f"slurm-jobs/{number}.json").read_text())
    assert (protocol["exit_code"], protocol["tasks"][0]["nodes"]) == (0, "h[0-1]")


def test_mpirun_in_a_batch_job(cluster: Cluster, mpirun: str) -> None:
    """As with srun; and an exit code that is not 0 is returned to the login node."""
    program = cluster.program(MEET)
    options = ("-N", "2", "--ntasks-per-node", "2", "--mpi", mpirun, "--wait")
    done = cluster.commlib("run", *options, "--", "python", program, "fail")
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == FOUR
    assert done.returncode != 0 and "FAILED" in done.stderr, done.stderr


@pytest.mark.parametrize("protocol", ["none", "another"])
def test_a_wrong_protocol_is_named_and_ends_the_step(cluster: Cluster, protocol: str) -> None:
    """Each rank was rank 0 of 1, all looked fine, and the exit code was 0."""
    if protocol == "another":
        protocol = "pmi2" if is_open_mpi() else "pmix"
    program = cluster.program(MEET)
    done = cluster.run("srun", f"--mpi={protocol}", "-n", "2", "python", program)
    assert done.returncode != 0
    assert "rank 0 of 1" not in done.stdout
    assert "Slurm started 2 tasks, but MPI sees one process" in done.stderr, done.stderr
    assert f"Type srun --mpi={'pmix' if is_open_mpi() else 'pmi2'}" in done.stderr
