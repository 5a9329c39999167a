"""Cluster: a Slurm as a user sees it from the login node, in one test's folder."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ci.hosts import find_mpiexec
from ci.slurm import Slurm
from commlib.slurm.states import JobTask, from_controller

SECONDS = 100.0  # for a job that takes three, on a loaded machine


class Cluster:
    """Run commands on the login node h0 in this folder, and look at jobs."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, and return it with any exit code."""
        return self.slurm.run(command, timeout=SECONDS)

    def on(self, host: str, text: str) -> str:
        """Return the output of a shell line on a host."""
        command = self.slurm.command(["sh", "-c", text], host)
        return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout

    def commlib(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `commlib slurm`, and return it with any exit code."""
        return self.run(sys.executable, "-m", "commlib", "slurm", *arguments)

    def program(self, text: str) -> str:
        """Write a program for the ranks of a job, and return its name, which is unique among tests."""
        path = self.folder / f"{self.folder.name}.py"
        path.write_text(text)
        return path.name

    def submit(self, *arguments: str) -> str:
        """Submit a job by `commlib slurm`, and return its number."""
        done = self.commlib(arguments[0], "--submit", *arguments[1:])
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def tasks(self, job: str) -> list[JobTask]:
        """Return a job's tasks."""
        done = self.run("scontrol", "--oneliner", "show", "job", job)
        assert done.returncode == 0, done.stderr
        return from_controller(done.stdout)

    def task(self, job: str) -> JobTask:
        """Return the only task of a job that is no array."""
        [task] = self.tasks(job)
        return task

    def until_state(self, job: str, state: str) -> None:
        """Wait until a job is in this state."""
        self._until(lambda: self.task(job).state == state, f"job {job} did not become {state}", job)

    def until_files(self, job: str, *names: str) -> None:
        """Wait until a job has written these files in the folder."""
        self._until(lambda: all((self.folder / name).exists() for name in names), f"{names} did not come", job)

    def until_printed(self, job: str, text: str) -> None:
        """Wait until a job's output contains this."""
        self._until(lambda: text in self.output(job), f"{text!r} was not printed", job)

    def ended(self, job: str) -> JobTask:
        """Wait for the end of a job that is no array, and return it."""
        self._until(lambda: self.task(job).ended, f"job {job} did not end", job)
        return self.task(job)

    def output(self, job: str) -> str:
        """Return what a job has printed so far."""
        path = self.folder / f"slurm-jobs/{job}.out"
        return path.read_text() if path.exists() else ""

    def _until(self, done: Callable[[], bool], failure: str, job: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < deadline, f"{failure}: {self.tasks(job)}\n{self.output(job)}{self.slurm.logs()}"
            time.sleep(0.3)


@dataclass(frozen=True)
class LimitedJobs:
    """Jobs that wait for Slurm's own clock, and the folder from which they were submitted."""

    folder: Path
    signalled: str
    too_long: str


@cache
def is_open_mpi() -> bool:
    """Return whether the MPI next to this Python is Open MPI; the other tested one is MPICH."""
    info = subprocess.run([find_mpiexec(), "--version"], capture_output=True, text=True).stdout
    return "Open MPI" in info
