"""Rank and local rank from the environment of every launcher."""

from __future__ import annotations

import pytest

from commlib.launch.launchers import find_launcher
from commlib.launch.mpi_start import is_launched, launched_rank
from tests.inputs.launcher_environments import CASES, STEP


@pytest.mark.parametrize("name", CASES)
def test_rank_and_size_come_from_the_launcher(name):
    environment, (command, *numbers), helps = CASES[name]
    launcher = find_launcher(environment)
    assert launcher is not None and launcher.launcher.command == command
    assert [launcher.rank, launcher.size, launcher.local_rank, launcher.local_size, launcher.node] == numbers
    assert launched_rank(environment) == 3 and is_launched(environment) is helps
    assert launcher.processes == (launcher.size or 4)


@pytest.mark.parametrize("node, tasks", [(0, 2), (1, 2), (2, 1), (3, 4), (5, 4), (6, None)])
def test_slurms_tasks_on_a_node_are_counted(node, tasks):
    environment = STEP | {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,4(x3)"}
    launcher = find_launcher(environment)
    assert launcher is not None and launcher.local_size == tasks


NOBODY = {
    "no launcher": {"PATH": "/bin"},
    "a batch script": {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
    "a variable that is no number": {"OMPI_COMM_WORLD_RANK": "x"},
}


@pytest.mark.parametrize("case", NOBODY)
def test_a_plain_process_has_no_launcher(case):
    assert find_launcher(NOBODY[case]) is None
    assert launched_rank(NOBODY[case]) == 0 and not is_launched(NOBODY[case])
