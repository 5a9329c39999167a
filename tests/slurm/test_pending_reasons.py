"""`commlib slurm run --wait`: it ends for a job that Slurm will never start, with the reason and the remedy."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.any_mpi


@pytest.fixture(scope="module")
def small(slurm):
    """A partition in which a job may have one node, for a minute."""
    create = ["scontrol", "create", "PartitionName=small", "Nodes=ALL", "MaxNodes=1", "MaxTime=1", "State=UP"]
    done = slurm.run(create, timeout=60)
    assert done.returncode == 0, done.stderr
    return "small"


def refused(cluster: Cluster, *options: str) -> str:
    """Submit a job that never starts and wait for it; return the message, and remove the job."""
    done = cluster.commlib("run", "--wait", *options, "--", "true")
    job = done.stdout.split()[0]
    try:
        assert done.returncode == 1 and cluster.task(job).state == "PENDING", done.stderr
    finally:
        cluster.run("scancel", job)
    assert f"commlib slurm: job {job} will not start: PENDING (" in done.stderr
    return done.stderr.replace(job, "JOB")


def test_a_partition_too_small(cluster, small):
    message = refused(cluster, "--nodes", "2", "--time", "1", "--partition", small)
    assert "(PartitionNodeLimit)" in message and "another --nodes or --partition" in message
    message = refused(cluster, "--nodes", "1", "--time", "100", "--partition", small)
    assert "(PartitionTimeLimit)" in message and "less --time" in message


def test_a_held_job(cluster):
    assert "(JobHeldUser): it is held. It stays in the queue. `scontrol release JOB`" in refused(
        cluster, "--time", "1", "--sbatch=--hold"
    )


def test_a_failed_dependency(cluster):
    job = cluster.submit("run", "--time", "1", "--", "false")
    assert cluster.ended(job).state == "FAILED"
    message = refused(cluster, "--time", "1", f"--sbatch=--dependency=afterok:{job}")
    assert "(DependencyNeverSatisfied): a job that it depends on did not end as required" in message
