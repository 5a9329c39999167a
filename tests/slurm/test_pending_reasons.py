"""`commlib slurm run --wait` ends for a job that Slurm will never start, with the reason and what to do."""

from __future__ import annotations

import pytest

from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.any_mpi


@pytest.fixture(scope="module")
def small(slurm):
    """A partition in which a job may have one node, for a minute."""
    made = ["scontrol", "create", "PartitionName=small", "Nodes=ALL", "MaxNodes=1", "MaxTime=1", "State=UP"]
    done = slurm.run(made, timeout=60)
    assert done.returncode == 0, done.stderr
    return "small"


def refused(cluster: Cluster, *options: str) -> str:
    """Submit a job that never starts and wait for it; return what was said, and remove the job."""
    done = cluster.commlib("run", "--wait", *options, "--", "true")
    job = done.stdout.split()[0]
    try:
        assert done.returncode == 1 and cluster.task(job).state == "PENDING", done.stderr
    finally:
        cluster.run("scancel", job)
    assert f"commlib slurm: job {job} will not start: PENDING (" in done.stderr
    return done.stderr.replace(job, "JOB")


def test_a_partition_too_small(cluster, small):
    said = refused(cluster, "--nodes", "2", "--time", "1", "--partition", small)
    assert "(PartitionNodeLimit)" in said and "another --nodes or --partition" in said
    said = refused(cluster, "--nodes", "1", "--time", "100", "--partition", small)
    assert "(PartitionTimeLimit)" in said and "less --time" in said


def test_a_job_that_is_held(cluster):
    assert "(JobHeldUser): it is held. It stays in the queue. `scontrol release JOB`" in refused(
        cluster, "--time", "1", "--sbatch=--hold"
    )


def test_a_dependency_that_has_failed(cluster):
    job = cluster.submit("run", "--time", "1", "--", "false")
    assert cluster.ended(job).state == "FAILED"
    said = refused(cluster, "--time", "1", f"--sbatch=--dependency=afterok:{job}")
    assert "(DependencyNeverSatisfied): a job that it depends on did not end as required" in said
