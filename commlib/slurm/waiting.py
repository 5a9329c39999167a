"""Waiting: poll a job's state, at growing intervals, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from commlib.slurm import client
from commlib.slurm.states import JobTask, elapsed, summary

FIRST, LONGEST, GROWTH = 0.5, 10.0, 1.3
"""Seconds between two polls, and their growth: sites dislike frequent ones. A controller keeps jobs for minutes."""
PATIENCE = 900.0  # seconds without an answer before it gives up: a controller may be restarted meanwhile


def wait(
    job: str,
    tell: Callable[[str, str], None],
    *,
    look: Callable[[str], list[JobTask]] = client.query_job,
    sleep: Callable[[float], None] = time.sleep,
) -> list[JobTask]:
    """Return the tasks of a job when all have ended. tell: called at each poll, with the state and the run time.

    A requeued job has not ended. Raises SlurmError if Slurm does not know the job, UnreachableError if it has
    not answered for 900 s.
    """
    pause, silent = FIRST, 0.0
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
            tell(summary(tasks), elapsed(tasks))
        sleep(pause)
        pause = min(LONGEST, pause * GROWTH)
