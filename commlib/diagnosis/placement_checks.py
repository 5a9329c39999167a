"""Placement checks: ranks and their cores."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.diagnosis.facts import JobFacts, RankFacts
from commlib.diagnosis.problem import WARNING, Problem, format_ranks, is_by_srun, is_open_mpi, is_set

_THREADED = {"torch", "tensorflow", "tensorflow-cpu"}


def binding(job: JobFacts) -> Iterator[Problem]:
    """Ranks bound to one core each, which the threads of a framework would share; or several on the same few cores."""
    launched = [rank for rank in job.ranks if rank.start is not None]
    single = [rank for rank in launched if len(rank.cores) == 1 and rank.host.cores > 1]
    threaded = sorted(_THREADED & job.first.packages.keys())
    if single and threaded:
        what = f"{format_ranks(single)}: bound to a single core, and all threads of {', '.join(threaded)} with it"
        yield Problem(WARNING, what, _unbind(single[0]))
    for host, ranks in job.by_host().items():
        sharing: dict[tuple[int, ...], list[RankFacts]] = {}
        for rank in ranks:
            if rank.start is not None and len(rank.cores) < rank.host.cores:
                sharing.setdefault(rank.cores, []).append(rank)
        for cores, together in sharing.items():
            if len(together) > len(cores):
                what = f"{format_ranks(together)} on {host} share {len(cores)} of {together[0].host.cores} cores"
                yield Problem(WARNING, what, f"{_unbind(together[0])}; or request more cores for the job")


def _unbind(rank: RankFacts) -> str:
    if is_by_srun(rank):
        return "srun --cpus-per-task=CORES (in a batch script: export SRUN_CPUS_PER_TASK=CORES), or --cpu-bind=none"
    if is_open_mpi(rank):
        return "mpirun --bind-to none, or --map-by ppr:RANKS:node:pe=CORES to give each rank separate cores"
    return "mpiexec -bind-to none, or -bind-to core:CORES to give each rank separate cores"


def oversubscription(job: JobFacts) -> Iterator[Problem]:
    """More ranks, or threads of ranks, than cores."""
    for host, ranks in job.by_host().items():
        cores = len({core for rank in ranks for core in rank.cores})
        if cores < ranks[0].host.cores and ranks[0].start is not None:
            continue  # `binding` checks this
        if len(ranks) > cores:
            yield from _crowd(f"{len(ranks)} ranks on {host} have {cores} core{'s' * (cores > 1)}", ranks[0])
            continue
        threads = ranks[0].environment.get("OMP_NUM_THREADS", "")
        if len(ranks) > 1 and threads.isdecimal() and len(ranks) * int(threads) > cores:
            what = f"{len(ranks)} ranks on {host} with OMP_NUM_THREADS={threads} have {cores} cores"
            yield Problem(WARNING, what, f"export OMP_NUM_THREADS={cores // len(ranks)}")


def _crowd(what: str, rank: RankFacts) -> Iterator[Problem]:
    what = f"{what}: they take turns, and MPI busy-waits"
    if is_open_mpi(rank):
        if not is_set(rank, "OMPI_MCA_mpi_yield_when_idle"):
            yield Problem(WARNING, what, "fewer ranks; or mpirun --mca mpi_yield_when_idle 1")
    elif not is_set(rank, "MPIR_CVAR_POLLS_BEFORE_YIELD"):
        yield Problem(WARNING, what, "fewer ranks; or MPIR_CVAR_POLLS_BEFORE_YIELD=1 MPIR_CVAR_POSIX_POLL_FREQUENCY=1")


def split_nodes(job: JobFacts) -> Iterator[Problem]:
    """Ranks with one host name that MPI places on several nodes: they cannot use shared memory."""
    for host, ranks in job.by_host().items():
        split = [rank for rank in ranks if rank.on_node is not None and rank.on_node < len(ranks)]
        if split:
            what = f"{len(ranks)} ranks have the host name {host}, but MPI sees {split[0].on_node} of them on a node"
            cure = "one container for all ranks of a host, or --ipc=host; Slurm nodes with the names of their hosts"
            yield Problem(WARNING, what, cure)
