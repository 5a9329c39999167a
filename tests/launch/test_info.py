"""`commlib info` in jobs: rank 0 tells it for all, traps are seen where they are, and a wrong launcher is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.launch.test_start import other_mpiexec

INFO = ["-m", "commlib", "info"]


def test_rank_0_tells_it_for_all(mpirun):
    done = mpirun(2, [*INFO, "--json"])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert {rank["on_node"] for rank in told["ranks"]} == {2}
    assert told["start"]["size"] == 2 and [rank["start"]["local_rank"] for rank in told["ranks"]] == [0, 1]
    assert told["mpi"]["threads"] == "MULTIPLE" and told["mpi"]["vendor"] in ("Open MPI", "MPICH")
    node = told["network"]["node"]
    assert node["ranks"] == [0, 1] and 0 < node["seconds"] < 1 and node["bandwidth"] > 1e6
    assert told["network"]["between"] is None and set(told["network"]["all_reduce"]) == {"8", "1048576"}


def test_ranks_that_differ_and_settings_that_do_not_fit(mpirun):
    """The others' settings are wrong for `init`: that is told, and all the rest is told nevertheless."""
    program = """
import os, resource, runpy, sys
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.environ["COMMLIB_SLOT_KIB"] = "4"
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
sys.argv = ["commlib", "info"]
runpy.run_module("commlib", run_name="__main__")
"""
    done = mpirun(2, program, env={"COLUMNS": "1000"})
    assert done.returncode != 0
    assert done.stdout.count("What is wrong:") == 1, done.stdout + done.stderr
    assert "COMMLIB_SLOT_KIB: 512 (default) on rank 0; 4 (environment) on rank 1" in done.stdout
    assert "- warning: rank 1: at most 300 open files" in done.stdout
    assert re.search(r"- warning: the limit nofile differs: \d+ on rank 0; 300 on rank 1", done.stdout)


def test_ranks_that_are_bound_to_a_core(mpirun):
    """What Open MPI does by itself with up to two ranks."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("there is one core")
    program = """
import os, runpy, sys
os.sched_setaffinity(0, {int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))})
sys.argv = ["commlib", "info"]
runpy.run_module("commlib", run_name="__main__")
"""
    done = mpirun(2, program, env={"COLUMNS": "1000"})
    assert done.returncode == 0, done.stderr
    assert "bound (rank 0: 0; rank 1: 1)" in done.stdout
    pytest.importorskip("torch")
    assert "- warning: ranks 0-1: bound to a single core" in done.stdout and "bind-to none" in done.stdout


def test_the_launcher_of_another_mpi_is_told_once(launch_environment):
    mpiexec = other_mpiexec()
    if mpiexec is None:
        pytest.skip("there is one MPI only")
    done = subprocess.run(
        [str(mpiexec), "-n", "3", sys.executable, *INFO],
        env={**launch_environment, "COLUMNS": "1000"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stdout.count("commlib   ") == 1, done.stdout + done.stderr
    assert "- error: " in done.stdout and "started 3 processes, but MPI sees one" in done.stdout
    assert re.search(r"type: \S*mpiexec -n 3 \S*python\S* -m commlib info, or make Python load", done.stdout)


def test_srun_with_the_wrong_protocol(launch_environment):
    """Every process is a rank 0 of 1 then; the first one tells it, and the others say nothing."""
    for task in ("0", "2"):
        step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": task, "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": task}
        done = subprocess.run(
            [sys.executable, *INFO],
            env={**launch_environment, **step, "COLUMNS": "1000"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if task == "0":
            assert done.returncode == 1, done.stderr
            assert "- error: Slurm started 4 tasks, but MPI sees one process" in done.stdout
            assert "type: srun --mpi=pm" in done.stdout
        else:
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_start_that_hangs(launch_environment):
    """A launcher is said to be there, and its daemon does not answer."""
    program = """
import runpy, sys, time
from commlib import launch
launch.load_mpi = lambda: time.sleep(100)
sys.argv = ["commlib", "info", "--timeout", "1"]
runpy.run_module("commlib", run_name="__main__")
"""
    told = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**launch_environment, **told, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -9 and "this process did not start MPI within 1 s" in done.stderr
    assert "launcher  srun" in done.stderr


def test_a_rank_that_is_stopped(mpirun):
    """MPI waits for it for ever: rank 0 tells what it knows, and ends the job."""
    program = """
import os, runpy, signal, sys
from commlib.diagnosis import look
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    look.mpi_library.try_neighbour = lambda MPI: os.kill(os.getpid(), signal.SIGSTOP)
sys.argv = ["commlib", "info", "--timeout", "2"]
runpy.run_module("commlib", run_name="__main__")
"""
    done = mpirun(2, program, timeout=30)
    assert done.returncode != 0 and not done.stdout.startswith("commlib  ")
    assert "What is wrong:" in done.stderr
    assert "- error: this process did not gather what the ranks have found within 2 s" in done.stderr
