"""Checks: rules over facts. Each is a function from a job to what is wrong with it, with what to type.

They look at facts alone, so each is tested with made-up ones. An error means that a job cannot run so, or runs wrongly;
a warning that it runs, but worse than it could, a note what cannot be seen from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from commlib.config import ranks_text
from commlib.diagnosis.facts import Job, Rank

LEVELS = ERROR, WARNING, NOTE = "error", "warning", "note"
_THREADED = {"torch", "tensorflow", "tensorflow-cpu"}
_MIB = 1 << 20

SLOW_START = 0.8  # seconds; without probing Open MPI takes 0.1 to 0.5
LITTLE_SHARED = 64 * _MIB, 16 * _MIB  # of /dev/shm in all, and for each rank: what containers have by default
LEAST_SHARED = 4 * _MIB  # for each rank: with less MPICH ends the job (SIGBUS)
FEW_FILES = 1024

MOST_OF_A_KIND = 3  # problems that are told


@dataclass(frozen=True, slots=True)
class Problem:
    """Say what is wrong, and what to type. level: one of LEVELS."""

    level: str
    what: str
    cure: str


Check = Callable[[Job], Iterator[Problem]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Register a check. They run in the order in which they stand."""
    CHECKS.append(function)
    return function


def problems(job: Job) -> list[Problem]:
    """Return all that is wrong, errors first; of one kind, as on many hosts, the first few."""
    found: list[Problem] = []
    for one in CHECKS:
        kind = list(one(job))
        found += kind[:MOST_OF_A_KIND]
        if len(kind) > MOST_OF_A_KIND:
            found.append(Problem(kind[-1].level, f"{len(kind) - MOST_OF_A_KIND} more like the last", ""))
    return sorted(found, key=lambda problem: LEVELS.index(problem.level))


def _named(ranks: Iterable[Rank]) -> str:
    return ranks_text(sorted(rank.rank for rank in ranks))


def _is_open_mpi(rank: Rank) -> bool:
    return rank.mpi is not None and rank.mpi.vendor == "Open MPI"


def _is_set(rank: Rank, *names: str) -> bool:
    return any(name in rank.environment for name in names)


def _by_tcp(job: Job) -> bool:
    return not any(rank.host.fabrics for rank in job.ranks)


@check
def failures(job: Job) -> Iterator[Problem]:
    """What went wrong on the way; the text says what to do."""
    for text in job.failures:
        what, _, cure = text.partition(" (a process that is meant to be alone")[0].partition(" Type ")
        yield Problem(ERROR, what.rstrip("."), cure)


@check
def no_mpi(job: Job) -> Iterator[Problem]:
    """No library, on this machine or on some ranks. Alone that may be meant."""
    lacking = [rank for rank in job.ranks if rank.no_mpi]
    if lacking:
        level = ERROR if job.first.start is not None else WARNING
        what, _, cure = lacking[0].no_mpi.partition("): ")
        yield Problem(level, f"{_named(lacking)}: {what}{')' * bool(cure)}", cure)


@check
def settings(job: Job) -> Iterator[Problem]:
    """An unknown or bad COMMLIB_* or line in the file."""
    wrong: dict[str, list[Rank]] = {}
    for rank in job.ranks:
        wrong.setdefault(rank.wrong_settings, []).append(rank)
    wrong.pop("", None)
    for text, ranks in wrong.items():
        if any(text in failure for failure in job.failures):
            continue  # `commlib.init` has told it
        yield Problem(ERROR, f"{text} ({_named(ranks)})", "commlib info --all, which lists them with their values")


