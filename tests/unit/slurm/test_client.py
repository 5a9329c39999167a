"""Slurm's commands get valid arguments. Here scripts stand in for them; tests/slurm has the real ones.

Waiting for a job ends when all its tasks have, and outlives a controller that is restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commlib.slurm.client import LONGEST, PATIENCE, SlurmError, UnreachableError, query_job, submit, wait_for_job
from commlib.slurm.states import JobTask


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH except for the shell."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_job_on_one_of_several_clusters_has_a_number(commands: Path) -> None:
    stand_in(commands, "sbatch", 'read line; test "$line $1" = "#!/bin/bash --parsable" && echo "12;cluster"')
    assert submit("#!/bin/bash\n") == "12"


def test_a_refusal_is_passed_on_in_one_line(commands: Path) -> None:
    stand_in(
        commands, "sbatch", "echo 'sbatch: error: invalid partition: x' >&2; echo 'sbatch: error: failed' >&2; exit 1"
    )
    with pytest.raises(SlurmError, match=r"^sbatch refuses the job: invalid partition: x; failed$"):
        submit("")


def test_a_missing_slurm_is_an_error(commands: Path) -> None:
    with pytest.raises(SlurmError, match="sbatch is not installed: submit on a login node"):
        submit("")


FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


def test_the_database_has_jobs_that_the_controller_has_dropped(commands: Path) -> None:
    stand_in(commands, "scontrol", FORGOTTEN)
    stand_in(commands, "sacct", 'test "$2" = 12 && echo "12|TIMEOUT|0:0|h0|01:00:00"')
    [task] = query_job("12")
    assert (task.state, task.code) == ("TIMEOUT", 1)


def test_an_unknown_job_is_an_error(commands: Path) -> None:
    stand_in(commands, "scontrol", FORGOTTEN)
    stand_in(commands, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    with pytest.raises(SlurmError, match="no longer knows job 12: Slurm accounting storage is disabled"):
        query_job("12")
    stand_in(commands, "sacct", "exit 0")
    with pytest.raises(SlurmError, match="it is not in its database"):
        query_job("12")


def test_a_silent_controller_is_an_error(commands: Path) -> None:
    stand_in(commands, "scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UnreachableError, match="Unable to contact slurm controller"):
        query_job("12")


PENDING, RUNNING, DONE = (JobTask("1", state) for state in ("PENDING", "RUNNING", "COMPLETED"))


def looking(*answers: list[JobTask] | Exception) -> Callable[[str], list[JobTask]]:
    remaining = list(answers)

    def look(job: str) -> list[JobTask]:
        assert job == "1"
        answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return look


def test_a_job_that_is_requeued_has_not_ended() -> None:
    reported: list[str] = []
    look = looking([PENDING], [RUNNING], [PENDING], [RUNNING], [DONE])
    assert wait_for_job("1", lambda text, more: reported.append(text), look=look, sleep=lambda seconds: None) == [DONE]
    assert reported == ["PENDING", "RUNNING", "PENDING", "RUNNING"]


def test_all_tasks_of_an_array_have_to_end() -> None:
    reported: list[str] = []
    assert wait_for_job(
        "1",
        lambda text, more: reported.append(text),
        look=looking([DONE, RUNNING], [DONE, DONE]),
        sleep=lambda seconds: None,
    ) == [
        DONE,
        DONE,
    ]
    assert reported == ["1 COMPLETED, 1 RUNNING"]


def test_a_silent_controller_is_queried_again() -> None:
    reported: list[str] = []
    look = looking(UnreachableError("no contact"), [RUNNING], [DONE])
    assert wait_for_job("1", lambda text, more: reported.append(text), look=look, sleep=lambda seconds: None) == [DONE]
    assert reported == ["no answer: no contact (the wait ends after 900 s without one)", "RUNNING"]


def test_a_controller_that_stays_silent_is_an_error() -> None:
    slept: list[float] = []
    with pytest.raises(UnreachableError, match=r"^Slurm has not answered for 90\d s: no contact$"):
        wait_for_job("1", lambda text, more: None, look=looking(UnreachableError("no contact")), sleep=slept.append)
    assert PATIENCE <= sum(slept) <= PATIENCE + LONGEST
    assert slept == sorted(slept) and slept[-1] == LONGEST


def test_commands_that_take_long_to_fail_count() -> None:
    """Each may take a minute: with the pauses alone, the wait would have lasted for an hour and a half."""
    now, slept = 0.0, list[float]()

    def look(job: str) -> list[JobTask]:
        nonlocal now
        now += 60
        raise UnreachableError("scontrol did not answer within 60 s")

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    with pytest.raises(UnreachableError, match=r"Slurm has not answered for 3\d\d s: scontrol did not answer"):
        wait_for_job("1", lambda text, more: None, patience=300, look=look, sleep=sleep, clock=lambda: now)
    assert 300 <= now < 400 and len(slept) == 4


def test_an_unknown_job_ends_the_wait_at_once() -> None:
    with pytest.raises(SlurmError, match="does not know"):
        wait_for_job(
            "1", lambda text, more: None, look=looking(SlurmError("does not know job 1")), sleep=lambda seconds: None
        )
