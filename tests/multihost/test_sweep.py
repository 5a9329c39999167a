"""A sweep over several hosts within one job: worlds of fewer nodes, and of fewer ranks on each."""

from __future__ import annotations

import json
import sys

import pytest

from ci.hosts import Hosts


@pytest.mark.long  # one host shows the same on every run
@pytest.mark.any_mpi
def test_worlds_of_fewer_hosts_and_ranks(tmp_path):
    plan, out = tmp_path / "plan.toml", tmp_path / "results.jsonl"
    plan.write_text(
        'verbs = ["all_reduce"]\nsizes = ["4K"]\nnodes = [1, "all", 3]\nranks_per_node = [1, 2]\n'
        'peers = ["mpi"]\nrounds = 1\niters = 2\n'
    )
    with Hosts(2, rate="1gbit") as hosts:
        command = [sys.executable, "-m", "commlib", "bench", "sweep", str(plan), "--out", str(out)]
        assert hosts.run(command, ranks_per_host=[3, 2], timeout=120).returncode == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["facts"]["ranks_of_nodes"] == [3, 2]
    cases = [line for line in lines if line["kind"] == "case"]
    assert [(line["case"]["nodes"], line["case"]["ranks_per_node"]) for line in cases] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    assert [line["status"] for line in cases] == ["ok"] * 4
    assert [line["row"]["ranks"] for line in cases] == [1, 2, 2, 4]
