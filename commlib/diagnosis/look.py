"""Look: collect the facts of one process, or of all that a launcher has started. Nothing in it can hang."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import commlib
from commlib import mpi_on_gpus
from commlib.diagnosis import mpi as mpi_library
from commlib.diagnosis.facts import Job, Network, Rank
from commlib.diagnosis.problem import is_by_srun
from commlib.diagnosis.process import read_rank, read_slurm
from commlib.diagnosis.watch import Watch
from commlib.errors import CommlibError, TransportError
from commlib.launch import mpi_start
from commlib.launch.launcher_match import check_before_start, check_launcher
from commlib.launch.launchers import find_launcher
from commlib.transport import cuda_probe

SECONDS = 30.0  # for each step of MPI
MEASURING = 4  # times as long: kernels may have to be compiled
NO_GPU = "none that CuPy could use"


def is_alone(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether no launcher has started this process with others: a shell of srun's is alone as well."""
    launched = find_launcher(environment)
    if launched is None or (launched.launcher.is_srun and "SLURM_PTY_PORT" in environment):
        return True
    return launched.launcher.protocol == "" and launched.processes == 1


def look_alone(seconds: float = SECONDS) -> Job:
    """Return the facts of this process. MPI is started in another one, for at most so many seconds."""
    own = replace(read_rank(), slurm=read_slurm())
    try:
        found = mpi_library.find_mpi()
    except TransportError as error:
        return Job((replace(own, no_mpi=str(error)),), NO_GPU)
    tried = mpi_library.try_alone(seconds)
    started = found if tried.mpi is None else replace(tried.mpi, library=found.library, file=found.file)
    own = replace(own, mpi=started, peer_reads=tried.peer_reads)
    return Job((own,), _gpus(), failures=(tried.failure,) if tried.failure else ())


def look_together(so_far: Callable[[Job], str], seconds: float = SECONDS) -> Job | None:
    """Return the facts of all ranks on the first one, None on the others. Collective, started by a launcher.

    The first is that by the launcher's word: MPI's word may be wrong. so_far: words what is known, which is printed if
    a step takes longer than so many seconds; the process is killed then. Raises TransportError on another rank than
    the first that has no MPI, or one that cannot know the launcher.
    """
    own = read_rank()
    speaks = own.rank == 0
    if speaks and is_by_srun(own):
        own = replace(own, slurm=read_slurm())
    with Watch(so_far(Job((own,))) if speaks else "") as watch:
        watch.step("load an MPI library", seconds)
        try:
            found = mpi_library.find_mpi()
        except TransportError as error:
            if not speaks:
                raise _refusal(own, error) from None
            return Job((replace(own, no_mpi=str(error)),), NO_GPU)
        own = replace(own, mpi=found)
        try:
            check_before_start(found.library)
            watch.step("start MPI", seconds)
            own = replace(own, mpi=mpi_library.start_mpi())
            check_launcher(mpi_start.started_mpi())
        except TransportError as error:  # every process is alone, and the first speaks for all
            if not speaks and not mpi_start.was_started() and mpi_start.ends_with_the_first():
                raise _refusal(own, error) from None  # said if the first has not ended the job: it may have another MPI
            mpi_start.finalize()
            return Job((own,), failures=(str(error),)) if speaks else None
        job = _gather(own, watch, seconds)
        watch.step("end MPI", seconds)
        mpi_start.finalize()
    return job


def _refusal(own: Rank, error: TransportError) -> TransportError:
    refusal = TransportError(f"rank {own.rank} on {own.host.name}: {error}")
    refusal.at_start = True
    return refusal


def _gather(own: Rank, watch: Watch, seconds: float) -> Job | None:
    MPI = mpi_start.started_mpi()
    world = MPI.COMM_WORLD
    watch.step("gather what the ranks have found", seconds)
    reads, on_node = mpi_library.try_neighbour(MPI), mpi_library.count_node(MPI)
    own = replace(own, rank=world.rank, peer_reads=reads, on_node=on_node)
    ranks = world.gather(own, 0)
    watch.step("join the ranks and measure the network", MEASURING * seconds)
    network, failure, direct = _measure()
    if ranks is None:
        return None
    gpus = NO_GPU
    if mpi_on_gpus.may_have_gpu():
        gpus = "MPI gets their memory as it is" if direct else "MPI gets their data by way of host memory"
    return Job(tuple(ranks), gpus, network, (failure,) if failure else ())


def _measure() -> tuple[Network | None, str, bool]:
    """Return what was measured, what went wrong or "", and whether MPI takes memory of GPUs. Collective."""
    from commlib.diagnosis.network import measure  # brings all of commlib

    try:
        comm = commlib.init()
        found = measure(comm), "", bool(comm.group.transport.accepts("cuda"))
        commlib.shutdown()
    except CommlibError as error:
        return None, str(error), False
    return found


def _gpus() -> str:
    """Return whether MPI takes memory of a GPU, where there may be one: MPI is started for it, in another process."""
    if not mpi_on_gpus.may_have_gpu():
        return NO_GPU
    found = cuda_probe.probe()
    claim = found.claim or "MPI could not be asked"
    return f"{claim}; MPI {'takes memory of a GPU' if not found.failure else f'took none: {found.failure}'}"
