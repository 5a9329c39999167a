"""Facts as data: what each rank tells of itself, its host and its MPI, and what was measured. All becomes JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Host:
    """Describe a machine. Sizes in bytes; None: not known, or no limit."""

    name: str
    kernel: str
    cores: int
    memory: int | None = None
    memory_limit: int | None = None  # of the control group, container or job
    memory_used: int | None = None  # in it
    shared_memory: int | None = None  # /dev/shm
    shared_memory_free: int | None = None
    yama: int | None = None  # kernel.yama.ptrace_scope
    links: Mapping[str, str] = field(default_factory=dict)  # interfaces that are up: their speed in words
    fabrics: Mapping[str, str] = field(default_factory=dict)  # InfiniBand and the like: their rate in words
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mpi:
    """Describe an MPI library. vendor: "Open MPI", "MPICH", ... or "" if unknown.

    seconds: what its start took, None if it was not started. prefix: the environment of Python that it was installed
    into, "" if it comes from elsewhere.
    """

    library: str
    file: str
    vendor: str
    abi: str
    prefix: str = ""
    standard: str = ""
    threads: str = ""
    cuda: str = ""  # whether it takes memory of GPUs, and how that was found out
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Describe the launcher by its own word; None where it says nothing. command: what was typed."""

    command: str
    protocol: str
    rank: int
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Rank:
    """Describe one process. `cores` it may run on; `limits` as `ulimit` has them, -1 for none."""

    rank: int
    host: Host
    commlib: str
    folder: str
    python: str
    packages: Mapping[str, str]
    cores: tuple[int, ...]
    limits: Mapping[str, int]
    cache: str
    environment: Mapping[str, str]  # what launcher and MPI were told
    settings: Mapping[str, str]  # by COMMLIB_ name: those that were given
    origins: Mapping[str, str]
    start: Start | None = None
    mpi: Mpi | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)  # settings of the cluster, by their names
    peer_reads: bool | None = None  # whether it can read the memory of another process (CMA); None: not tried
    on_node: int | None = None  # ranks that MPI sees on this rank's node
    wrong_settings: str = ""
    no_mpi: str = ""  # why there is none


@dataclass(frozen=True, slots=True)
class Link:
    """One pair of ranks, measured. seconds: one way, of 8 bytes. bandwidth: bytes per second, in messages of nbytes."""

    ranks: tuple[int, int]
    seconds: float
    bandwidth: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class Network:
    """What was measured: a pair of ranks on a node, one on two nodes, and an all-reduce of all ranks.

    all_reduce: seconds by bytes.
    """

    node: Link | None
    between: Link | None
    all_reduce: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that is known. gpus: how their data goes. failures: what went wrong on the way."""

    ranks: tuple[Rank, ...]
    gpus: str = ""
    network: Network | None = None
    failures: tuple[str, ...] = ()

    @property
    def first(self) -> Rank:
        """Return the rank that speaks."""
        return self.ranks[0]

    def by_host(self) -> dict[str, list[Rank]]:
        """Return the ranks of each host."""
        hosts: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            hosts.setdefault(rank.host.name, []).append(rank)
        return hosts
