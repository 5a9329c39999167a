"""Ends of Slurm jobs: cancelled, by a failing rank, or requested by a signal and then requeued."""

from __future__ import annotations

import re

import pytest

from tests.slurm.cluster import Cluster

WAYS = ["srun", pytest.param("mpirun", marks=pytest.mark.long)]  # fixtures that name the launcher

BUSY = """\
from pathlib import Path
import commlib

world = commlib.init()
x = world.empty(1000)
world.all_reduce(x, out=x)
Path(f"ready.{world.rank}").touch()
while True:
    world.all_reduce(x, out=x)
"""

FAILS = """\
import numpy as np
import commlib

world = commlib.init()
world.barrier()
if world.rank == 1:
    raise ValueError("bad data")
world.all_reduce(np.ones(4))
"""

STEPS = """\
import time
from pathlib import Path
import numpy as np
import commlib

with commlib.Preemption() as preemption:
    world = commlib.init()
    saved = Path(f"saved.{world.rank}")
    resumed = saved.exists()
    step = int(saved.read_text()) if resumed else 0
    print("rank", world.rank, "begins at step", step, flush=True)
    last = step + 5 if resumed else None
    while step != last:
        world.all_reduce(np.ones(4), "mean")
        step += 1
        Path(f"ready.{world.rank}").touch()
        if preemption.requested():
            saved.write_text(str(step))
            preemption.leave()
print("rank", world.rank, "ends after step", step, flush=True)
"""


@pytest.mark.parametrize("way", [pytest.param("srun", marks=pytest.mark.long), "mpirun"])  # srun: test_preemption.py
def test_scancel_ends_all_ranks(cluster: Cluster, request: pytest.FixtureRequest, way: str) -> None:
    """Each rank gets SIGTERM in the middle of a collective; no process remains."""
    program = cluster.program(BUSY)
    options = ("-N", "2", "--ntasks-per-node", "1", "--mpi", request.getfixturevalue(way))
    job = cluster.submit("run", *options, "--", "python", program)
    cluster.until_files(job, "ready.0", "ready.1")
    ranks = f"pgrep -xf '[^ ]*python {program}'"  # hosts have one namespace of processes
    assert len(cluster.on("h0", ranks).split()) == 2
    cluster.run("scancel", job)
    assert cluster.ended(job).state == "CANCELLED"
    assert cluster.on("h0", ranks) == ""


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_fails_ends_the_job(cluster: Cluster, request: pytest.FixtureRequest, way: str) -> None:
    program = cluster.program(FAILS)
    options = ("-N", "2", "--ntasks-per-node", "1", "--mpi", request.getfixturevalue(way))
    done = cluster.commlib("run", *options, "--wait", "--", "python", program)
    assert done.returncode != 0 and "FAILED" in done.stderr
    assert "ValueError: bad data" in done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_makes_all_ranks_save_and_requeues_the_job(
    cluster: Cluster, request: pytest.FixtureRequest, way: str
) -> None:
    """The signal reaches the batch script only, as with --signal=B:USR1@...; all ranks exit at the same step."""
    program = cluster.program(STEPS)
    options = ("-N", "2", "--ntasks-per-node", "1", "--signal", "USR1@60", "--requeue")
    job = cluster.submit("run", *options, "--mpi", request.getfixturevalue(way), "--", "python", program)
    cluster.until_files(job, "ready.0", "ready.1")
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.until_state(job, "PENDING")
    steps = [(cluster.folder / f"saved.{rank}").read_text() for rank in range(2)]
    assert steps[0] == steps[1] != "0"
    task = cluster.ended(job)
    assert (task.state, task.restarts) == ("COMPLETED", 1), cluster.output(job)
    begins = re.findall(r"rank (\d) begins at step (\d+)", cluster.output(job))
    assert sorted(begins) == sorted([("0", "0"), ("1", "0"), ("0", steps[0]), ("1", steps[0])])
    assert cluster.output(job).count("ends after step") == 2


@pytest.mark.any_mpi
def test_an_array_has_an_exit_code_and_an_output_per_task(cluster: Cluster) -> None:
    command = ("sh", "-c", 'echo "$0"; exit "$0"', "$SLURM_ARRAY_TASK_ID")
    done = cluster.commlib("run", "--array", "0-3%2", "--mpi", "srun", "--wait", "--", *command)
    assert done.returncode == 3, done.stderr
    job = done.stdout.split()[0]
    for task in range(4):
        path = f"slurm-jobs/{job}_{task}.out"
        assert f"exit code {task}, output in {path}" in done.stderr
        assert (cluster.folder / path).read_text().splitlines().count(str(task)) == 1


@pytest.mark.any_mpi
def test_slurms_refusal_is_reported(cluster: Cluster) -> None:
    done = cluster.commlib("run", "--partition", "none", "--submit", "--", "true")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("commlib slurm: sbatch refuses the job: invalid partition specified: none")
    done = cluster.commlib("wait", "999", "--folder", ".")
    assert done.returncode == 1
    assert "Slurm no longer knows job 999: Slurm accounting storage is disabled" in done.stderr