@check
def binding(job: Job) -> Iterator[Problem]:
    """Ranks on one core each, where threads of a framework would share it; or several on the same few cores."""
    launched = [rank for rank in job.ranks if rank.start is not None]
    single = [rank for rank in launched if len(rank.cores) == 1 and rank.host.cores > 1]
    threaded = sorted(_THREADED & job.first.packages.keys())
    if single and threaded:
        what = f"{_named(single)}: bound to a single core, and all threads of {', '.join(threaded)} with it"
        yield Problem(WARNING, what, _unbind(single[0]))
    for host, ranks in job.by_host().items():
        sharing: dict[tuple[int, ...], list[Rank]] = {}
        for rank in ranks:
            if rank.start is not None and len(rank.cores) < rank.host.cores:
                sharing.setdefault(rank.cores, []).append(rank)
        for cores, together in sharing.items():
            if len(together) > len(cores):
                what = f"{_named(together)} on {host} share {len(cores)} of {together[0].host.cores} cores"
                yield Problem(WARNING, what, f"{_unbind(together[0])}; or more cores for the job")


def _unbind(rank: Rank) -> str:
    command = "" if rank.start is None else rank.start.command
    if command.startswith("srun"):
        return "srun --cpus-per-task=CORES (in a batch script: export SRUN_CPUS_PER_TASK=CORES), or --cpu-bind=none"
    if _is_open_mpi(rank):
        return "mpirun --bind-to none, or --map-by ppr:RANKS:node:pe=CORES to give each rank its own"
    return "mpiexec -bind-to none, or -bind-to core:CORES to give each rank its own"


@check
def oversubscription(job: Job) -> Iterator[Problem]:
    """More ranks, or threads of ranks, than cores."""
    for host, ranks in job.by_host().items():
        cores = len({core for rank in ranks for core in rank.cores})
        if cores < ranks[0].host.cores and ranks[0].start is not None:
            continue  # `binding` looks at it
        if len(ranks) > cores:
            yield from _crowd(f"{len(ranks)} ranks on {host} have {cores} core{'s' * (cores > 1)}", ranks[0])
            continue
        threads = ranks[0].environment.get("OMP_NUM_THREADS", "")
        if len(ranks) > 1 and threads.isdecimal() and len(ranks) * int(threads) > cores:
            what = f"{len(ranks)} ranks on {host} with OMP_NUM_THREADS={threads} have {cores} cores"
            yield Problem(WARNING, what, f"export OMP_NUM_THREADS={cores // len(ranks)}")


def _crowd(what: str, rank: Rank) -> Iterator[Problem]:
    what = f"{what}: they take turns, and MPI waits busily"
    if _is_open_mpi(rank):
        if not _is_set(rank, "OMPI_MCA_mpi_yield_when_idle"):
            yield Problem(WARNING, what, "fewer ranks; or mpirun --mca mpi_yield_when_idle 1")
    elif not _is_set(rank, "MPIR_CVAR_POLLS_BEFORE_YIELD"):
        yield Problem(WARNING, what, "fewer ranks; or MPIR_CVAR_POLLS_BEFORE_YIELD=1 MPIR_CVAR_POSIX_POLL_FREQUENCY=1")


@check
def split_nodes(job: Job) -> Iterator[Problem]:
    """Ranks with one host name that MPI takes for ranks of several nodes: nothing goes through shared memory."""
    for host, ranks in job.by_host().items():
        apart = [rank for rank in ranks if rank.on_node is not None and rank.on_node < len(ranks)]
        if apart:
            what = f"{len(ranks)} ranks have the host name {host}, but MPI sees {apart[0].on_node} of them on a node"
            cure = "a container for all ranks of a host, or --ipc=host; nodes of Slurm named as their hosts are"
            yield Problem(WARNING, what, cure)


