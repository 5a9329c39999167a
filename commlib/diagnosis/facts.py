"""Facts as data: each rank on itself, its host and its MPI, and the measurements. All of it converts to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class HostFacts:
    """A machine. Sizes in bytes; None: unknown, or no limit."""

    name: str
    kernel: str
    cores: int
    memory: int | None = None
    memory_limit: int | None = None  # of the control group, container or job
    memory_used: int | None = None  # within that limit
    shared_memory: int | None = None  # /dev/shm
    shared_memory_free: int | None = None
    yama: int | None = None  # kernel.yama.ptrace_scope
    links: Mapping[str, str] = field(default_factory=dict)  # interfaces that are up, with their speed as text
    fabrics: Mapping[str, str] = field(default_factory=dict)  # InfiniBand and the like, with their rate as text
    gpus: tuple[str, ...] = ()
    load: float | None = None  # processes that ran or waited for a core, on average over the last minute
    busy: tuple[str, ...] = ()  # the processes that take most of the cores, if the machine is busy


@dataclass(frozen=True, slots=True)
class MpiFacts:
    """An MPI library. vendor: "Open MPI", "MPICH", ... or "" if unknown.

    seconds: the duration of its start, None if it was not started. prefix: the Python environment of its wheel, "" if
    it is not from a wheel.
    """

    library: str
    file: str
    vendor: str
    abi: str
    prefix: str = ""
    standard: str = ""
    threads: str = ""
    cuda: str = ""  # whether it accepts GPU memory, and the source of that answer
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """A process as its launcher describes it; None for missing values. command: the launcher's command."""

    command: str
    protocol: str
    rank: int
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One process. `cores`: the cores that it may use; `limits` as in `ulimit`, -1 for none."""

    rank: int
    host: HostFacts
    commlib: str
    folder: str
    python: str
    packages: Mapping[str, str]
    cores: tuple[int, ...]
    limits: Mapping[str, int]
    cache: str
    environment: Mapping[str, str]  # variables of launcher and MPI
    settings: Mapping[str, str]  # by COMMLIB_ name: the settings given
    origins: Mapping[str, str]
    start: LaunchFacts | None = None
    mpi: MpiFacts | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)  # settings of Slurm, by name
    peer_reads: bool | None = None  # whether it can read the memory of another process (CMA); None: not tried
    on_node: int | None = None  # ranks that MPI sees on this rank's node
    wrong_settings: str = ""
    no_mpi: str = ""  # the reason if no MPI was found


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A measured pair of ranks. seconds: one way, of 8 bytes. bandwidth: bytes per second, in messages of nbytes."""

    ranks: tuple[int, int]
    seconds: float
    bandwidth: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The measurements: a pair of ranks on one node, a pair on two nodes, and an all-reduce of all ranks.

    all_reduce: seconds by bytes.
    """

    node: MeasuredLink | None
    between: MeasuredLink | None
    all_reduce: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class JobFacts:
    """All facts. gpus: the path of GPU data. failures: errors while collecting."""

    ranks: tuple[RankFacts, ...]
    gpus: str = ""
    network: NetworkFacts | None = None
    failures: tuple[str, ...] = ()

    @property
    def first(self) -> RankFacts:
        """Return the reporting rank."""
        return self.ranks[0]

    def by_host(self) -> dict[str, list[RankFacts]]:
        """Return the ranks of each host."""
        hosts: dict[str, list[RankFacts]] = {}
        for rank in self.ranks:
            hosts.setdefault(rank.host.name, []).append(rank)
        return hosts
