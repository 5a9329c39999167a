"""Client: submit a batch script and query the state of its job, with Slurm's commands."""

from __future__ import annotations

import getpass
import subprocess

from commlib.errors import CommlibError
from commlib.slurm.states import DATABASE_FIELDS, JobTask, from_controller, from_database

_ACTIVE = "RUNNING,SUSPENDED,COMPLETING,CONFIGURING,STOPPED"
SECONDS = 60.0  # for one command; a loaded controller is slow


class SlurmError(CommlibError):
    """Slurm refused a job, does not know it, or is not installed."""


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
    SlurmError if neither knows the job, UnreachableError if the controller does not answer.
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
