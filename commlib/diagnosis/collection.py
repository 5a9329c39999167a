"""Look: collect the facts of one process, or of all processes of a launcher. No step of it can hang."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import commlib
from commlib import cuda_aware_mpi
from commlib.diagnosis import mpi as mpi_library
from commlib.diagnosis.facts import JobFacts, NetworkFacts, RankFacts
from commlib.diagnosis.problem import is_by_srun
from commlib.diagnosis.process import read_rank, read_slurm
from commlib.diagnosis.watch import Watch
from commlib.errors import CommlibError, TransportError
from commlib.launch import mpi_start
from commlib.launch.launcher_match import check_before_start, check_launcher
from commlib.launch.launchers import find_launcher
from commlib.transport import cuda_probe

SECONDS = 30.0  # for each step of MPI
MEASURING = 4  # times as long, because kernels may need compiling
NO_GPU = "none usable by CuPy"


def is_alone(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether no launcher has started this process with others. A shell started by srun also counts as alone."""
    launched = find_launcher(environment)
    if launched is None or (launched.launcher.is_srun and "SLURM_PTY_PORT" in environment):
        return True
    return launched.launcher.protocol == "" and launched.processes == 1


def collect_process(seconds: float = SECONDS) -> JobFacts:
    """Return the facts of this process. MPI is started in a separate process, with this time limit."""
    own = replace(read_rank(), slurm=read_slurm())
    try:
        mpi = mpi_library.find_mpi()
    except TransportError as error:
        return JobFacts((replace(own, no_mpi=str(error)),), NO_GPU)
    tried = mpi_library.try_alone(seconds)
    started = mpi if tried.mpi is None else replace(tried.mpi, library=mpi.library, file=mpi.file)
    own = replace(own, mpi=started, peer_reads=tried.peer_reads)
    return JobFacts((own,), _gpus(), failures=(tried.failure,) if tried.failure else ())


def collect_job(so_far: Callable[[JobFacts], str], seconds: float = SECONDS) -> JobFacts | None:
    """Return the facts of all ranks on the first one, None on the others. Collective, started by a launcher.

    The launcher's variables decide which rank is first, because MPI's ranks may be wrong. so_far: formats the facts
    known so far, which are printed if a step takes longer than `seconds`; then the process is killed. Raises
    TransportError on a rank other than the first if it finds no MPI, or cannot identify the launcher.
    """
    own = read_rank()
    speaks = own.rank == 0
    if speaks and is_by_srun(own):
        own = replace(own, slurm=read_slurm())
    with Watch(so_far(JobFacts((own,))) if speaks else "") as watch:
        watch.step("load an MPI library", seconds)
        try:
            mpi = mpi_library.find_mpi()
        except TransportError as error:
            if not speaks:
                raise _refusal(own, error) from None
            return JobFacts((replace(own, no_mpi=str(error)),), NO_GPU)
        own = replace(own, mpi=mpi)
        try:
            check_before_start(mpi.library)
            watch.step("start MPI", seconds)
            own = replace(own, mpi=mpi_library.start_mpi())
            check_launcher(mpi_start.started_mpi())
        except TransportError as error:  # every process is its own world, and the first one reports for all
            if not speaks and not mpi_start.was_started() and mpi_start.ends_job_on_failure():
                raise _refusal(own, error) from None  # shown if the first does not end the job: it may have another MPI
            mpi_start.finalize()
            return JobFacts((own,), failures=(str(error),)) if speaks else None
        job = _gather(own, watch, seconds)
        watch.step("end MPI", seconds)
        mpi_start.finalize()
    return job


def _refusal(own: RankFacts, error: TransportError) -> TransportError:
    refusal = TransportError(f"rank {own.rank} on {own.host.name}: {error}")
    refusal.at_start = True
    return refusal


def _gather(own: RankFacts, watch: Watch, seconds: float) -> JobFacts | None:
    MPI = mpi_start.started_mpi()
    world = MPI.COMM_WORLD
    watch.step("gather the facts of all ranks", seconds)
    reads, on_node = mpi_library.try_neighbour(MPI), mpi_library.count_node(MPI)
    own = replace(own, rank=world.rank, peer_reads=reads, on_node=on_node)
    ranks = world.gather(own, 0)
    watch.step("join the ranks and measure the network", MEASURING * seconds)
    network, failure, direct = _measure()
    if ranks is None:
        return None
    gpus = NO_GPU
    if cuda_aware_mpi.may_have_gpu():
        gpus = "MPI accepts their memory directly" if direct else "MPI gets their data through host memory"
    return JobFacts(tuple(ranks), gpus, network, (failure,) if failure else ())


def _measure() -> tuple[NetworkFacts | None, str, bool]:
    """Return the measurements, an error text or "", and whether MPI accepts GPU memory. Collective."""
    from commlib.diagnosis.network import measure  # imports all of commlib

    try:
        comm = commlib.init()
        result = measure(comm), "", bool(comm.group.transport.accepts("cuda"))
        commlib.shutdown()
    except CommlibError as error:
        return None, str(error), False
    return result


def _gpus() -> str:
    """Return whether MPI accepts memory of a GPU, if there may be one. A separate process starts MPI and tries it."""
    if not cuda_aware_mpi.may_have_gpu():
        return NO_GPU
    answer = cuda_probe.probe()
    claim = answer.claim or "MPI could not be asked"
    return f"{claim}; MPI {'accepted GPU memory' if not answer.failure else f'failed on GPU memory: {answer.failure}'}"
