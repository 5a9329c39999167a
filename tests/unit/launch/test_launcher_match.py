"""A mismatch of launcher and library: detected for every launcher; the suggested command depends on both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from commlib.errors import TransportError
from commlib.launch import launcher_match
from commlib.launch.launcher_match import check_before_start, check_launcher
from tests.inputs.launcher_environments import CASES, STEP

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: today"
INTEL = "Intel(R) MPI Library 2021.13 for Linux* OS"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29 (ANL base 3.4a2)"


def mpi(size: int, library: str = OPEN_MPI) -> Any:
    """Stand in for mpi4py's module."""
    return SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_size=lambda: size), Get_library_version=lambda: library)


@pytest.mark.parametrize("name", CASES)
def test_a_world_of_one_is_an_error_under_every_launcher(name):
    environment = CASES[name][0]
    with pytest.raises(TransportError, match=r"started [45] (processes|tasks)( or more)?, but MPI sees one.* Type "):
        check_launcher(mpi(1), environment)
    check_launcher(mpi(4), environment)


@pytest.mark.parametrize(
    "library, kind, typed",
    [
        (OPEN_MPI, {"PMI_RANK": "3", "PMI_SIZE": "5"}, "Type srun --mpi=pmix, or "),
        (OPEN_MPI, {}, "Type srun --mpi=pmix, or "),
        (MPICH, {}, "Type srun --mpi=pmi2, or "),
        (INTEL, {}, "Type I_MPI_PMI_LIBRARY=/path/to/Slurm's/libpmi2.so srun --mpi=pmi2, or "),
        (CRAY, {}, "Type srun --mpi=cray_shasta, or "),
    ],
)
def test_in_an_allocation_the_error_suggests_a_command(library, kind, typed):
    with pytest.raises(TransportError) as caught:
        check_launcher(mpi(1, library), STEP | kind)
    assert typed in str(caught.value) and "mpiexec" in str(caught.value)


def test_the_command_in_use_is_not_suggested():
    environment = STEP | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.12.0"}
    with pytest.raises(TransportError) as caught:
        check_launcher(mpi(1), environment)
    assert "Type srun" not in str(caught.value) and "inside an allocation" in str(caught.value)


FINE = {
    "mpirun -n 1 on the second node": {
        "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
    },
    "a shell of srun --pty --mpi=pmi2": STEP | {"SLURM_PROCID": "0", "PMI_RANK": "0", "PMI_SIZE": "5",
                                                "SLURM_PTY_PORT": "40001"},
    "one task": STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
}  # fmt: skip


@pytest.mark.parametrize("case", FINE)
def test_an_intended_world_of_one_is_accepted(case):
    check_launcher(mpi(1), FINE[case])


@pytest.mark.parametrize("name", ["Open MPI 5", "srun --mpi=pmix", "jsrun"])
def test_a_library_that_would_end_the_process_is_reported_before(monkeypatch, name):
    environment = CASES[name][0]
    monkeypatch.setattr(launcher_match, "mapped_libraries", lambda part: [])
    with pytest.raises(TransportError, match=r"MPICH 5\.0\.2"):
        check_before_start("MPICH 5.0.2", environment)
    check_before_start("Open MPI v5.0.11", environment)
    monkeypatch.setattr(launcher_match, "mapped_libraries", lambda part: ["/lib/libpmix.so.2"])
    check_before_start("MPICH 5.0.2", environment)


def test_an_unknown_library_is_not_open_mpi(monkeypatch):
    monkeypatch.setattr(launcher_match, "mapped_libraries", lambda part: [])
    with pytest.raises(TransportError, match="Some MPI"):
        check_before_start("Some MPI 1.2", CASES["Open MPI 4"][0])


def test_before_the_start_other_libraries_are_not_reported(monkeypatch):
    monkeypatch.setattr(launcher_match, "mapped_libraries", lambda part: [])
    for environment in (CASES["MPICH"][0], CASES["srun --mpi=none"][0], {}):
        check_before_start("MPICH 5.0.2", environment)
    check_before_start("CRAY MPICH version 8.1.29", CASES["srun --mpi=pmix"][0])
