"""CUDA probe: test in a separate process whether MPI sends and receives GPU memory, because the test may crash.

`probe` starts `python -m commlib.transport.cuda_probe` without the launcher's environment variables, so MPI starts
there as a single process. It sends bytes from GPU memory to GPU memory of the same process, in short and in long
messages.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.launch.mpi_start import load_mpi
from commlib.process.probe_process import ProbeOutput, report, run_probe
from commlib.transport.cuda_aware import query_loaded

SIZES = (64, 64 << 10, 4 << 20)  # bytes
SECONDS = 60.0
_MARK = "commlib.transport.cuda_probe: "


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """A probe's result. claim: the MPI library's own statement. failure: why bytes did not arrive, or ""."""

    claim: str
    failure: str


def probe(
    command: Sequence[str] = (), seconds: float = SECONDS, environment: Mapping[str, str] = os.environ
) -> ProbeResult:
    """Run the probe. command: a replacement for tests that prints as `main` does. seconds: its timeout."""
    try:
        answer = run_probe(
            command or (sys.executable, "-m", "commlib.transport.cuda_probe"), _MARK, seconds, environment
        )
    except OSError as error:
        return ProbeResult("", f"the probe process could not be started: {error}")
    reports = answer.values
    return ProbeResult(reports[0] if reports else "", reports[1] if len(reports) > 1 else _ending(answer, seconds))


def _ending(answer: ProbeOutput, seconds: float) -> str:
    if answer.code is None:
        return f"the probe did not end within {seconds:g} s"
    if answer.signal:
        return f"the probe process was killed by {answer.signal}"
    return f"the probe process ended with code {answer.code}: {answer.last}"


def main() -> None:
    """Report MPI's own statement, then the result of the test, a line each. Exit without finalising MPI."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core dump: a crash is an expected result
    MPI = load_mpi()
    report(_MARK, query_loaded(MPI).how)
    report(_MARK, send_to_itself(MPI, importlib.import_module("cupy")))
    os._exit(0)


def send_to_itself(MPI: Any, cupy: Any) -> str:
    """Send GPU memory to this process by MPI; return "" if it arrived intact, else the error."""
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
            return f"MPI cannot send {nbytes} bytes: {error}"
        wrong = int(np.count_nonzero(cupy.asnumpy(target) != values))
        if wrong:
            return f"{wrong} of {nbytes} bytes arrived corrupted"
    return ""


def _memory(MPI: Any, array: Any) -> list[Any]:
    return [MPI.buffer.fromaddress(array.data.ptr, array.nbytes), MPI.BYTE]


if __name__ == "__main__":
    main()
