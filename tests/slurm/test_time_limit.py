"""Slurm's own clock: a signal before the time limit, and the limit. Slurm checks limits twice a minute."""

from __future__ import annotations

import pytest

from ci.slurm import Slurm
from tests.slurm.cluster import Cluster, LimitedJobs

pytestmark = pytest.mark.any_mpi


def test_a_signal_before_the_limit_reaches_the_ranks(slurm: Slurm, limited: LimitedJobs) -> None:
    cluster = Cluster(slurm, limited.folder)
    task = cluster.ended(limited.signalled)
    assert (task.state, task.code) == ("COMPLETED", 0), cluster.output(limited.signalled)
    assert cluster.output(limited.signalled) == "told\ntold\n"


def test_the_limit_notifies_the_ranks_and_ends_the_job(slurm: Slurm, limited: LimitedJobs) -> None:
    cluster = Cluster(slurm, limited.folder)
    task = cluster.ended(limited.too_long)
    assert task.state == "TIMEOUT" and task.code != 0
    lines = cluster.output(limited.too_long).splitlines()
    assert lines.count("ended") == 2, lines  # lines of srun, which ends the step, may come between
