"""Alone: ask a process of one's own, which no launcher has started and which may hang or die of what it tries."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What launchers tell the processes that they start, by the beginnings of names.
_OF_LAUNCHERS = (
    "ALPS_", "FLUX_", "HYDI_", "HYDRA_", "I_MPI_HYDRA_", "JSM_", "MPIRUN_", "MPISPAWN_", "MPI_LOCAL", "MV2_COMM_WORLD_",
    "MVP_COMM_WORLD_", "OMPI_", "ORTE_", "PALS_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "SLURMD_", "SLURM_",
)  # fmt: skip
# And what users say of how messages go, with which MPI must be tried.
_PARTS = ("accelerator", "btl", "coll", "common", "mca_", "mpool", "mtl", "opal_", "osc", "pml", "rcache", "smsc")
_OF_USERS = tuple(f"OMPI_MCA_{part}" for part in _PARTS)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process has told; its exit code, None if it took too long and was ended; its last words."""

    told: tuple[Any, ...]
    code: int | None = None
    last: str = ""

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or ""."""
        return signal.Signals(-self.code).name if self.code is not None and self.code < 0 else ""


def ask(command: Sequence[str], mark: str, seconds: float, environment: Mapping[str, str]) -> Answer:
    """Run a command, for at most so many seconds, and return what it has told by `tell`. Raises OSError."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=alone(environment),
        start_new_session=True,  # what it starts ends with it
    )
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        return Answer(_told(output, mark))
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it said nothing")
    return Answer(_told(output, mark), child.returncode, last)


def tell(mark: str, value: Any) -> None:
    """Tell whoever asked: a line of JSON behind a mark, since libraries print lines of their own."""
    print(f"{mark}{json.dumps(value)}", flush=True)


def _told(output: str, mark: str) -> tuple[Any, ...]:
    return tuple(json.loads(line.removeprefix(mark)) for line in output.splitlines() if line.startswith(mark))


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that no launcher has started; it finds the same modules as this one."""
    kept = {
        name: value
        for name, value in environment.items()
        if name.startswith(_OF_USERS) or not name.startswith(_OF_LAUNCHERS)
    }
    # Without the second one Open MPI up to 4 starts a daemon for it.
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMPI_MCA_ess_singleton_isolated": "1"}
