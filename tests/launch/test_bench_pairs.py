"""`commlib bench pairs` from the command line."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.any_mpi

BENCH = ("-m", "commlib", "bench", "pairs")
QUICK = ("--rounds", "1", "--iters", "2")


def test_the_matrix_and_the_file(mpirun, tmp_path):
    done = mpirun(3, [*BENCH, *QUICK, "--out", str(tmp_path / "results")], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.split() == ["rank", "0", "1", "2"] for line in lines) == 2  # 8 B and 4 MiB
    assert sum("slowest pair: ranks " in line for line in lines) == 2
    assert "# wrong bytes: 0" in lines
    [file] = (tmp_path / "results").iterdir()
    assert len(json.loads(file.read_text())["matrices"][0]["pairs"]) == 3


def test_values_only_on_standard_output(mpirun):
    done = mpirun(2, [*BENCH, *QUICK, "--size", "64", "--csv"], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    title, line = done.stdout.splitlines()
    assert title.startswith("rank,peer,host") and line.startswith("0,1,")


def test_invalid_options_are_reported_once(mpirun):
    done = mpirun(2, [*BENCH, "--peer", "mpi"])
    assert done.returncode == 2
    assert done.stderr.count("pairs has no --peer") == 1
