"""Waiting: ask for a job's state, ever less often, until it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable

from commlib.slurm import client
from commlib.slurm.states import Task, elapsed, summary

FIRST, LONGEST, GROWTH = 0.5, 10.0, 1.3
"""Seconds between two looks, and how they grow: sites dislike many. A controller keeps jobs for minutes."""
PATIENCE = 900.0  # seconds without an answer, after which it gives up: a controller may be restarted meanwhile


def wait(
    job: str,
    tell: Callable[[str, str], None],
    *,
    look: Callable[[str], list[Task]] = client.look,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Task]:
    """Return the tasks of a job when all have ended. tell: called at each look, with a line about its
    state and with the time that it has run.

    A job that is requeued has not ended. Raises SlurmError if Slurm does not know the job, UnreachableError if it has
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
