"""Library and launcher: traps of Open MPI and of srun."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.diagnosis.facts import Job
from commlib.diagnosis.problem import NOTE, WARNING, Problem, is_by_srun, is_by_tcp, is_open_mpi, is_set
from commlib.launch.launcher_match import srun_command

SLOW_START = 0.8  # seconds; without probing Open MPI takes 0.1 to 0.5


def slow_start(job: Job) -> Iterator[Problem]:
    """Open MPI's wheel looks for fabrics that are not there."""
    mpi = job.first.mpi
    if mpi is None or mpi.seconds is None or mpi.seconds < SLOW_START or not is_open_mpi(job.first):
        return
    if is_by_tcp(job) and not is_set(job.first, "OMPI_MCA_pml"):
        what = f"MPI took {mpi.seconds:.1f} s to start: it looked for fabrics (UCX, libfabric), and there is none here"
        yield Problem(
            WARNING, what, "export OMPI_MCA_pml=ob1 OMPI_MCA_osc=^ucx (here only: it would cut off InfiniBand)"
        )


def tcp_polling(job: Job) -> Iterator[Problem]:
    """Open MPI over TCP: after crossing connects it looks at sockets every 10 ms only."""
    if len(job.by_host()) == 1 or not is_open_mpi(job.first) or not is_by_tcp(job):
        return
    if not is_set(job.first, "OMPI_MCA_mpi_event_tick_rate", "OMPI_MCA_btl_tcp_links"):
        between = None if job.network is None else job.network.between
        here = "" if between is None else f" (here and now {between.seconds * 1e3:.3g} ms)"
        what = f"Open MPI over TCP: in some jobs a small message takes 5 ms, for the whole life of the job{here}"
        cure = "mpirun --mca mpi_event_tick_rate 1 (under srun: export OMPI_MCA_mpi_event_tick_rate=1)"
        yield Problem(WARNING, what, cure)


def kill_on_bad_exit(job: Job) -> Iterator[Problem]:
    """srun lets the others wait for a rank that has died, unless it is told otherwise."""
    if not is_by_srun(job.first) or len(job.ranks) == 1:
        return
    default = job.first.slurm.get("KillOnBadExit", "")
    if default != "1" and job.first.environment.get("SLURM_KILL_BAD_EXIT") != "1":
        known = "here" if default else "at most sites"
        what = f"by default srun does not end the job {known} when a rank dies: the others may wait for ever"
        yield Problem(NOTE, what, "srun --kill-on-bad-exit=1 (whether it was typed cannot be seen from here)")


def slurm_default(job: Job) -> Iterator[Problem]:
    """What srun speaks if it is not told, on a login node: a job begins with it."""
    first = job.first
    default = first.slurm.get("MpiDefault", "")
    if first.start is not None or first.mpi is None or not first.mpi.vendor or not default:
        return
    wanted = srun_command(first.mpi.library)
    if not default.startswith(wanted.rpartition("--mpi=")[2]):
        what = f"Slurm is here, and srun speaks {default!r} by default, which {first.mpi.library} does not understand"
        yield Problem(NOTE, what, wanted)


def opal_prefix(job: Job) -> Iterator[Problem]:
    """Open MPI's wheel finds its files by a variable that its mpirun sets, and srun does not."""
    first = job.first
    if first.mpi is None or not first.mpi.prefix or not is_open_mpi(first):
        return
    if not is_by_srun(first) or is_set(first, "OPAL_PREFIX"):
        return
    what = "Open MPI comes from a wheel, and srun does not tell it where its files are: it cannot explain its errors"
    yield Problem(WARNING, what, f"export OPAL_PREFIX={first.mpi.prefix}")
