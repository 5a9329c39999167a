"""Checks: the table of rules over facts, and rules for failures while collecting facts."""

from __future__ import annotations

from collections.abc import Iterator

from commlib.diagnosis.agreement_checks import differences
from commlib.diagnosis.facts import JobFacts, RankFacts
from commlib.diagnosis.library_checks import kill_on_bad_exit, opal_prefix, slow_start, slurm_default, tcp_polling
from commlib.diagnosis.machine_checks import limits, load, memory, peer_reads, shared_memory
from commlib.diagnosis.placement_checks import binding, oversubscription, split_nodes
from commlib.diagnosis.problem import ERROR, LEVELS, WARNING, Check, Problem, format_ranks

MOST_OF_A_KIND = 3  # problems to show


def problems(job: JobFacts) -> list[Problem]:
    """Return all problems, errors first; at most a few of one kind, as on many hosts."""
    result: list[Problem] = []
    for one in CHECKS:
        kind = list(one(job))
        result += kind[:MOST_OF_A_KIND]
        if len(kind) > MOST_OF_A_KIND:
            result.append(Problem(kind[-1].level, f"{len(kind) - MOST_OF_A_KIND} more like the last", ""))
    return sorted(result, key=lambda problem: LEVELS.index(problem.level))


def failures(job: JobFacts) -> Iterator[Problem]:
    """Failures while collecting facts; the text includes the cure."""
    for text in job.failures:
        what, _, cure = text.partition(" (a process that is meant to be alone")[0].partition(" Type ")
        yield Problem(ERROR, what.rstrip("."), cure)


def no_mpi(job: JobFacts) -> Iterator[Problem]:
    """No MPI library, on this machine or on some ranks. Without a launcher that may be intended."""
    lacking = [rank for rank in job.ranks if rank.no_mpi]
    if lacking:
        level = ERROR if job.first.start is not None else WARNING
        what, _, cure = lacking[0].no_mpi.partition("): ")
        yield Problem(level, f"{format_ranks(lacking)}: {what}{')' * bool(cure)}", cure)


def settings(job: JobFacts) -> Iterator[Problem]:
    """An unknown or invalid COMMLIB_* variable or line in the file of settings."""
    wrong: dict[str, list[RankFacts]] = {}
    for rank in job.ranks:
        wrong.setdefault(rank.wrong_settings, []).append(rank)
    wrong.pop("", None)
    for text, ranks in wrong.items():
        if any(text in failure for failure in job.failures):
            continue  # `commlib.init` has reported it
        yield Problem(ERROR, f"{text} ({format_ranks(ranks)})", "commlib info --all, which lists all settings")


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
    load,
    slow_start,
    tcp_polling,
    kill_on_bad_exit,
    slurm_default,
    opal_prefix,
    differences,
)
