"""Probe process: run a risky check in a separate process, outside the launcher, because it may hang or crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Prefixes of the environment variables that launchers set for their processes.
_OF_LAUNCHERS = (
    "ALPS_", "FLUX_", "HYDI_", "HYDRA_", "I_MPI_HYDRA_", "JSM_", "MPIRUN_", "MPISPAWN_", "MPI_LOCAL", "MV2_COMM_WORLD_",
    "MVP_COMM_WORLD_", "OMPI_", "ORTE_", "PALS_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "SLURMD_", "SLURM_",
)  # fmt: skip
# Users choose MPI's transports by some of these variables; the probe must use the same.
_PARTS = ("accelerator", "btl", "coll", "common", "mca_", "mpool", "mtl", "opal_", "osc", "pml", "rcache", "smsc")
_OF_USERS = tuple(f"OMPI_MCA_{part}" for part in _PARTS)


@dataclass(frozen=True, slots=True)
class ProbeOutput:
    """The values that a probe process reported; its exit code, None if it timed out and was killed; its last line."""

    values: tuple[Any, ...]
    code: int | None = None
    last: str = ""

    @property
    def signal(self) -> str:
        """The name of the signal that ended it, or ""."""
        return signal.Signals(-self.code).name if self.code is not None and self.code < 0 else ""


def run_probe(command: Sequence[str], mark: str, seconds: float, environment: Mapping[str, str]) -> ProbeOutput:
    """Run a command for at most `seconds` and return the values that it reported with `report`. Raises OSError."""
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=strip_launcher(environment),
        start_new_session=True,  # its own process group, killed together
    )
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        return ProbeOutput(_parse_reports(output, mark))
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it printed nothing")
    return ProbeOutput(_parse_reports(output, mark), child.returncode, last)


def report(mark: str, value: Any) -> None:
    """Report a value to the parent process: a marked line of JSON, since libraries print other lines."""
    print(f"{mark}{json.dumps(value)}", flush=True)


def _parse_reports(output: str, mark: str) -> tuple[Any, ...]:
    return tuple(json.loads(line.removeprefix(mark)) for line in output.splitlines() if line.startswith(mark))


def strip_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the launcher's variables, with this process's module path."""
    inherited = {
        name: value
        for name, value in environment.items()
        if name.startswith(_OF_USERS) or not name.startswith(_OF_LAUNCHERS)
    }
    # Without the second variable Open MPI up to version 4 starts a daemon for the process.
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMPI_MCA_ess_singleton_isolated": "1"}
