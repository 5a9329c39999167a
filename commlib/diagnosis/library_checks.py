"""Library and launcher checks: traps of Open MPI and of srun."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.diagnosis.facts import JobFacts
from commlib.diagnosis.problem import NOTE, WARNING, Problem, is_by_srun, is_by_tcp, is_open_mpi, is_set
from commlib.launch.launcher_match import srun_command

SLOW_START = 0.8  # seconds; without probing Open MPI takes 0.1 to 0.5


def slow_start(job: JobFacts) -> Iterator[Problem]:
    """Open MPI's wheel probes for fabrics that do not exist."""
    mpi = job.first.mpi
    if mpi is None or mpi.seconds is None or mpi.seconds < SLOW_START or not is_open_mpi(job.first):
        return
    if is_by_tcp(job) and not is_set(job.first, "OMPI_MCA_pml"):
        what = f"MPI took {mpi.seconds:.1f} s to start: it looked for fabrics (UCX, libfabric), and found none"
        yield Problem(
            WARNING, what, "export OMPI_MCA_pml=ob1 OMPI_MCA_osc=^ucx (here only: it would cut off InfiniBand)"
        )


def tcp_polling(job: JobFacts) -> Iterator[Problem]:
    """Open MPI over TCP: after simultaneous connects it polls sockets only every 10 ms."""
    if len(job.by_host()) == 1 or not is_open_mpi(job.first) or not is_by_tcp(job):
        return
    if not is_set(job.first, "OMPI_MCA_mpi_event_tick_rate", "OMPI_MCA_btl_tcp_links"):
        between = None if job.network is None else job.network.between
        here = "" if between is None else f" (measured now: {between.seconds * 1e3:.3g} ms)"
        what = f"Open MPI over TCP: in some jobs a small message takes 5 ms, for the entire job{here}"
        cure = "mpirun --mca mpi_event_tick_rate 1 (under srun: export OMPI_MCA_mpi_event_tick_rate=1)"
        yield Problem(WARNING, what, cure)


def kill_on_bad_exit(job: JobFacts) -> Iterator[Problem]:
    """By default srun lets the other ranks wait for a dead one."""
    if not is_by_srun(job.first) or len(job.ranks) == 1:
        return
    default = job.first.slurm.get("KillOnBadExit", "")
    if default != "1" and job.first.environment.get("SLURM_KILL_BAD_EXIT") != "1":
        known = "here" if default else "at most sites"
        what = f"by default srun does not end the job {known} when a rank dies: the others may wait forever"
        yield Problem(NOTE, what, "srun --kill-on-bad-exit=1 (commlib cannot see whether you did)")


def slurm_default(job: JobFacts) -> Iterator[Problem]:
    """srun's default protocol does not match the library, as seen on a login node before a job."""
    first = job.first
    default = first.slurm.get("MpiDefault", "")
    if first.start is not None or first.mpi is None or not first.mpi.vendor or not default:
        return
    wanted = srun_command(first.mpi.library)
    if not default.startswith(wanted.rpartition("--mpi=")[2]):
        what = f"Slurm's srun uses {default!r} by default, which {first.mpi.library} does not support"
        yield Problem(NOTE, what, wanted)


def opal_prefix(job: JobFacts) -> Iterator[Problem]:
    """Open MPI's wheel finds its files by a variable that mpirun sets but srun does not."""
    first = job.first
    if first.mpi is None or not first.mpi.prefix or not is_open_mpi(first):
        return
    if not is_by_srun(first) or is_set(first, "OPAL_PREFIX"):
        return
    what = "Open MPI comes from a wheel, and srun does not pass the path of its files: it cannot explain its errors"
    yield Problem(WARNING, what, f"export OPAL_PREFIX={first.mpi.prefix}")
