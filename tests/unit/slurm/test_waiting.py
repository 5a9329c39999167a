"""Waiting for a job ends when all its tasks have, and outlives a controller that is restarted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from commlib.slurm.client import SlurmError, UnreachableError
from commlib.slurm.states import JobTask
from commlib.slurm.waiting import LONGEST, PATIENCE, wait

PENDING, RUNNING, DONE = (JobTask("1", state) for state in ("PENDING", "RUNNING", "COMPLETED"))


def looking(*answers: list[JobTask] | Exception) -> Callable[[str], list[JobTask]]:
    left = list(answers)

    def look(job: str) -> list[JobTask]:
        assert job == "1"
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return look


def test_a_job_that_is_requeued_has_not_ended() -> None:
    told: list[str] = []
    look = looking([PENDING], [RUNNING], [PENDING], [RUNNING], [DONE])
    assert wait("1", lambda text, more: told.append(text), look=look, sleep=lambda seconds: None) == [DONE]
    assert told == ["PENDING", "RUNNING", "PENDING", "RUNNING"]


def test_all_tasks_of_an_array_have_to_end() -> None:
    told: list[str] = []
    assert wait(
        "1",
        lambda text, more: told.append(text),
        look=looking([DONE, RUNNING], [DONE, DONE]),
        sleep=lambda seconds: None,
    ) == [
        DONE,
        DONE,
    ]
    assert told == ["1 COMPLETED, 1 RUNNING"]


def test_a_controller_that_does_not_answer_is_asked_again() -> None:
    told: list[str] = []
    look = looking(UnreachableError("no contact"), [RUNNING], [DONE])
    assert wait("1", lambda text, more: told.append(text), look=look, sleep=lambda seconds: None) == [DONE]
    assert told == ["no answer: no contact", "RUNNING"]


def test_it_gives_up_in_the_end() -> None:
    slept: list[float] = []
    with pytest.raises(UnreachableError):
        wait("1", lambda text, more: None, look=looking(UnreachableError("no contact")), sleep=slept.append)
    assert PATIENCE <= sum(slept) <= PATIENCE + LONGEST
    assert slept == sorted(slept) and slept[-1] == LONGEST


def test_a_job_that_nobody_knows_is_an_error_at_once() -> None:
    with pytest.raises(SlurmError, match="does not know"):
        wait("1", lambda text, more: None, look=looking(SlurmError("does not know job 1")), sleep=lambda seconds: None)
