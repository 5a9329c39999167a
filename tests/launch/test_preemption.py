"""Preemption: jobs get SIGUSR1 at any time, on one rank or all; they save, exit, and resume where they were."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import pytest

from tests.launch.conftest import MpiRun
from tests.launch.signalled import PID, Job, started

STEPS = 300
AGAIN, STOPPED = 75, 143

PROGRAM = f"""
import signal, sys, time
import commlib
with commlib.Preemption((signal.SIGUSR1, signal.SIGTERM)) as preemption:
    import numpy as np
    from commlib.checkpoint.checkpoint import Checkpoint, CheckpointPart
    comm = commlib.init()
    x = np.full(5, comm.rank, np.int64)
    slow = "slow" in sys.argv

    def state():
        if slow:
            print("saves", flush=True)
            time.sleep(1)
        return x

    def load(saved):
        x[:] = saved.array()

    checkpoint = Checkpoint("run", {{"x": CheckpointPart(state, load)}})
    done = checkpoint.resume()
    print("from", done, flush=True)
    if done == 0 and "wait" in sys.argv:
        exec({PID!r})
    for step in range(done, {STEPS}):
        x[:] = (3 * x + comm.all_reduce(x + step)) % 1_000_003
        if done == 0 and "wait" in sys.argv:
            time.sleep(0.01)
        if slow and step == 0:
            checkpoint.save(1)
        if preemption.requested():
            checkpoint.save(step + 1)
            preemption.leave()
    print("end", comm.all_gather(x).tolist(), flush=True)
"""


def last_line(out: str) -> str:
    lines = {line for line in out.splitlines() if line.startswith("end")}
    assert len(lines) == 1, out
    return lines.pop()


def expected() -> str:
    """Return the result of two ranks without an interruption."""
    x = [[rank] * 5 for rank in range(2)]
    for step in range(STEPS):
        total = [sum(column) + 2 * step for column in zip(*x, strict=True)]
        x = [[(3 * a + t) % 1_000_003 for a, t in zip(row, total, strict=True)] for row in x]
    return f"end {x[0] + x[1]}"


class Start(Protocol):
    def __call__(self, *arguments: str) -> AbstractContextManager[Job]: ...


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def start(script: Path, launch_environment: Mapping[str, str], tmp_path: Path) -> Start:
    return lambda *arguments: started(2, [str(script), "wait", *arguments], launch_environment, tmp_path)


def checkpoints(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    "target",
    [*(pytest.param(target, marks=pytest.mark.long) for target in ("one rank", "ranks")), "launcher"],
)
def test_it_exits_and_resumes_exactly(start: Start, mpirun: MpiRun, script: Path, tmp_path: Path, target: str) -> None:
    with start() as job:
        job.send(signal.SIGUSR1, target)
        code, out, err = job.end(30)
    assert (code, "end" in out) == (AGAIN, False), out + err
    assert err.count("preemption: SIGUSR1 received by rank") == 1, err
    assert len(checkpoints(tmp_path)) == 1
    restarted = mpirun(2, script)
    assert restarted.returncode == 0, restarted.stderr
    assert last_line(restarted.stdout) == expected()
    assert restarted.stdout.count("from 0") == 0 and restarted.stdout.count("from ") == 2


@pytest.mark.any_mpi
def test_a_signal_during_a_checkpoint_and_a_second_one(start: Start, mpirun: MpiRun, script: Path) -> None:
    with start("slow") as job:
        assert job.launcher.stdout is not None
        while "saves" not in job.printed:
            job.printed += job.launcher.stdout.readline()
        for _ in range(3):
            job.send(signal.SIGUSR1, "ranks")
        code, out, err = job.end(30)
    assert (code, "end" in out) == (AGAIN, False), out + err
    assert err.count("preemption: SIGUSR1 received by ranks 0-1") == 1, err
    restarted = mpirun(2, script)
    assert last_line(restarted.stdout) == expected(), restarted.stderr


@pytest.mark.long  # tests/unit/checkpoint tests what such a job leaves
def test_a_job_killed_during_a_checkpoint(start: Start, mpirun: MpiRun, script: Path, tmp_path: Path) -> None:
    with start("slow") as job:
        assert job.launcher.stdout is not None
        while job.printed.count("saves") < 2:  # rank 0 has created the folder
            job.printed += job.launcher.stdout.readline()
        job.send(signal.SIGKILL, "ranks")
        assert job.end(30)[0] != 0
    assert checkpoints(tmp_path) == [".step-000000001.new"]
    restarted = mpirun(2, script)
    assert restarted.stdout.count("from 0") == 2 and last_line(restarted.stdout) == expected(), restarted.stderr


def test_a_requested_stop_saves_without_a_requeue(
    script: Path, launch_environment: Mapping[str, str], tmp_path: Path, scontrol: dict[str, str]
) -> None:
    with started(2, [str(script), "wait"], {**launch_environment, **scontrol}, tmp_path) as job:
        job.send(signal.SIGTERM, "ranks")
        code, _, err = job.end(30)
    assert code == STOPPED, err
    assert len(checkpoints(tmp_path)) == 1 and not (tmp_path / "calls").exists()


@pytest.mark.any_mpi
def test_the_job_requests_one_requeue(
    script: Path, launch_environment: Mapping[str, str], tmp_path: Path, scontrol: dict[str, str]
) -> None:
    with started(2, [str(script), "wait"], {**launch_environment, **scontrol}, tmp_path) as job:
        job.send(signal.SIGUSR1, "ranks")
        code, _, err = job.end(30)
    assert code == AGAIN, err
    assert (tmp_path / "calls").read_text() == "requeue 4711\n"


@pytest.fixture
def scontrol(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of job 4711, with a slow scontrol that records its calls."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "scontrol").write_text(f'#!/bin/sh\nsleep 1\necho "$@" >>{tmp_path}/calls\n')
    (folder / "scontrol").chmod(0o755)
    yield {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
