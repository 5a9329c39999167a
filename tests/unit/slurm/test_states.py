"""States of jobs are parsed from Slurm's output; lines are those of Slurm 22.05, shortened."""

from __future__ import annotations

import pytest

from commlib.slurm.states import JobTask, code, elapsed, from_controller, from_database, summary

RUNNING = (
    "JobId=8 JobName=wrap UserId=root(0) Priority=4294901752 QOS=(null) JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=1 Restarts=1 BatchFlag=1 ExitCode=0:0 RunTime=00:01:16 NodeList=h[0-1] BatchHost=h0 Command=(null)"
)
ARRAY = """\
JobId=2 ArrayJobId=2 ArrayTaskId=3-9%2 JobName=a JobState=PENDING Reason=Resources Restarts=0 ExitCode=0:0 NodeList=
JobId=5 ArrayJobId=2 ArrayTaskId=2 JobName=a JobState=FAILED Reason=NonZeroExitCode Restarts=0 ExitCode=2:0 NodeList=h0
JobId=3 ArrayJobId=2 ArrayTaskId=0 JobName=a JobState=COMPLETED Reason=None Restarts=0 ExitCode=0:0 NodeList=h0
"""


def test_states_of_a_job_are_parsed() -> None:
    task = JobTask("8", "RUNNING", nodes="h[0-1]", run_time="00:01:16", restarts=1)
    assert from_controller(RUNNING) == [task]
    assert not task.ended
    assert summary([task]) == "RUNNING on h[0-1] restarted 1 times"
    assert elapsed([task]) == "00:01:16"


def test_an_array_has_its_own_tasks() -> None:
    waiting, failed, done = from_controller(ARRAY)
    assert [task.id for task in (waiting, failed, done)] == ["2_3-9%2", "2_2", "2_0"]
    assert (waiting.ended, failed.ended, done.ended) == (False, True, True)
    assert code([failed, done]) == 2
    assert summary([waiting, failed, done]) == "1 COMPLETED, 1 FAILED, 1 PENDING"
    assert summary([waiting]) == "PENDING (Resources)"
    assert elapsed([waiting]) == ""
    assert (
        elapsed([JobTask("1_1", "RUNNING", run_time="1-00:00:09"), JobTask("1_2", "RUNNING", run_time="23:00:00")])[:2]
        == "1-"
    )


def test_the_database_output_is_parsed() -> None:
    output = "12|COMPLETED|0:0|h0|00:00:09\n13_1|CANCELLED by 1000|0:15|h[0-1]|1-00:00:09\nwarning: of another kind\n"
    assert from_database(output) == [
        JobTask("12", "COMPLETED", nodes="h0", run_time="00:00:09"),
        JobTask("13_1", "CANCELLED", 0, 15, nodes="h[0-1]", run_time="1-00:00:09"),
    ]


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (JobTask("1", "COMPLETED"), 0),
        (JobTask("1", "FAILED", 5), 5),
        (JobTask("1", "FAILED", 0, 9), 137),
        (JobTask("1", "TIMEOUT"), 1),  # Slurm reports 0:0 for jobs that it has ended itself
        (JobTask("1", "CANCELLED"), 1),
        (JobTask("1", "NODE_FAIL"), 1),
    ],
)
def test_the_exit_code_is_0_only_if_all_went_well(task: JobTask, expected: int) -> None:
    assert task.code == code([task]) == expected
