"""A Slurm for the tests of a session: two emulated hosts, a node on each. Skipped where there can be none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.hosts import Hosts
from ci.slurm import Slurm, missing, missing_pmix
from tests.slurm.cluster import Cluster, is_open_mpi

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def rights() -> None:
    if reason := missing():
        pytest.skip(f"no Slurm here: {reason}")


@pytest.fixture(scope="session", autouse=True)
def launch_environment(rights: None) -> Iterator[None]:
    """What ci/env.sh adds, so that plain `pytest tests/slurm` works too, the checkout's packages and this Python."""
    command = 'source "$0" && env -0'
    done = subprocess.run(["bash", "-c", command, str(ROOT / "ci/env.sh")], check=True, capture_output=True, text=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (entry.split("=", 1) for entry in done.stdout.split("\0") if entry):
            patch.setenv(name, value)
        for path in (ROOT / "adapters", ROOT):
            patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # else print writes a line and its end apart
        patch.delenv("COLUMNS", raising=False)
        # More ranks than cores: who waits gives its one away.
        patch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
        patch.setenv("OMPI_MCA_mpi_event_tick_rate", "1")
        patch.setenv("COMMLIB_SPINS", "20")
        yield


@pytest.fixture(scope="session")
def slurm(launch_environment: None) -> Iterator[Slurm]:
    with Hosts(2) as hosts, Slurm(hosts) as started:
        yield started


@pytest.fixture
def cluster(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The Slurm, and a working folder of this test."""
    monkeypatch.chdir(tmp_path)
    return Cluster(slurm, tmp_path)


@pytest.fixture(scope="session")
def srun(launch_environment: None) -> str:
    """What srun --mpi= takes for this MPI."""
    if not is_open_mpi():
        return "pmi2"
    if reason := missing_pmix():
        pytest.skip(f"srun cannot start Open MPI's ranks here: {reason}")
    return "pmix"


@pytest.fixture(scope="session")
def mpirun(launch_environment: None) -> str:
    """The launcher of this MPI."""
    return "mpirun" if is_open_mpi() else "mpiexec"