@check
def peer_reads(job: Job) -> Iterator[Problem]:
    """CMA refused: MPICH 5 fails in the middle of a collective, others copy twice."""
    refused = [rank for rank in job.ranks if rank.peer_reads is False]
    if not refused:
        return
    first = refused[0]
    yama = first.host.yama
    why = f"kernel.yama.ptrace_scope is {yama}" if yama else "a container's filter, or no CAP_SYS_PTRACE"
    what = f"{_named(refused)}: a process may not read another's memory (process_vm_readv; {why})"
    allow = "sysctl kernel.yama.ptrace_scope=0" if yama else "docker run --cap-add=SYS_PTRACE"
    # MPICH uses it by default since 5, and looks at yama alone before.
    if first.mpi is not None and re.match(r"MPICH Version ([5-9]|\d\d)", first.mpi.library) and not yama:
        if first.environment.get("MPIR_CVAR_CH4_CMA_ENABLE") != "0":
            level = ERROR if len(job.ranks) > 1 else WARNING
            cure = f"export MPIR_CVAR_CH4_CMA_ENABLE=0; or {allow}"
            yield Problem(level, f"{what}: MPICH fails in large messages", cure)
        return
    yield Problem(WARNING, f"{what}: large messages on a node are copied twice", allow)


@check
def shared_memory(job: Job) -> Iterator[Problem]:
    """A small /dev/shm, as containers have by default."""
    for host, ranks in job.by_host().items():
        free = ranks[0].host.shared_memory_free
        start = ranks[0].start
        count = max(len(ranks), (start.local_size or 1) if start is not None else 1)  # before the others are known
        if free is None or free >= LITTLE_SHARED[0] + LITTLE_SHARED[1] * count:
            continue
        level = ERROR if free < LEAST_SHARED * count else WARNING
        cure = "docker run --shm-size=4g or --ipc=host; leftovers of dead jobs: ls -l /dev/shm"
        what = f"/dev/shm on {host} has {free // _MIB} MiB left for {count} rank{'s' * (count > 1)}"
        yield Problem(level, what, cure)


@check
def limits(job: Job) -> Iterator[Problem]:
    """Limits that are too low for networks with RDMA, or for many connections."""
    locked = [rank for rank in job.ranks if rank.host.fabrics and rank.limits.get("memlock", -1) >= 0]
    if locked:
        what = f"{_named(locked)}: at most {locked[0].limits['memlock'] >> 10} KiB of memory can be locked, and "
        what += f"{', '.join(locked[0].host.fabrics)} must lock what it sends"
        yield Problem(WARNING, what, "ulimit -l unlimited (limits.conf; under Slurm: PropagateResourceLimits)")
    few = [rank for rank in job.ranks if 0 <= rank.limits.get("nofile", -1) < FEW_FILES]
    if few:
        what = f"{_named(few)}: at most {few[0].limits['nofile']} open files; each connection is one"
        yield Problem(WARNING, what, "ulimit -n 65536")


@check
def memory(job: Job) -> Iterator[Problem]:
    """A control group that is nearly full."""
    for host, ranks in job.by_host().items():
        limit, used = ranks[0].host.memory_limit, ranks[0].host.memory_used
        if limit and used and used > 0.9 * limit:
            what = f"{host}: {used // _MIB} of the {limit // _MIB} MiB that this job or container may use are used"
            yield Problem(WARNING, what, "a higher limit (srun --mem, docker run --memory)")


@check
def slow_start(job: Job) -> Iterator[Problem]:
    """Open MPI's wheel looks for fabrics that are not there."""
    mpi = job.first.mpi
    if mpi is None or mpi.seconds is None or mpi.seconds < SLOW_START or not _is_open_mpi(job.first):
        return
    if _by_tcp(job) and not _is_set(job.first, "OMPI_MCA_pml"):
        what = f"MPI took {mpi.seconds:.1f} s to start: it looked for fabrics (UCX, libfabric), and there is none here"
        yield Problem(
            WARNING, what, "export OMPI_MCA_pml=ob1 OMPI_MCA_osc=^ucx (here only: it would cut off InfiniBand)"
        )


