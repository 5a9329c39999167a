"""Cuda probe: try in a process of its own whether MPI sends and receives memory of a GPU. It may die of it.

`probe` starts `python -m commlib.cuda_probe`, without what the launcher has told this process: so MPI starts alone
there. MPI sends bytes to itself, from memory of the GPU and into it, by its ways for short and for long messages.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.launch import load_mpi
from commlib.transport.cuda_aware import ask_loaded

SIZES = (64, 64 << 10, 4 << 20)  # bytes
SECONDS = 60.0
_MARK = "commlib.cuda_probe: "

# What launchers tell the processes that they start, by the beginnings of names.
_OF_LAUNCHERS = (
    "ALPS_", "FLUX_", "HYDI_", "HYDRA_", "I_MPI_HYDRA_", "JSM_", "MPIRUN_", "MPISPAWN_", "MPI_LOCAL", "MV2_COMM_WORLD_",
    "MVP_COMM_WORLD_", "OMPI_", "ORTE_", "PALS_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "SLURMD_", "SLURM_",
)  # fmt: skip
# And what users say of how messages go, with which the probe must be tried.
_PARTS = ("accelerator", "btl", "coll", "common", "mca_", "mpool", "mtl", "opal_", "osc", "pml", "rcache", "smsc")
_OF_USERS = tuple(f"OMPI_MCA_{part}" for part in _PARTS)


@dataclass(frozen=True, slots=True)
class Found:
    """Hold what a probe has found. claim: what the library said there. failure: why bytes did not arrive, or ""."""

    claim: str
    failure: str


def probe(command: Sequence[str] = (), seconds: float = SECONDS, environment: Mapping[str, str] = os.environ) -> Found:
    """Try it. command: what does so, for tests; it prints as `main` does. seconds: after them it is ended."""
    try:
        child = subprocess.Popen(
            command or (sys.executable, "-m", "commlib.cuda_probe"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=alone(environment),
            start_new_session=True,  # what it starts ends with it
        )
    except OSError as error:
        return Found("", f"no process to try it in: {error}")
    try:
        output, errors = child.communicate(timeout=seconds)
        ended = _ending(child.returncode, errors)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        ended = f"it did not end within {seconds:g} s"
    told = [json.loads(line.removeprefix(_MARK)) for line in output.splitlines() if line.startswith(_MARK)]
    return Found(told[0] if told else "", told[1] if len(told) > 1 else ended)


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a process that no launcher has started; it finds the same modules as this one."""
    kept = {
        name: value
        for name, value in environment.items()
        if name.startswith(_OF_USERS) or not name.startswith(_OF_LAUNCHERS)
    }
    # Without the second one Open MPI up to 4 starts a daemon for it.
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMPI_MCA_ess_singleton_isolated": "1"}


def _ending(code: int, errors: str) -> str:
    if code < 0:
        return f"the process that tried it was ended by {signal.Signals(-code).name}"
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it said nothing")
    return f"the process that tried it ended with code {code}: {last}"


def main() -> None:
    """Tell what MPI says, then try it and tell what came of that: a line each. Then end, without MPI's finalisation."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that it dies is an answer
    MPI = load_mpi()
    _tell(ask_loaded(MPI).how)
    _tell(send_to_itself(MPI, importlib.import_module("cupy")))
    os._exit(0)


def send_to_itself(MPI: Any, cupy: Any) -> str:
    """Send memory of the GPU to this process by MPI; return "" if it arrived, else what went wrong."""
    import numpy as np

    synchronise = cupy.cuda.get_current_stream().synchronize
    for nbytes in SIZES:
        values = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        source, target = cupy.asarray(values), cupy.zeros(nbytes, np.uint8)
        synchronise()
        try:
            receive = MPI.COMM_SELF.Irecv(_memory(MPI, target), 0, 7)
            MPI.COMM_SELF.Send(_memory(MPI, source), 0, 7)
            receive.Wait()
        except MPI.Exception as error:
            return f"MPI sends no {nbytes} bytes: {error}"
        wrong = int(np.count_nonzero(cupy.asnumpy(target) != values))
        if wrong:
            return f"{wrong} of {nbytes} bytes arrived wrong"
    return ""


def _memory(MPI: Any, array: Any) -> list[Any]:
    return [MPI.buffer.fromaddress(array.data.ptr, array.nbytes), MPI.BYTE]


def _tell(text: str) -> None:
    print(f"{_MARK}{json.dumps(text)}", flush=True)


if __name__ == "__main__":
    main()
