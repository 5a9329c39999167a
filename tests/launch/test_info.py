"""`commlib info` in jobs: rank 0 reports for all, problems are found on their ranks, and a wrong launcher is named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from tests.launch.test_start import other_mpiexec

INFO = ["-m", "commlib", "info"]
BOUND = {  # Open MPI 5 by default, Open MPI 4, and MPICH with an option
    "PRTE_MCA_rmaps_default_mapping_policy": "core",
    "PRTE_MCA_hwloc_default_binding_policy": "core",
    "OMPI_MCA_hwloc_base_binding_policy": "core",
    "HYDRA_BINDING": "core",
}


def test_rank_0_reports_for_all(mpirun):
    done = mpirun(2, [*INFO, "--json"])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert {rank["on_node"] for rank in report["ranks"]} == {2}
    assert report["start"]["size"] == 2 and [rank["start"]["local_rank"] for rank in report["ranks"]] == [0, 1]
    assert report["mpi"]["threads"] == "MULTIPLE" and report["mpi"]["vendor"] in ("Open MPI", "MPICH")
    node = report["network"]["node"]
    assert node["ranks"] == [0, 1] and 0 < node["seconds"] < 1 and node["bandwidth"] > 1e6
    assert report["network"]["between"] is None and set(report["network"]["all_reduce"]) == {"8", "1048576"}


@pytest.mark.any_mpi
def test_all_problems_of_a_job_are_reported(mpirun):
    """Settings that do not fit, a low limit on one rank, and one core each, as Open MPI binds up to two ranks."""
    program = """
import os, resource, runpy, sys
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.environ["COMMLIB_SLOT_KIB"] = "4"
    resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
sys.argv = ["commlib", "info"]
runpy.run_module("commlib", run_name="__main__")
"""
    cores = os.cpu_count() or 1
    done = mpirun(2, program, env={"COLUMNS": "1000", **(BOUND if cores > 1 else {})})
    assert done.returncode != 0
    assert done.stdout.count("What is wrong:") == 1, done.stdout + done.stderr
    assert "COMMLIB_SLOT_KIB: 512 (default) on rank 0; 4 (environment) on rank 1" in done.stdout
    assert "- warning: rank 1: at most 300 open files" in done.stdout
    assert re.search(r"- warning: the limit nofile differs: \d+ on rank 0; 300 on rank 1", done.stdout)
    if cores > 1:
        assert re.search(r"bound \(rank 0: \d+; rank 1: \d+\)", done.stdout)
        warned = "- warning: ranks 0-1: bound to a single core" in done.stdout and "bind-to none" in done.stdout
        assert warned == bool(re.search(r"^packages .*(torch|tensorflow)", done.stdout, re.MULTILINE))


def test_the_launcher_of_another_mpi_is_reported_once(launch_environment):
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


@pytest.mark.any_mpi
def test_srun_with_the_wrong_protocol(launch_environment):
    """Every process is then rank 0 of 1; the first one reports it, and the others print nothing."""
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


@pytest.mark.any_mpi
def test_a_start_that_hangs(launch_environment):
    """A launcher is claimed to exist, and its daemon does not answer."""
    program = """
import runpy, sys, time
from commlib.launch import mpi_start
mpi_start.load_mpi = lambda: time.sleep(100)
sys.argv = ["commlib", "info", "--timeout", "1"]
runpy.run_module("commlib", run_name="__main__")
"""
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**launch_environment, **slurm, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -9 and "this process did not start MPI within 1 s" in done.stderr
    assert "launcher  srun" in done.stderr


@pytest.mark.any_mpi
def test_a_stopped_rank(mpirun):
    """MPI waits for it for ever: rank 0 reports what it knows, and ends the job."""
    program = """
import os, runpy, signal, sys
from commlib.diagnosis import collection
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    collection.mpi_library.try_neighbour = lambda MPI: os.kill(os.getpid(), signal.SIGSTOP)
sys.argv = ["commlib", "info", "--timeout", "2"]
runpy.run_module("commlib", run_name="__main__")
"""
    done = mpirun(2, program, timeout=30)
    assert done.returncode != 0 and not done.stdout.startswith("commlib  ")
    assert "What is wrong:" in done.stderr
    assert "- error: this process did not gather the facts of all ranks within 2 s" in done.stderr


@pytest.mark.any_mpi
def test_standard_output_is_pure_json(mpirun):
    """A library's warning while MPI ended was printed there, too (UCX's, about a message that nobody had received)."""
    done = mpirun(
        2,
        """
import os, sys
from commlib.launch import mpi_start
load, end = mpi_start.load_mpi, mpi_start.finalize
mpi_start.load_mpi = lambda: (os.write(1, b"a library begins\\n"), load())[1]
mpi_start.finalize = lambda: (os.write(1, b"a library ends\\n"), end())
sys.argv = ["commlib", "info", "--json"]
from commlib.cli.app import app
app()
""",
    )
    assert json.loads(done.stdout)["ranks"], done.stderr
    assert "a library begins" in done.stderr and "a library ends" in done.stderr
