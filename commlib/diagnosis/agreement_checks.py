"""Agreement: ranks that run something else than the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from commlib.diagnosis.facts import Job, Rank
from commlib.diagnosis.problem import WARNING, Problem, named


def differences(job: Job) -> Iterator[Problem]:
    """Ranks that run something else than the others."""
    for name, cure in _SAME.items():
        told = [_facts(rank)[name] for rank in job.ranks]
        for key in sorted({key for facts in told for key in facts}):
            values: dict[str, list[Rank]] = {}
            for rank, facts in zip(job.ranks, told, strict=True):
                values.setdefault(facts.get(key, "none"), []).append(rank)
            if len(values) > 1:
                shown = "; ".join(f"{value} on {named(ranks)}" for value, ranks in values.items())
                yield Problem(WARNING, f"{name}{key} differs: {shown}", cure)


_ENVIRONMENT = "one virtual environment on a shared file system, or the same one on every host"
_SAME = {  # what must be alike, and what to do
    "": _ENVIRONMENT,
    "the version of ": _ENVIRONMENT,
    "the number of ": "the same binding for all ranks (mpirun --bind-to, srun --cpu-bind, --cpus-per-task)",
    "the limit ": "the same limits on every host (limits.conf, PropagateResourceLimits of Slurm)",
    "the variable ": "mpirun -x NAME, mpiexec -genv NAME VALUE or srun --export=ALL, for all hosts",
}
_OWN = ("CUDA_VISIBLE_DEVICES", "SLURM_CPU_BIND")  # variables that may be each rank's own


def _facts(rank: Rank) -> dict[str, Mapping[str, str]]:
    """Return what must be alike, by the keys of `_SAME` and names."""
    library = "none" if rank.mpi is None else f"{rank.mpi.library} ({rank.mpi.file})"
    return {
        "": {"commlib": f"{rank.commlib} in {rank.folder}", "the MPI library": library},
        "the version of ": {"Python": rank.python, **rank.packages},
        "the number of ": {"cores": str(len(rank.cores))},
        "the limit ": {limit: str(value) for limit, value in rank.limits.items()},
        "the variable ": {name: text for name, text in rank.environment.items() if name not in _OWN},
    }
