"""`commlib info` under srun: Slurm's and MPI's facts agree on two hosts; a wrong protocol is named."""

from __future__ import annotations

import json

import pytest

from tests.slurm.cluster import Cluster, is_open_mpi

INFO = ("python", "-m", "commlib", "info")


def test_ranks_and_the_network(cluster: Cluster, srun: str) -> None:
    done = cluster.run("srun", f"--mpi={srun}", "-N", "2", "--ntasks-per-node=2", *INFO, "--json")
    assert done.returncode == 0, done.stderr
    info = json.loads(done.stdout)
    assert [rank["start"]["local_rank"] for rank in info["ranks"]] == [0, 1, 0, 1]
    assert [rank["start"]["node"] for rank in info["ranks"]] == [0, 0, 1, 1]
    assert [(rank["start"]["local_size"], rank["on_node"]) for rank in info["ranks"]] == [(2, 2)] * 4
    assert info["start"]["command"] == f"srun --mpi={srun}" and info["slurm"] == {
        "KillOnBadExit": "0",
        "MpiDefault": "none",
    }
    assert info["network"]["node"]["ranks"] == [0, 1] and info["network"]["between"]["ranks"] == [0, 2]
    assert [problem["cure"] for problem in info["problems"] if "kill-on-bad-exit" in problem["cure"]]


@pytest.mark.long
@pytest.mark.parametrize("protocol", ["none", "pmi2" if is_open_mpi() else "pmix"])
def test_the_wrong_protocol(cluster: Cluster, protocol: str) -> None:
    done = cluster.run("srun", f"--mpi={protocol}", "-n", "2", *INFO)
    assert done.returncode != 0
    assert done.stdout.count("commlib   ") == 1, done.stdout + done.stderr
    assert "- error: Slurm started 2 tasks, but MPI sees one process" in done.stdout
    assert f"type: srun --mpi={'pmix' if is_open_mpi() else 'pmi2'}" in done.stdout
