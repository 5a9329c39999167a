"""Machine checks: memory, limits, and system restrictions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from commlib.diagnosis.facts import JobFacts
from commlib.diagnosis.load import is_busy
from commlib.diagnosis.problem import ERROR, MIB, WARNING, Problem, format_ranks

LITTLE_SHARED = 64 * MIB, 16 * MIB  # of /dev/shm in total, and per rank: the default in containers
LEAST_SHARED = 4 * MIB  # per rank: with less, MPICH ends the job (SIGBUS)
FEW_FILES = 1024


def peer_reads(job: JobFacts) -> Iterator[Problem]:
    """CMA refused: MPICH 5 fails in the middle of a collective, others copy twice."""
    refused = [rank for rank in job.ranks if rank.peer_reads is False]
    if not refused:
        return
    first = refused[0]
    yama = first.host.yama
    why = f"kernel.yama.ptrace_scope is {yama}" if yama else "a container's filter, or no CAP_SYS_PTRACE"
    what = f"{format_ranks(refused)}: reading another process's memory is not permitted (process_vm_readv; {why})"
    allow = "sysctl kernel.yama.ptrace_scope=0" if yama else "docker run --cap-add=SYS_PTRACE"
    # MPICH uses it by default since version 5, and checks only yama first.
    if first.mpi is not None and re.match(r"MPICH Version ([5-9]|\d\d)", first.mpi.library) and not yama:
        if first.environment.get("MPIR_CVAR_CH4_CMA_ENABLE") != "0":
            level = ERROR if len(job.ranks) > 1 else WARNING
            cure = f"export MPIR_CVAR_CH4_CMA_ENABLE=0; or {allow}"
            yield Problem(level, f"{what}: MPICH fails in large messages", cure)
        return
    yield Problem(WARNING, f"{what}: large messages on a node are copied twice", allow)


def shared_memory(job: JobFacts) -> Iterator[Problem]:
    """A small /dev/shm, the default in containers."""
    for host, ranks in job.by_host().items():
        free = ranks[0].host.shared_memory_free
        start = ranks[0].start
        count = max(len(ranks), (start.local_size or 1) if start is not None else 1)  # when this rank knows no other
        if free is None or free >= LITTLE_SHARED[0] + LITTLE_SHARED[1] * count:
            continue
        level = ERROR if free < LEAST_SHARED * count else WARNING
        cure = "docker run --shm-size=4g or --ipc=host; leftovers of dead jobs: ls -l /dev/shm"
        what = f"/dev/shm on {host} has {free // MIB} MiB free for {count} rank{'s' * (count > 1)}"
        yield Problem(level, what, cure)


def limits(job: JobFacts) -> Iterator[Problem]:
    """Limits too low for RDMA networks, or for many connections."""
    locked = [rank for rank in job.ranks if rank.host.fabrics and rank.limits.get("memlock", -1) >= 0]
    if locked:
        what = f"{format_ranks(locked)}: at most {locked[0].limits['memlock'] >> 10} KiB of memory can be locked, but "
        what += f"{', '.join(locked[0].host.fabrics)} must lock the memory of messages"
        yield Problem(WARNING, what, "ulimit -l unlimited (limits.conf; under Slurm: PropagateResourceLimits)")
    few = [rank for rank in job.ranks if 0 <= rank.limits.get("nofile", -1) < FEW_FILES]
    if few:
        what = f"{format_ranks(few)}: at most {few[0].limits['nofile']} open files; each connection needs one"
        yield Problem(WARNING, what, "ulimit -n 65536")


def memory(job: JobFacts) -> Iterator[Problem]:
    """A memory control group that is nearly full."""
    for host, ranks in job.by_host().items():
        limit, used = ranks[0].host.memory_limit, ranks[0].host.memory_used
        if limit and used and used > 0.9 * limit:
            what = f"{host}: {used // MIB} of the {limit // MIB} MiB allowed for this job or container are used"
            yield Problem(WARNING, what, "a higher limit (srun --mem, docker run --memory)")


def load(job: JobFacts) -> Iterator[Problem]:
    """Other work on the cores: waits and timings are longer than on a quiet machine, and vary."""
    for name, ranks in job.by_host().items():
        host = ranks[0].host
        if not is_busy(host.load, host.cores):
            continue
        by = f" ({', '.join(host.busy)})" if host.busy else ""
        what = (
            f"{name} is busy: {host.load:.1f} processes wanted its {host.cores} cores in the last minute{by}: timings "
        )
        what += "of benchmarks and training will be off, and no measurement of 'commlib tune' should be kept"
        yield Problem(WARNING, what, "top, and wait for the others; or cores of your own (sbatch --exclusive)")
