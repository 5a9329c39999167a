"""The screen of `commlib info`: the facts in a line or two each, then the problems and the commands to type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from commlib.config.settings import ranks_text
from commlib.console.text import bytes_text, seconds_text
from commlib.console.width import wrap
from commlib.diagnosis.facts import JobFacts, MeasuredLink, MpiFacts, RankFacts
from commlib.diagnosis.problem import Problem

HEADING = "What is wrong:"
_LABEL = 10  # columns
_OF_OPEN_MPI = ("OMPI_", "OPAL_", "PMIX_", "PRTE_")
_OF_MPICH = ("I_MPI_", "MPICH_", "MPIR_", "MV2_", "MVP_")


def job_text(job: JobFacts, width: int | None) -> str:
    """Return the facts, one line each: a label and a text."""
    lines = [f"{label:<{_LABEL}}{text}" for label, text in _lines(job)]
    return wrap("\n".join(lines), width, indent=_LABEL)


def problems_text(problems: Sequence[Problem], width: int | None) -> str:
    """Return the problems, each with a command to type."""
    if not problems:
        return "Nothing is wrong, as far as commlib can see."
    parts = [HEADING]
    for problem in problems:
        parts.append(wrap(f"- {problem.level}: {problem.what}", width, indent=2))
        if problem.cure:
            parts.append(wrap(f"    type: {problem.cure}", width, indent=10))
    return "\n".join(parts)


def _lines(job: JobFacts) -> Iterator[tuple[str, str]]:
    first = job.first
    host = first.host
    yield "commlib", f"{first.commlib}, {first.folder}"
    yield "Python", f"{first.python}, {host.kernel}"
    yield "packages", ", ".join(f"{name} {version}" for name, version in first.packages.items())
    yield from _mpi(first)
    yield from _start(job)
    yield "cores", _cores(job) + ("" if host.load is None else f"; load {host.load:.1f} in the last minute")
    yield "GPUs", "; ".join(filter(None, (", ".join(host.gpus), job.gpus))) or "not checked"
    yield "memory", _memory(first)
    yield "limits", ", ".join(f"{name} {_limit(name, value)}" for name, value in first.limits.items())
    yield "CMA", _peers(job)
    yield "links", ", ".join(f"{name} {text}" for name, text in {**host.fabrics, **host.links}.items()) or "none"
    yield from _network(job)
    yield "cache", first.cache
    yield "settings", _settings(first)


def _settings(rank: RankFacts) -> str:
    if rank.wrong_settings:
        return "invalid"
    if not rank.settings:
        return "all have their defaults ('commlib info --all' lists them)"
    return ", ".join(f"{name}={value} ({rank.origins[name]})" for name, value in rank.settings.items())


def _mpi(rank: RankFacts) -> Iterator[tuple[str, str]]:
    if rank.mpi is None:
        yield "MPI", f"none: {rank.no_mpi}" if rank.no_mpi else "not checked yet"
        return
    yield "MPI", f"{rank.mpi.library} ({rank.mpi.file})" if rank.mpi.file else rank.mpi.library
    if rank.mpi.seconds is not None:
        yield "", _started(rank.mpi, rank.mpi.seconds)
        yield "", f"accepts GPU memory: {rank.mpi.cuda}"


def _started(mpi: MpiFacts, seconds: float) -> str:
    how = f"MPI {mpi.standard}, ABI {mpi.abi}, MPI_THREAD_{mpi.threads}"
    return f"{how}, started in {seconds_text(seconds)}"


def _start(job: JobFacts) -> Iterator[tuple[str, str]]:
    start = job.first.start
    steering = " ".join(f"{name}={text}" for name, text in _effective_variables(job.first).items())
    if start is None:
        yield "launcher", f"none; {steering}" if steering else "none"
        return
    protocol = f" ({start.protocol})" if start.protocol else " (without PMI)"
    yield "launcher", f"{start.command}{protocol}{'; ' + steering if steering else ''}"
    if (start.size or 1) > len(job.ranks) == 1:
        alone = "" if job.first.mpi is None else "; MPI sees only this one"
        yield "ranks", f"{start.size} processes were started{alone}"
        return
    hosts = job.by_host()
    where = "; ".join(f"{name}: {_ranks(ranks)}" for name, ranks in list(hosts.items())[:4])
    more = f"; and {len(hosts) - 4} more" if len(hosts) > 4 else ""
    yield "ranks", f"{len(job.ranks)} on {len(hosts)} host{'s' * (len(hosts) > 1)}: {where}{more}"


def _effective_variables(rank: RankFacts) -> dict[str, str]:
    """Return the variables that this library and its launcher read."""
    vendor = "" if rank.mpi is None else rank.mpi.vendor
    ignored: tuple[str, ...] = ()
    if vendor == "Open MPI":
        ignored = _OF_MPICH
    elif "MPICH" in vendor or vendor in ("Intel", "MVAPICH"):
        ignored = _OF_OPEN_MPI
    return {name: text for name, text in rank.environment.items() if not name.startswith(ignored)}


def _ranks(ranks: Sequence[RankFacts]) -> str:
    return ranks_text([rank.rank for rank in ranks])


def _cores(job: JobFacts) -> str:
    first = job.first
    counts = {len(rank.cores) for rank in job.ranks}
    each = " for each rank" if first.start is not None else ""
    if counts == {first.host.cores}:
        return f"{first.host.cores}{each}, not bound"
    shown = [f"rank {rank.rank}: {_ranges(rank.cores)}" for rank in job.ranks[:8]]
    more = f" and {len(job.ranks) - 8} more" if len(job.ranks) > 8 else ""
    spread = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{spread} of {first.host.cores}{each}, bound ({'; '.join(shown)}{more})"


def _ranges(cores: Sequence[int]) -> str:
    return ranks_text(cores).removeprefix("ranks ").removeprefix("rank ")


def _memory(rank: RankFacts) -> str:
    host, parts = rank.host, []
    if host.memory is not None:
        parts.append(f"{_gib(host.memory)}")
    if host.memory_limit is not None:
        used = "" if host.memory_used is None else f", {_gib(host.memory_used)} used"
        parts.append(f"limit {_gib(host.memory_limit)}{used}")
    if host.shared_memory is None or host.shared_memory_free is None:
        parts.append("no /dev/shm")
    else:
        used = _gib(host.shared_memory - host.shared_memory_free)
        parts.append(f"/dev/shm {_gib(host.shared_memory)}, {used} used")
    return "; ".join(parts)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def _limit(name: str, value: int) -> str:
    if value < 0:
        return "unlimited"
    if name != "memlock":
        return str(value)
    return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"


def _peers(job: JobFacts) -> str:
    answers = {rank.peer_reads for rank in job.ranks} - {None}
    if not answers:
        return "reading another process's memory was not tried"
    may = "may" if answers == {True} else "may not"
    yama = "" if job.first.host.yama is None else f" (kernel.yama.ptrace_scope {job.first.host.yama})"
    return f"a process {may} read another's memory{yama}"


def _network(job: JobFacts) -> Iterator[tuple[str, str]]:
    if job.network is None:
        return
    network = job.network
    named: Mapping[str, MeasuredLink | None] = {"on a node": network.node, "between": network.between}
    parts = [f"{name} {_link(link)}" for name, link in named.items() if link is not None]
    yield "network", "; ".join(parts)
    every = ", ".join(f"{bytes_text(nbytes)}B in {seconds_text(spent)}" for nbytes, spent in network.all_reduce.items())
    yield "", f"all-reduce of {len(job.ranks)} ranks: {every}"


def _link(link: MeasuredLink) -> str:
    pair = f"ranks {link.ranks[0]} and {link.ranks[1]}"
    return (
        f"{seconds_text(link.seconds)} one way, {link.bandwidth / 1e9:.2f} GB/s in {bytes_text(link.nbytes)}B ({pair})"
    )
