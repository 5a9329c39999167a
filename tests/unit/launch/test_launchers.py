"""Rank and local rank by the word of every launcher: environments as data."""

from __future__ import annotations

import pytest

from commlib.launch.launchers import find_launcher
from commlib.launch.mpi_start import is_launched, launched_rank
from tests.inputs.launcher_environments import CASES, STEP


@pytest.mark.parametrize("name", CASES)
def test_what_a_launcher_tells(name):
    environment, (command, *numbers), helps = CASES[name]
    found = find_launcher(environment)
    assert found is not None and found.launcher.command == command
    assert [found.rank, found.size, found.local_rank, found.local_size, found.node] == numbers
    assert launched_rank(environment) == 3 and is_launched(environment) is helps
    assert found.processes == (found.size or 4)


@pytest.mark.parametrize("node, tasks", [(0, 2), (1, 2), (2, 1), (3, 4), (5, 4), (6, None)])
def test_tasks_on_a_node_of_slurm(node, tasks):
    environment = STEP | {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": "2(x2),1,4(x3)"}
    found = find_launcher(environment)
    assert found is not None and found.local_size == tasks


NOBODY = {
    "no launcher": {"PATH": "/bin"},
    "a batch script": {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
    "a variable that is no number": {"OMPI_COMM_WORLD_RANK": "x"},
}


@pytest.mark.parametrize("case", NOBODY)
def test_nobody_has_launched_it(case):
    assert find_launcher(NOBODY[case]) is None
    assert launched_rank(NOBODY[case]) == 0 and not is_launched(NOBODY[case])
