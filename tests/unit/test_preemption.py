"""Signals are recorded, agreed upon, and answered by a request to Slurm for another start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from commlib import Preemption
from commlib.errors import UsageError
from commlib.preemption import requeue, short_run_text, slurm_job
from commlib.process.age import process_age
from tests.bodies.loopback import run

USR1, TERM = signal.SIGUSR1, signal.SIGTERM


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """Restore signal handlers after each test."""
    before = {number: signal.getsignal(number) for number in (USR1, TERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def alone(preemption: Preemption) -> list[bool]:
    """Query a few times, as the only rank."""
    answers: list[bool] = []

    def rank(comm: Any) -> None:
        preemption.comm = comm
        answers.extend(preemption.requested() for _ in range(4))

    run(1, rank)
    return answers


def test_a_signal_takes_effect_at_the_next_query() -> None:
    with Preemption() as preemption:
        assert alone(preemption) == [False] * 4
        os.kill(os.getpid(), USR1)
        assert alone(preemption) == [True] * 4 and not preemption.stops


def test_ranks_agree_in_every_nth_call() -> None:
    with Preemption(every=3) as preemption:
        os.kill(os.getpid(), USR1)
        assert alone(preemption) == [False, False, True, True]


def test_a_stopped_job_is_not_requeued() -> None:
    with Preemption((USR1, TERM)) as preemption:
        os.kill(os.getpid(), TERM)
        os.kill(os.getpid(), USR1)
        assert alone(preemption)[0] and preemption.stops


def test_handlers_are_restored_unless_the_process_is_leaving() -> None:
    """A launcher that passed a signal on twice ended a process that was leaving."""
    signal.signal(USR1, signal.SIG_DFL)
    with Preemption() as preemption:
        assert callable(signal.getsignal(USR1))
    assert signal.getsignal(USR1) == signal.SIG_DFL
    with preemption:
        os.kill(os.getpid(), USR1)
        assert alone(preemption)[0]
    assert signal.getsignal(USR1) == signal.SIG_IGN


def test_wrong_uses_are_errors() -> None:
    with pytest.raises(UsageError, match="expected some signals and every >= 1"):
        Preemption(())
    with pytest.raises(UsageError, match="expected some signals and every >= 1"):
        Preemption(every=0)
    signal.signal(USR1, signal.SIG_DFL)
    with pytest.raises(UsageError, match="cannot handle SIGKILL here"):
        Preemption((USR1, signal.SIGKILL)).__enter__()
    assert signal.getsignal(USR1) == signal.SIG_DFL
    problems: list[str] = []

    def elsewhere() -> None:
        try:
            Preemption().__enter__()
        except UsageError as error:
            problems.append(str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(problems) == 1 and "main thread" in problems[0]


JOBS = {
    "": {},
    "7": {"SLURM_JOB_ID": "7"},
    "7_2": {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"},
}


@pytest.mark.parametrize("job", JOBS)
def test_the_job_has_the_name_that_scontrol_expects(job: str) -> None:
    """The last element of an array has the array's number: requeueing that would start all of it again."""
    assert slurm_job(JOBS[job]) == job


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scontrol that records its calls, and refuses job 13."""
    script = tmp_path / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n[ "$2" != 13 ] || {{ echo unlucky >&2; exit 1; }}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "calls"


def test_slurm_gets_the_request(scontrol: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert requeue("7_2") and not caplog.records
    assert scontrol.read_text() == "requeue 7_2\n"
    assert not requeue("13")
    assert "the job is not requeued: scontrol requeue 13 failed (unlucky)" in caplog.text


def test_a_missing_scontrol_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not requeue("7")
    assert "scontrol requeue 7 failed (" in caplog.text


def test_a_preemption_prints_its_signals_and_state() -> None:
    assert repr(Preemption(signals=(USR1, TERM))) == "<Preemption on SIGUSR1, SIGTERM: not requested>"


def leave_after_signal(preemption: Preemption) -> None:
    """Query in some steps, again after a signal, and leave as the only rank."""

    def leave(comm: Any) -> None:
        preemption.comm = comm
        assert preemption.requested()
        with pytest.raises(SystemExit):
            preemption.leave()

    assert not any(alone(preemption))
    os.kill(os.getpid(), USR1)
    run(1, leave)


def test_a_run_shorter_than_its_start_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A job with a long start and a short time limit was requeued for days without visible progress."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("commlib.preemption.process_age", lambda: 7.25)
    with Preemption() as preemption:
        leave_after_signal(preemption)
    (warning,) = [record.getMessage() for record in caplog.records if "trained for" in record.getMessage()]
    assert (
        re.search(r"trained for \d\.\d s after a start of 7\.2 s", warning)
        and "--time" in warning
        and "commlib warm" in warning
    )


@pytest.mark.parametrize("age", [0.0, None])
def test_a_run_longer_than_its_start_does_not_warn(
    age: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("commlib.preemption.process_age", lambda: age)
    with Preemption() as preemption:
        leave_after_signal(preemption)
    assert "trained for" not in caplog.text


def test_a_warning_has_both_times() -> None:
    assert short_run_text(60.0, 60.0) is None and short_run_text(None, 0.0) is None
    text = short_run_text(95.04, 40.16)
    assert text is not None and "trained for 40.2 s after a start of 95.0 s" in text


def test_the_age_of_a_process_includes_its_imports() -> None:
    program = "import time; time.sleep(0.3)\nfrom commlib.process.age import process_age; print(process_age())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.29 <= float(done.stdout) <= time.monotonic() - began + 0.02
    age = process_age()
    assert age is not None and age > 0.5  # of this one, with pytest
