"""SIGTERM (scancel, a time limit) and SIGINT: they end a job soon and completely, whatever its ranks are doing."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launch.signalled import PID, is_running, started

SOON = 10.0  # seconds from the signal to the end of the job

DOES = {
    "a collective": "while True: comm.all_reduce(x)",
    "a wait": "comm.recv(x, 1 - comm.rank)",
    "MPI's own wait": "time.sleep(1000) if comm.rank else comm.all_reduce(x, algorithm='native')",
    "a computation": "while True: x @ x",
}

PROGRAM = f"""
import time
import numpy as np
import commlib
comm = commlib.init()
x = comm.empty(50_000)
x[:] = 1
comm.all_reduce(x, out=x)
{PID}
"""

TERM, INT = signal.SIGTERM, signal.SIGINT
USUAL = [("a collective", TERM, "ranks"), ("a wait", INT, "launcher"), ("a computation", TERM, "launcher")]
LONG = [
    (does, number, target)
    for does in DOES
    for number, target in ((TERM, "ranks"), (TERM, "launcher"), (TERM, "one rank"), (INT, "ranks"), (INT, "launcher"))
    if (does, number, target) not in USUAL
]


def shared_memory(process: int) -> set[str]:
    """Return a process' files in /dev/shm."""
    return set(re.findall(r"/dev/shm/\S+(?=\n)", Path(f"/proc/{process}/maps").read_text()))


@pytest.mark.parametrize(
    ("does", "number", "target"), [*USUAL, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG)]
)
def test_a_signal_ends_the_job(
    launch_environment: Mapping[str, str], tmp_path: Path, does: str, number: signal.Signals, target: str
) -> None:
    """MPICH jobs that ended in this way left megabytes in /dev/shm."""
    with started(2, ["-c", PROGRAM + DOES[does]], launch_environment, tmp_path) as job:
        memory = set.union(*map(shared_memory, job.ranks))
        job.send(number, target)
        code, _, err = job.end(SOON)
        assert code != 0
        assert job.wait_for_ranks_to_end(SOON) == [], err
    assert not any(map(is_running, job.ranks))
    assert not [path for path in memory if Path(path).exists()]
    if number == TERM and target == "ranks":
        assert code in (143, 15)  # Open MPI's launcher returns it as a shell does, MPICH's the bare number
