"""The wait for a job that can never start ends, with the reason and a remedy; lines of Slurm 22.05, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

from commlib.slurm.client import SURE, SlurmError, has_other_jobs, wait_for_job
from commlib.slurm.pending_reasons import HELD_STATES, never_starts
from commlib.slurm.states import ENDED, JobTask, from_controller

RECORDED = """\
JobId=1 JobName=wrap UserId=root(0) Priority=4294901759 QOS=(null) JobState=PENDING Reason=PartitionNodeLimit Restarts=0
JobId=2 JobName=wrap UserId=root(0) Priority=4294901758 QOS=(null) JobState=PENDING Reason=PartitionTimeLimit Restarts=0
JobId=3 JobName=wrap UserId=root(0) Priority=0 QOS=(null) JobState=PENDING Reason=JobHeldUser Dependency=(null)
JobId=5 JobName=wrap UserId=root(0) JobState=PENDING Reason=DependencyNeverSatisfied Dependency=afterok:4(failed)
JobId=6 JobName=wrap UserId=root(0) Priority=0 QOS=(null) JobState=PENDING Reason=JobHeldAdmin Dependency=(null)
JobId=7 ArrayJobId=7 ArrayTaskId=0-1 JobName=wrap Priority=0 JobState=PENDING Reason=JobHeldUser Restarts=0
JobId=4 JobName=wrap UserId=root(0) Priority=0 JobState=PENDING Reason=job_requeued_in_held_state Restarts=1
"""


def pending(reason: str) -> JobTask:
    return JobTask("12", "PENDING", reason=reason)


def why(task: JobTask, *, has_others: bool = False) -> str | None:
    return never_starts("12", [task], has_others=has_others)


@pytest.mark.parametrize("task", from_controller(RECORDED), ids=lambda task: f"{task.id}: {task.reason}")
def test_recorded_reasons_come_with_a_remedy(task: JobTask) -> None:
    text = never_starts(task.id, [task], has_others=True)
    assert text is not None and f"will not start: PENDING ({task.reason}): " in text and "{" not in text
    assert "scancel" in text or "scontrol release" in text


NEVER = (
    *("BadConstraints", "InvalidAccount", "InvalidQOS", "QOSNotAllowed", "AccountNotAllowed"),
    *("AssocMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "AssocMaxCPUMinutesPerJobLimit"),
    *("QOSMaxWallDurationPerJobLimit", "QOSMaxNodePerJob", "QOSMaxCpuPerJobLimit", "QOSMinCpuNotSatisfied"),
    *("QOSMaxCpuPerNode", "launch_failed_requeued_held", "JobHoldMaxRequeue"),
)


@pytest.mark.parametrize("reason", NEVER)
def test_permanent_reasons_end_the_wait(reason: str) -> None:
    assert why(pending(reason), has_others=True) is not None


MAY = (
    *("", "Priority", "Resources", "Dependency", "BeginTime", "Reservation", "Licenses", "PartitionDown", "Cleaning"),
    *("ReqNodeNotAvail,_UnavailableNodes:h[0-1]", "NodeDown", "JobArrayTaskLimit", "Prolog", "PartitionInactive"),
    *("AssocGrpCpuLimit", "QOSGrpNodeLimit", "QOSMaxJobsPerAccountLimit", "QOSUsageThreshold", "FedJobLock"),
)


@pytest.mark.parametrize("reason", MAY)
def test_jobs_that_may_start_are_waited_for(reason: str) -> None:
    assert why(pending(reason)) is None


@pytest.mark.parametrize("reason", ["AssocMaxJobsLimit", "QOSMaxJobsPerUserLimit", "QOSMaxCpuPerUserLimit"])
def test_a_limit_on_the_jobs_of_a_user_ends_with_them(reason: str) -> None:
    assert why(pending(reason), has_others=True) is None
    assert "no other job of yours" in str(why(pending(reason)))


@pytest.mark.parametrize("state", sorted(HELD_STATES))
def test_a_held_state_does_not_end_by_itself(state: str) -> None:
    assert "scontrol release 12" in str(why(JobTask("12", state)))


@pytest.mark.parametrize(
    "state", ["RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED", "REQUEUED", *sorted(ENDED)]
)
def test_other_states_are_not_stuck_whatever_their_reason(state: str) -> None:
    assert why(JobTask("12", state, reason="JobHeldUser")) is None


def test_the_wait_for_an_array_ends_when_no_task_can_run() -> None:
    held_task, done, runs = pending("JobHeldUser"), JobTask("12_0", "COMPLETED"), JobTask("12_1", "RUNNING")
    assert never_starts("12", [held_task, done, runs], has_others=False) is None
    text = never_starts("12", [done, held_task], has_others=False)
    assert text is not None and text.startswith("job 12 (1 of its tasks) will not start")


def waited(*answers: JobTask, has_others: bool = False) -> tuple[list[float], Exception | list[JobTask]]:
    """Return the seconds slept, and the result of the wait; the last answer repeats."""
    remaining, slept = list(answers), list[float]()

    def look(job: str) -> list[JobTask]:
        assert len(slept) < 1000, "it waits forever"
        return [remaining.pop(0) if len(remaining) > 1 else remaining[0]]

    try:
        end: Exception | list[JobTask] = wait_for_job(
            "12", lambda text, more: None, look=look, has_others=lambda job: has_others, sleep=slept.append
        )
    except SlurmError as error:
        end = error
    return slept, end


def test_the_wait_ends_once_slurm_has_given_such_a_reason_for_some_time() -> None:
    """`commlib slurm run --wait` waited for ever for a job of too many nodes."""
    slept, end = waited(pending("PartitionNodeLimit"))
    assert "will not start: PENDING (PartitionNodeLimit)" in str(end)
    assert SURE <= sum(slept) <= 2 * SURE


def test_a_temporary_reason_is_ignored() -> None:
    done = JobTask("12", "COMPLETED")
    held_tasks = [pending("JobHeldUser")] * 6
    assert waited(*held_tasks, pending("Priority"), *held_tasks[:2], JobTask("12", "RUNNING"), done)[1] == [done]


def test_a_limit_with_other_jobs_is_waited_for() -> None:
    done, limit = JobTask("12", "COMPLETED"), pending("AssocMaxJobsLimit")
    assert waited(*[limit] * 30, done, has_others=True)[1] == [done]
    assert "AssocMaxJobsLimit" in str(waited(*[limit] * 30, done)[1])


@pytest.mark.parametrize("state", sorted(ENDED))
def test_every_final_state_ends_the_wait(state: str) -> None:
    done = JobTask("12", state)
    assert waited(JobTask("12", "RUNNING"), done)[1] == [done]


@pytest.mark.parametrize(
    ("squeue", "expected"), [("echo 12", False), ("printf '12\\n13\\n'", True), ("true", False), ("exit 1", True)]
)
def test_other_jobs_of_the_user_are_detected(
    squeue: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown answer counts as other jobs: the wait continues."""
    script = tmp_path / "squeue"
    script.write_text(f"#!/bin/sh\n{squeue}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert has_other_jobs("12") == expected
