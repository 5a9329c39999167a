"""Problem: a fault, its level, and the command to type; and predicates shared by the checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from commlib.config.settings import ranks_text
from commlib.diagnosis.facts import JobFacts, RankFacts

LEVELS = ERROR, WARNING, NOTE = "error", "warning", "note"
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault, and the command to type. level: one of LEVELS.

    An error means that a job cannot run, or runs wrongly; a warning that it runs worse than it could; a note points at
    something that this process cannot see.
    """

    level: str
    what: str
    cure: str


Check = Callable[[JobFacts], Iterator[Problem]]
"""A rule over facts alone, so that tests can pass made-up facts."""


def format_ranks(ranks: Iterable[RankFacts]) -> str:
    """Return the numbers of ranks as text."""
    return ranks_text(sorted(rank.rank for rank in ranks))


def is_open_mpi(rank: RankFacts) -> bool:
    """Return whether the library is Open MPI."""
    return rank.mpi is not None and rank.mpi.vendor == "Open MPI"


def is_set(rank: RankFacts, *names: str) -> bool:
    """Return whether one of these variables of MPI is set."""
    return any(name in rank.environment for name in names)


def is_by_srun(rank: RankFacts) -> bool:
    """Return whether srun has started the rank."""
    return rank.start is not None and rank.start.command.startswith("srun")


def is_by_tcp(job: JobFacts) -> bool:
    """Return whether no host has a faster fabric than TCP."""
    return not any(rank.host.fabrics for rank in job.ranks)
