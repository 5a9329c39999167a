"""Launchers: a table of launchers, with the environment variables that each sets for its processes.

Inside a Slurm allocation, mpirun and mpiexec start a daemon on each node by srun, and the processes inherit the
daemons' SLURM_* variables, which count daemons. So the rows of Slurm come last. Sources: Open MPI's documentation
("Environment variables set for MPI applications"), Slurm's manual of srun and its plugin mpi/cray_shasta, Flux' RFC 13,
and variables observed under MPICH, Intel MPI, MVAPICH, PALS and jsrun.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Launcher:
    """A launcher and the names of its environment variables; "" for a variable that it does not set.

    name: its name in an error, at the start of a sentence. command: the command that the user typed. protocol: the
    protocol by which MPI finds its peers: "PMIx", "PMI", or "" if the launcher offers none. where: variables that must
    be set, each with the beginning of its value. unless: variables that must not be set.
    """

    name: str
    command: str
    protocol: str
    rank: str
    size: str = ""
    local_rank: str = ""
    local_size: str = ""
    node: str = ""
    where: tuple[tuple[str, str], ...] = ()
    unless: tuple[str, ...] = ()

    @property
    def is_srun(self) -> bool:
        """Whether it is Slurm's srun."""
        return self.command.startswith("srun")


def _srun(kind: str, protocol: str, rank: str, size: str = "SLURM_STEP_NUM_TASKS", **more: Any) -> Launcher:
    """Return a row for srun, which sets its own variables for local ranks with every MPI protocol."""
    command = f"srun --mpi={kind}" if kind else "srun"
    counted = (("SLURM_PROCID", ""), (rank, "")) if kind else ()
    step = (("SLURM_STEP_ID", ""), *counted, *more.pop("where", ()))
    local = "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"
    return Launcher(f"Slurm's {command}", command, protocol, rank, size, *local, where=step, **more)


# The first match counts: a launcher that also sets another one's variables comes before it.
LAUNCHERS = (
    Launcher(
        "IBM's launcher (jsrun)", "jsrun", "PMIx",
        "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    Launcher(
        "Open MPI's launcher", "mpirun", "PMIx",
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH's launcher", "mpirun_rsh", "PMI",
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "MVAPICH's launcher", "mpirun_rsh", "PMI",
        "MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_SIZE",
    ),
    _srun("cray_shasta", "PMI", "PALS_RANKID"),
    Launcher(
        "HPE's launcher (PALS)", "mpiexec of PALS", "PMI",
        "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_NODEID",
    ),
    Launcher("Flux' launcher", "flux run", "PMI", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    _srun("pmi2", "PMI", "PMI_RANK", "PMI_SIZE", unless=("MPI_LOCALRANKID",)),
    Launcher(
        "The launcher of MPICH or Intel MPI (mpiexec)", "mpiexec", "PMI",
        "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    ),
    _srun("pmix", "PMIx", "PMIX_RANK", where=(("PMIX_NAMESPACE", "slurm."),)),
    Launcher("A launcher that speaks PMIx", "prun", "PMIx", "PMIX_RANK"),
    _srun("", "", "SLURM_PROCID"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """The values that a launcher has set for this process; None for values that it does not set."""

    launcher: Launcher
    rank: int
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None

    @property
    def processes(self) -> int:
        """The number of processes that it started, or a lower bound."""
        return self.size or self.rank + 1


def find_launcher(environment: Mapping[str, str]) -> LaunchInfo | None:
    """Find the launcher of this process, and its rank there, in the environment; None without a known launcher."""
    for launcher in LAUNCHERS:
        rank, node = _number(environment, launcher.rank), _number(environment, launcher.node)
        if not _fits(launcher, environment) or (rank is None and not launcher.where):
            continue
        return LaunchInfo(
            launcher,
            rank or 0,
            _number(environment, launcher.size),
            _number(environment, launcher.local_rank),
            _tasks_on(environment.get(launcher.local_size, ""), node or 0),
            node,
        )
    return None


def _fits(launcher: Launcher, environment: Mapping[str, str]) -> bool:
    fits = all(name in environment and environment[name].startswith(start) for name, start in launcher.where)
    return fits and not any(name in environment for name in launcher.unless)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def _tasks_on(text: str, node: int) -> int | None:
    """Return the tasks on a node from a plain number, or from Slurm's list "4(x2),1"."""
    if text.isdecimal():
        return int(text)
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        node -= int(times or 1)
        if node < 0:
            return int(count)
    return None
