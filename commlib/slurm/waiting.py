"""Waiting: poll a job's state, at growing intervals, until it has ended, or cannot start."""

from __future__ import annotations

import time
from collections.abc import Callable

from commlib.slurm import client
from commlib.slurm.pending_reasons import never_starts
from commlib.slurm.states import JobTask, elapsed, summary

FIRST, LONGEST, GROWTH = 0.5, 10.0, 1.3
"""Seconds between two polls, and their growth: sites dislike frequent ones. A controller keeps jobs for minutes."""
SURE = 10.0  # seconds for which Slurm must give a reason that keeps a job from starting: it may be an old one
PATIENCE = 900.0  # seconds without an answer before it gives up: a controller may be restarted meanwhile


def wait(
    job: str,
    tell: Callable[[str, str], None],
    *,
    look: Callable[[str], list[JobTask]] = client.query_job,
    has_others: Callable[[str], bool] = client.has_other_jobs,
    sleep: Callable[[float], None] = time.sleep,
) -> list[JobTask]:
    """Return the tasks of a job when all have ended. tell: called at each poll, with the state and the run time.

    A requeued job has not ended. Raises SlurmError if Slurm does not know the job, or if it cannot start, by a reason
    that Slurm has given for 10 s, with what to do; UnreachableError if Slurm has not answered for 900 s.
    """
    pause, silent, stuck = FIRST, 0.0, 0.0
    while True:
        try:
            tasks = look(job)
        except client.UnreachableError as error:
            if silent >= PATIENCE:
                raise
            tell(f"no answer: {error}", "")
            silent += pause
        else:
            silent = 0.0
            if tasks and all(task.ended for task in tasks):
                return tasks
            why = _why_stuck(job, tasks, has_others)
            if why is not None and stuck >= SURE:
                raise client.SlurmError(why)
            stuck = 0.0 if why is None else stuck + pause
            tell(summary(tasks), elapsed(tasks))
        sleep(pause)
        pause = min(LONGEST, pause * GROWTH)


def _why_stuck(job: str, tasks: list[JobTask], has_others: Callable[[str], bool]) -> str | None:
    """Return why a job cannot start. Other jobs are looked up only if its limit could end with them."""
    if never_starts(job, tasks, has_others=False) is None:
        return None
    if (why := never_starts(job, tasks, has_others=True)) is not None:
        return why
    return never_starts(job, tasks, has_others=has_others(job))
