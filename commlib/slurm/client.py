"""Client: submit a batch script, query the state of its job and wait for its end, with Slurm's commands."""

from __future__ import annotations

import getpass
import subprocess
import time
from collections.abc import Callable

from commlib.errors import CommlibError
from commlib.slurm.pending_reasons import never_starts
from commlib.slurm.states import DATABASE_FIELDS, JobTask, elapsed, from_controller, from_database, summary

_ACTIVE = "RUNNING,SUSPENDED,COMPLETING,CONFIGURING,STOPPED"
SECONDS = 60.0  # for one command; a loaded controller is slow


class SlurmError(CommlibError):
    """Slurm refused a job, has no record of it, or is not installed."""


class UnreachableError(SlurmError):
    """Slurm does not answer at the moment. The job is not affected."""


def submit(script: str) -> str:
    """Submit a batch script from this folder and environment, and return the job's number.

    Raises SlurmError with sbatch's message if it is refused.
    """
    done = _run(["sbatch", "--parsable"], script)
    if done.returncode != 0:
        raise SlurmError(f"sbatch refuses the job: {_message(done.stderr)}")
    return done.stdout.strip().partition(";")[0]  # the name of a cluster may follow


def query_job(job: str) -> list[JobTask]:
    """Return the state of a job: one task, or the tasks of its array.

    The controller forgets a job some minutes after its end, so the database is queried next, if there is one. Raises
    SlurmError if neither has the job, UnreachableError if the controller does not answer.
    """
    done = _run(["scontrol", "--oneliner", "show", "job", job])
    if done.returncode == 0:
        return from_controller(done.stdout)
    if "Invalid job id" not in done.stderr:
        raise UnreachableError(f"scontrol: {_message(done.stderr)}")
    stored = _run(["sacct", "--jobs", job, "--allocations", "--noheader", "--parsable2", "--format", DATABASE_FIELDS])
    if tasks := from_database(stored.stdout):
        return tasks
    raise SlurmError(f"Slurm no longer knows job {job}: {_message(stored.stderr) or 'it is not in its database'}")


def has_other_jobs(job: str) -> bool:
    """Return whether this user has other jobs that hold resources. True if Slurm does not answer."""
    try:
        done = _run(["squeue", "--noheader", "--user", getpass.getuser(), "--states", _ACTIVE, "--format", "%A"])
    except SlurmError:
        return True
    return done.returncode != 0 or any(number != job for number in done.stdout.split())


def _run(command: list[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        raise SlurmError(f"{command[0]} is not installed: submit on a login node of a cluster with Slurm") from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(f"{command[0]} did not answer within {SECONDS:g} s") from None


def _message(text: str) -> str:
    """Return the message of a Slurm command, without the command's name, in one line."""
    lines = (line.partition("error: ")[2] or line for line in text.strip().splitlines())
    return "; ".join(filter(None, lines))


FIRST, LONGEST, GROWTH = 0.5, 10.0, 1.3
"""Seconds between two polls, and their growth: sites dislike frequent ones. A controller keeps jobs for minutes."""
SURE = 10.0  # seconds for which Slurm must give a reason that keeps a job from starting: it may be an old one
PATIENCE = 900.0  # seconds without an answer before an error: a controller may be restarted meanwhile


def wait_for_job(
    job: str,
    report: Callable[[str, str], None],
    *,
    patience: float = PATIENCE,
    look: Callable[[str], list[JobTask]] = query_job,
    has_others: Callable[[str], bool] = has_other_jobs,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> list[JobTask]:
    """Return the tasks of a job when all have ended. report: called at each poll, with the state and the run time.

    A requeued job has not ended. Raises SlurmError if Slurm has no such job, or if it cannot start, by a reason
    that Slurm has given for 10 s, with what to do; UnreachableError with the last message if Slurm has not answered
    for `patience` seconds.
    """
    pause, silent, stuck = FIRST, 0.0, 0.0
    while True:
        begun = clock()
        try:
            tasks = look(job)
        except UnreachableError as error:
            silent += clock() - begun
            if silent >= patience:
                raise UnreachableError(f"Slurm has not answered for {silent:.0f} s: {error}") from None
            report(f"no answer: {error} (the wait ends after {patience:g} s without one)", "")
            silent += pause
        else:
            silent = 0.0
            if tasks and all(task.ended for task in tasks):
                return tasks
            why = _why_stuck(job, tasks, has_others)
            if why is not None and stuck >= SURE:
                raise SlurmError(why)
            stuck = 0.0 if why is None else stuck + pause
            report(summary(tasks), elapsed(tasks))
        sleep(pause)
        pause = min(LONGEST, pause * GROWTH)


def _why_stuck(job: str, tasks: list[JobTask], has_others: Callable[[str], bool]) -> str | None:
    """Return why a job cannot start. Other jobs are looked up only if its limit could end with them."""
    if never_starts(job, tasks, has_others=False) is None:
        return None
    if (why := never_starts(job, tasks, has_others=True)) is not None:
        return why
    return never_starts(job, tasks, has_others=has_others(job))
