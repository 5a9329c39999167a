"""Commands whose processes cannot join: started by the launcher of another MPI, each is a world of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.any_mpi

ALONE = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}  # as srun sets it; MPI sees one process


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "all_reduce", "--size", "8"),
        pytest.param(("bench", "pairs"), marks=pytest.mark.long),
        pytest.param(("tune",), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_the_error_is_one_line(launch_environment, tmp_path, words):
    """There was a traceback for each of the processes."""
    command = [sys.executable, "-m", "commlib", *words]
    done = subprocess.run(
        command, env={**launch_environment, **ALONE}, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("commlib")]
    assert lines == done.stderr.splitlines()[-1:]
    assert "Slurm started 4 tasks, but MPI sees one process" in lines[0]


def test_it_ends_the_job_if_others_wait(mpirun):
    program = """
import sys
from mpi4py import MPI
import commlib
from commlib import bootstrap
agree = bootstrap.agree
def failing(transport, *settings):
    if transport.rank == 1:
        raise commlib.UsageError("out of luck")
    return agree(transport, *settings)
bootstrap.agree = failing
sys.argv = ["commlib", "bench", "all_reduce"]
from commlib.cli import main
main()
"""
    done = mpirun(2, program)
    assert done.returncode != 0
    assert "out of luck" in done.stderr