@check
def tcp_polling(job: Job) -> Iterator[Problem]:
    """Open MPI over TCP: after crossing connects it looks at sockets every 10 ms only."""
    if len(job.by_host()) == 1 or not _is_open_mpi(job.first) or not _by_tcp(job):
        return
    if not _is_set(job.first, "OMPI_MCA_mpi_event_tick_rate", "OMPI_MCA_btl_tcp_links"):
        between = None if job.network is None else job.network.between
        here = "" if between is None else f" (here and now {between.seconds * 1e3:.3g} ms)"
        what = f"Open MPI over TCP: in some jobs a small message takes 5 ms, for the whole life of the job{here}"
        cure = "mpirun --mca mpi_event_tick_rate 1 (under srun: export OMPI_MCA_mpi_event_tick_rate=1)"
        yield Problem(WARNING, what, cure)


@check
def kill_on_bad_exit(job: Job) -> Iterator[Problem]:
    """srun lets the others wait for a rank that has died, unless it is told otherwise."""
    start = job.first.start
    if start is None or not start.command.startswith("srun") or len(job.ranks) == 1:
        return
    if not start.ends_together and job.first.environment.get("SLURM_KILL_BAD_EXIT") != "1":
        known = "here" if start.ends_together is False else "at most sites"
        what = f"by default srun does not end the job {known} when a rank dies: the others may wait for ever"
        yield Problem(NOTE, what, "srun --kill-on-bad-exit=1 (whether it was typed cannot be seen from here)")


@check
def opal_prefix(job: Job) -> Iterator[Problem]:
    """Open MPI's wheel finds its files by a variable that its mpirun sets, and srun does not."""
    first = job.first
    if first.start is None or not first.start.command.startswith("srun") or not _is_open_mpi(first):
        return
    if first.mpi is None or first.mpi.prefix == "" or _is_set(first, "OPAL_PREFIX"):
        return
    what = "Open MPI comes from a wheel, and srun does not tell it where its files are: it cannot explain its errors"
    yield Problem(WARNING, what, f"export OPAL_PREFIX={first.mpi.prefix}")


@check
def differences(job: Job) -> Iterator[Problem]:
    """Ranks that run something else than the others."""
    for name, cure in _SAME.items():
        told = [_facts(rank)[name] for rank in job.ranks]
        for key in sorted({key for facts in told for key in facts}):
            values: dict[str, list[Rank]] = {}
            for rank, facts in zip(job.ranks, told, strict=True):
                values.setdefault(facts.get(key, "none"), []).append(rank)
            if len(values) > 1:
                shown = "; ".join(f"{value} on {_named(ranks)}" for value, ranks in values.items())
                yield Problem(WARNING, f"{name}{key} differs: {shown}", cure)


_ENVIRONMENT = "one virtual environment on a shared file system, or the same one on every host"
_SAME = {  # what must be alike, and what to do
    "": _ENVIRONMENT,
    "the version of ": _ENVIRONMENT,
    "the number of ": "the same binding for all ranks (mpirun --bind-to, srun --cpu-bind, --cpus-per-task)",
    "the limit ": "the same limits on every host (limits.conf, PropagateResourceLimits of Slurm)",
    "the variable ": "mpirun -x NAME, mpiexec -genv NAME VALUE or srun --export=ALL, for all hosts",
}
_OWN = ("CUDA_VISIBLE_DEVICES", "SLURM_CPU_BIND")  # variables that may be each rank's own


def _facts(rank: Rank) -> dict[str, Mapping[str, str]]:
    """Return what must be alike, by the keys of `_SAME` and names."""
    library = "none" if rank.mpi is None else f"{rank.mpi.library} ({rank.mpi.file})"
    return {
        "": {"commlib": f"{rank.commlib} in {rank.folder}", "the MPI library": library},
        "the version of ": {"Python": rank.python, **rank.packages},
        "the number of ": {"cores": str(len(rank.cores))},
        "the limit ": {limit: str(value) for limit, value in rank.limits.items()},
        "the variable ": {name: text for name, text in rank.environment.items() if name not in _OWN},
    }
