"""Agreement checks: software, limits and variables that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from commlib.diagnosis.facts import JobFacts, RankFacts
from commlib.diagnosis.problem import WARNING, Problem, format_ranks


def differences(job: JobFacts) -> Iterator[Problem]:
    """Facts that differ between ranks."""
    for name, cure in _SAME.items():
        facts_of_ranks = [_facts(rank)[name] for rank in job.ranks]
        for key in sorted({key for facts in facts_of_ranks for key in facts}):
            values: dict[str, list[RankFacts]] = {}
            for rank, facts in zip(job.ranks, facts_of_ranks, strict=True):
                values.setdefault(facts.get(key, "none"), []).append(rank)
            if len(values) > 1:
                shown = "; ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in values.items())
                yield Problem(WARNING, f"{name}{key} differs: {shown}", cure)


_ENVIRONMENT = "one virtual environment on a shared file system, or the same one on every host"
_SAME = {  # facts that must be equal, with the cure
    "": _ENVIRONMENT,
    "the version of ": _ENVIRONMENT,
    "the number of ": "the same binding for all ranks (mpirun --bind-to, srun --cpu-bind, --cpus-per-task)",
    "the limit ": "the same limits on every host (limits.conf, PropagateResourceLimits of Slurm)",
    "the variable ": "mpirun -x NAME, mpiexec -genv NAME VALUE or srun --export=ALL, for all hosts",
}
_MAY_DIFFER = ("CUDA_VISIBLE_DEVICES", "SLURM_CPU_BIND")  # variables that may differ between ranks


def _facts(rank: RankFacts) -> dict[str, Mapping[str, str]]:
    """Return the facts that must be equal, by key of `_SAME` and by name."""
    library = "none" if rank.mpi is None else f"{rank.mpi.library} ({rank.mpi.file})"
    return {
        "": {"commlib": f"{rank.commlib} in {rank.folder}", "the MPI library": library},
        "the version of ": {"Python": rank.python, **rank.packages},
        "the number of ": {"cores": str(len(rank.cores))},
        "the limit ": {limit: str(value) for limit, value in rank.limits.items()},
        "the variable ": {name: text for name, text in rank.environment.items() if name not in _MAY_DIFFER},
    }
