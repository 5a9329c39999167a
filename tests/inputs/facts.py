"""Made-up facts for the checks of `commlib info`: a job without problems, to be changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from commlib.diagnosis.facts import HostFacts, JobFacts, LaunchFacts, MpiFacts, RankFacts

OPEN_MPI = MpiFacts(
    "Open MPI v5.0.11", "/usr/lib/libmpi.so.40", "Open MPI", "openmpi", "", "3.1", "MULTIPLE", "no (says 0)", 0.2
)
MPICH = replace(OPEN_MPI, library="MPICH Version 5.0.2", file="/usr/lib/libmpi.so.12", vendor="MPICH", abi="mpich")


def host(name: str = "a", cores: int = 8) -> HostFacts:
    return HostFacts(
        name, "Linux 6", cores, 64 << 30, None, None, 32 << 30, 32 << 30, None, {"eth0": "10 Gbit/s"}, {}, ()
    )


def rank(
    number: int, size: int, *, at: HostFacts | None = None, command: str = "mpirun", mpi: MpiFacts = OPEN_MPI
) -> RankFacts:
    at = at or host()
    return RankFacts(
        rank=number,
        host=at,
        commlib="1.0",
        folder="/env/commlib",
        python="3.12.1",
        packages={"numpy": "2.0", "torch": "2.6"},
        cores=tuple(range(at.cores)),
        limits={"memlock": -1, "nofile": 65536, "nproc": -1, "core": 0},
        cache="/home/me/.cache/commlib",
        environment={},
        settings={},
        origins={},
        start=LaunchFacts(command, "PMIx", number, size),
        mpi=mpi,
        peer_reads=True,
    )


def job(
    size: int = 2,
    change: Callable[[RankFacts], RankFacts] = lambda rank: rank,
    *,
    command: str = "mpirun",
    mpi: MpiFacts = OPEN_MPI,
) -> JobFacts:
    """Return a job of a launcher on one host, with each rank changed."""
    return JobFacts(tuple(change(rank(number, size, command=command, mpi=mpi)) for number in range(size)))


def on_hosts(names: str, change: Callable[[RankFacts], RankFacts] = lambda rank: rank) -> JobFacts:
    """Return a job with a rank on each host; each letter names a host."""
    return JobFacts(tuple(change(rank(number, len(names), at=host(name))) for number, name in enumerate(names)))
