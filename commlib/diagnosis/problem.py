"""Problem: what is wrong, how bad it is, and what to type; and words that all checks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from commlib.config.settings import ranks_text
from commlib.diagnosis.facts import Job, Rank

LEVELS = ERROR, WARNING, NOTE = "error", "warning", "note"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """Say what is wrong, and what to type. level: one of LEVELS.

    An error means that a job cannot run so, or runs wrongly; a warning that it runs, but worse than it could; a note
    tells what cannot be seen from here.
    """

    level: str
    what: str
    cure: str


Check = Callable[[Job], Iterator[Problem]]
"""A rule over facts alone: so each is tested with made-up ones."""


def named(ranks: Iterable[Rank]) -> str:
    """Return the numbers of ranks in words."""
    return ranks_text(sorted(rank.rank for rank in ranks))


def is_open_mpi(rank: Rank) -> bool:
    """Return whether the library is Open MPI."""
    return rank.mpi is not None and rank.mpi.vendor == "Open MPI"


def is_set(rank: Rank, *names: str) -> bool:
    """Return whether MPI was told one of these variables."""
    return any(name in rank.environment for name in names)


def is_by_srun(rank: Rank) -> bool:
    """Return whether srun has started the rank."""
    return rank.start is not None and rank.start.command.startswith("srun")


def is_by_tcp(job: Job) -> bool:
    """Return whether no host has a faster fabric than TCP."""
    return not any(rank.host.fabrics for rank in job.ranks)
