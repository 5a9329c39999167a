"""Checks: the table of rules over facts, and those for what went wrong before anything could be looked at."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.diagnosis.agreement_checks import differences
from commlib.diagnosis.facts import Job, Rank
from commlib.diagnosis.library_checks import kill_on_bad_exit, opal_prefix, slow_start, slurm_default, tcp_polling
from commlib.diagnosis.machine_checks import limits, memory, peer_reads, shared_memory
from commlib.diagnosis.placement_checks import binding, oversubscription, split_nodes
from commlib.diagnosis.problem import ERROR, LEVELS, WARNING, Check, Problem, named

MOST_OF_A_KIND = 3  # problems that are told


def problems(job: Job) -> list[Problem]:
    """Return all that is wrong, errors first; of one kind, as on many hosts, the first few."""
    found: list[Problem] = []
    for one in CHECKS:
        kind = list(one(job))
        found += kind[:MOST_OF_A_KIND]
        if len(kind) > MOST_OF_A_KIND:
            found.append(Problem(kind[-1].level, f"{len(kind) - MOST_OF_A_KIND} more like the last", ""))
    return sorted(found, key=lambda problem: LEVELS.index(problem.level))


def failures(job: Job) -> Iterator[Problem]:
    """What went wrong on the way; the text says what to do."""
    for text in job.failures:
        what, _, cure = text.partition(" (a process that is meant to be alone")[0].partition(" Type ")
        yield Problem(ERROR, what.rstrip("."), cure)


def no_mpi(job: Job) -> Iterator[Problem]:
    """No library, on this machine or on some ranks. Alone that may be meant."""
    lacking = [rank for rank in job.ranks if rank.no_mpi]
    if lacking:
        level = ERROR if job.first.start is not None else WARNING
        what, _, cure = lacking[0].no_mpi.partition("): ")
        yield Problem(level, f"{named(lacking)}: {what}{')' * bool(cure)}", cure)


def settings(job: Job) -> Iterator[Problem]:
    """An unknown or bad COMMLIB_* or line in the file."""
    wrong: dict[str, list[Rank]] = {}
    for rank in job.ranks:
        wrong.setdefault(rank.wrong_settings, []).append(rank)
    wrong.pop("", None)
    for text, ranks in wrong.items():
        if any(text in failure for failure in job.failures):
            continue  # `commlib.init` has told it
        yield Problem(ERROR, f"{text} ({named(ranks)})", "commlib info --all, which lists them with their values")


CHECKS: tuple[Check, ...] = (
    failures,
    no_mpi,
    settings,
    binding,
    oversubscription,
    split_nodes,
    peer_reads,
    shared_memory,
    limits,
    memory,
    slow_start,
    tcp_polling,
    kill_on_bad_exit,
    slurm_default,
    opal_prefix,
    differences,
)
