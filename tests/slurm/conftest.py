"""A Slurm for the tests of a session: two emulated hosts, one node on each. Skipped where that is impossible."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ci.hosts import Hosts
from ci.slurm import Slurm, missing, missing_pmix
from tests.slurm.cluster import Cluster, LimitedJobs, is_open_mpi

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def rights() -> None:
    if reason := missing():
        pytest.skip(f"no Slurm here: {reason}")


@pytest.fixture(scope="session", autouse=True)
def launch_environment(rights: None) -> Iterator[None]:
    """Return the additions of ci/env.sh, so that plain `pytest tests/slurm` works too, and the paths of tests."""
    command = 'source "$0" && env -0'
    done = subprocess.run(["bash", "-c", command, str(ROOT / "ci/env.sh")], check=True, capture_output=True, text=True)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (entry.split("=", 1) for entry in done.stdout.split("\0") if entry):
            patch.setenv(name, value)
        for path in (ROOT / "adapters", ROOT):
            patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        patch.delenv("PYTHONUNBUFFERED", raising=False)  # otherwise print writes a line and its newline separately
        patch.delenv("COLUMNS", raising=False)
        # More ranks than cores: a waiting rank yields its core.
        patch.setenv("OMPI_MCA_mpi_yield_when_idle", "1")
        patch.setenv("OMPI_MCA_mpi_event_tick_rate", "1")
        patch.setenv("COMMLIB_SPINS", "20")
        yield


@pytest.fixture(autouse=True)
def limits_of_their_own() -> None:
    """Let a test run several jobs, each of which has a limit."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def slurm(launch_environment: None) -> Iterator[Slurm]:
    with Hosts(2) as hosts, Slurm(hosts, cores=8) as started:
        yield started


# Ranks that succeed when they are notified, and fail otherwise. They write a file when they are ready.
WAITS = """\
import os, signal, sys, time
from pathlib import Path

def say(text):
    print(text, flush=True)
    sys.exit(0)

signal.signal(signal.SIGUSR1, lambda *_: say("told"))
signal.signal(signal.SIGTERM, lambda *_: say("ended"))
Path("ready-{SLURM_JOB_ID}-{SLURM_PROCID}".format(**os.environ)).touch()
time.sleep(200)
sys.exit(9)
"""


@pytest.fixture(scope="session", autouse=True)
def limited(
    request: pytest.FixtureRequest, slurm: Slurm, tmp_path_factory: pytest.TempPathFactory
) -> LimitedJobs | None:
    """Jobs that Slurm signals and ends half a minute later, submitted first: other tests run meanwhile."""
    if not any(item.path.name == "test_time_limit.py" for item in request.session.items):
        return None
    cluster = Cluster(slurm, tmp_path_factory.mktemp("limited"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cluster.folder)
        options = ("--ntasks-per-node", "2", "--mpi", "srun", "--time", "10")
        command = ("--", "python", cluster.program(WAITS))
        signalled = cluster.submit("run", *options, "--signal", "USR1@60", *command)
        too_long = cluster.submit("run", *options, *command)
    # A limit is at least a minute, but a running job may be ended earlier: as soon as its ranks are ready.
    for job, seconds in (signalled, 60), (too_long, 2):
        cluster.until_files(job, *(f"ready-{job}-{rank}" for rank in range(2)))
        end = f"EndTime={datetime.now() + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}"
        assert cluster.run("scontrol", "update", f"JobId={job}", end).returncode == 0
    return LimitedJobs(cluster.folder, signalled, too_long)


@pytest.fixture
def cluster(slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The Slurm, and a working folder for this test."""
    monkeypatch.chdir(tmp_path)
    return Cluster(slurm, tmp_path)


@pytest.fixture(scope="session")
def srun(launch_environment: None) -> str:
    """The value of srun --mpi= for this MPI."""
    if not is_open_mpi():
        return "pmi2"
    if reason := missing_pmix():
        pytest.skip(f"srun cannot start Open MPI's ranks here: {reason}")
    return "pmix"


@pytest.fixture(scope="session")
def mpirun(launch_environment: None) -> str:
    """The launcher of this MPI."""
    return "mpirun" if is_open_mpi() else "mpiexec"
