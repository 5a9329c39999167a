"""Benchmarks in Slurm jobs: results are written to files; the next job resumes an interrupted sweep."""

from __future__ import annotations

import json

import pytest

from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.any_mpi, pytest.mark.long]  # test_page.py has a job of each kind

JOB = ("-N", "2", "--ntasks-per-node", "1", "--time", "5")
QUICK = ("--rounds", "2", "--iters", "2")

PLAN = """\
verbs = ["all_reduce", "barrier"]
sizes = ["4K"]
nodes = [1, 2]
rounds = 2
iters = 2
"""


def test_a_benchmark_of_a_verb(cluster: Cluster, srun: str) -> None:
    case = ("all_reduce", "--size", "4K", "--size", "64K", "--peer", "mpi")
    done = cluster.commlib("bench", *JOB, "--wait", "--", *case, *QUICK)
    assert done.returncode == 0, done.stdout + done.stderr
    [number, *lines] = done.stdout.splitlines()
    assert any("65536" in line for line in lines), done.stdout
    [record] = (cluster.folder / f"slurm-jobs/{number}").glob("*.json")
    files = json.loads(record.read_text())
    text = json.dumps(files)
    assert f'"SLURM_JOB_ID": "{number}"' in text and '"h0"' in text and '"h1"' in text
    assert f"results in slurm-jobs/{number}/{record.name}\n" in done.stderr


def test_the_next_job_resumes_a_sweep(cluster: Cluster, srun: str) -> None:
    (cluster.folder / "plan.toml").write_text(PLAN)
    results = cluster.folder / "slurm-jobs/plan.jsonl"
    done = cluster.commlib("bench", *JOB, "--wait", "--", "sweep", "plan.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    before = results.read_text()
    assert len(before.splitlines()) > 4
    complete_lines = before.splitlines(keepends=True)[:-1]
    results.write_text("".join(complete_lines) + '{"torn')  # as a kill leaves it
    done = cluster.commlib("bench", *JOB, "--wait", "--", "sweep", "plan.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    after = results.read_text()
    assert after.startswith("".join(complete_lines)) and '{"torn' not in after
    assert len(after.splitlines()) >= len(before.splitlines())
