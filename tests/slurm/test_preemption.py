"""Training that Slurm interrupts: it resumes exactly where it was, or saves its state before it is cancelled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster

EXAMPLE = Path(__file__).parents[2] / "examples/cluster/requeue_torch.py"
STEPS = "500"

# Handles SIGTERM, too: Slurm sends that before SIGKILL.
STOPS = """\
import signal
from pathlib import Path
import numpy as np
import commlib

with commlib.Preemption((signal.SIGUSR1, signal.SIGTERM)) as preemption:
    world = commlib.init()
    step = 0
    while not preemption.requested():
        world.all_reduce(np.ones(4), "mean")
        step += 1
        Path(f"ready.{world.rank}").touch()
    Path(f"saved.{world.rank}").write_text(str(step))
    preemption.leave()
"""


@pytest.mark.any_mpi
@pytest.mark.long
def test_an_interrupted_training_ends_with_the_same_weights(cluster: Cluster, srun: str) -> None:
    options = ("-N", "2", "--signal", "USR1@60", "--requeue", "--mpi", srun)
    weights = {}
    for name in ("whole", "interrupted"):
        command = ("python", str(EXAMPLE), "--steps", STEPS, "--checkpoints", name)
        job = cluster.submit("run", *options, "--", *command)
        if name == "interrupted":
            cluster.until_printed(job, "from step 0 on")
            cluster.run("scancel", "--batch", "--signal=USR1", job)
        assert cluster.ended(job).code == 0, cluster.output(job)
        [weights[name]] = re.findall(r"^weights (\w+)$", cluster.output(job), re.MULTILINE)
    begun = re.findall(r"from step (\d+) on", cluster.output(job))
    assert begun[0] == "0" and 0 < int(begun[1]) < int(STEPS)
    assert weights["whole"] == weights["interrupted"]


@pytest.mark.parametrize("way", ["srun", pytest.param("mpirun", marks=pytest.mark.long)])
def test_all_ranks_save_before_a_job_is_cancelled(cluster: Cluster, request: pytest.FixtureRequest, way: str) -> None:
    """Slurm kills the remaining processes when the script ends, so the script waits for the ranks."""
    program = cluster.program(STOPS)
    job = cluster.submit("run", "-N", "2", "--mpi", request.getfixturevalue(way), "--", "python", program)
    cluster.until_files(job, "ready.0", "ready.1")
    cluster.run("scancel", job)
    task = cluster.ended(job)
    assert (task.state, task.restarts) == ("CANCELLED", 0)
    steps = [(cluster.folder / f"saved.{rank}").read_text() for rank in range(2)]
    assert steps[0] == steps[1]
