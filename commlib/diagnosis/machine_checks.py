"""Machine: memory, limits, and what the system forbids."""

from __future__ import annotations

import re
from collections.abc import Iterator

from commlib.diagnosis.facts import Job
from commlib.diagnosis.problem import ERROR, MIB, WARNING, Problem, named

LITTLE_SHARED = 64 * MIB, 16 * MIB  # of /dev/shm in all, and for each rank: what containers have by default
LEAST_SHARED = 4 * MIB  # for each rank: with less MPICH ends the job (SIGBUS)
FEW_FILES = 1024


def peer_reads(job: Job) -> Iterator[Problem]:
    """CMA refused: MPICH 5 fails in the middle of a collective, others copy twice."""
    refused = [rank for rank in job.ranks if rank.peer_reads is False]
    if not refused:
        return
    first = refused[0]
    yama = first.host.yama
    why = f"kernel.yama.ptrace_scope is {yama}" if yama else "a container's filter, or no CAP_SYS_PTRACE"
    what = f"{named(refused)}: a process may not read another's memory (process_vm_readv; {why})"
    allow = "sysctl kernel.yama.ptrace_scope=0" if yama else "docker run --cap-add=SYS_PTRACE"
    # MPICH uses it by default since 5, and looks at yama alone before.
    if first.mpi is not None and re.match(r"MPICH Version ([5-9]|\d\d)", first.mpi.library) and not yama:
        if first.environment.get("MPIR_CVAR_CH4_CMA_ENABLE") != "0":
            level = ERROR if len(job.ranks) > 1 else WARNING
            cure = f"export MPIR_CVAR_CH4_CMA_ENABLE=0; or {allow}"
            yield Problem(level, f"{what}: MPICH fails in large messages", cure)
        return
    yield Problem(WARNING, f"{what}: large messages on a node are copied twice", allow)


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
        what = f"/dev/shm on {host} has {free // MIB} MiB left for {count} rank{'s' * (count > 1)}"
        yield Problem(level, what, cure)


def limits(job: Job) -> Iterator[Problem]:
    """Limits that are too low for networks with RDMA, or for many connections."""
    locked = [rank for rank in job.ranks if rank.host.fabrics and rank.limits.get("memlock", -1) >= 0]
    if locked:
        what = f"{named(locked)}: at most {locked[0].limits['memlock'] >> 10} KiB of memory can be locked, and "
        what += f"{', '.join(locked[0].host.fabrics)} must lock what it sends"
        yield Problem(WARNING, what, "ulimit -l unlimited (limits.conf; under Slurm: PropagateResourceLimits)")
    few = [rank for rank in job.ranks if 0 <= rank.limits.get("nofile", -1) < FEW_FILES]
    if few:
        what = f"{named(few)}: at most {few[0].limits['nofile']} open files; each connection is one"
        yield Problem(WARNING, what, "ulimit -n 65536")


def memory(job: Job) -> Iterator[Problem]:
    """A control group that is nearly full."""
    for host, ranks in job.by_host().items():
        limit, used = ranks[0].host.memory_limit, ranks[0].host.memory_used
        if limit and used and used > 0.9 * limit:
            what = f"{host}: {used // MIB} of the {limit // MIB} MiB that this job or container may use are used"
            yield Problem(WARNING, what, "a higher limit (srun --mem, docker run --memory)")
