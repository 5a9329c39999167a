"""Cuda probe: try in a process of its own whether MPI sends and receives memory of a GPU. It may die of it.

`probe` starts `python -m commlib.transport.cuda_probe`, without what the launcher has told this process: so MPI
starts alone there. MPI sends bytes to
itself, from memory of the GPU and into it, by its ways for short and for long messages.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.launch.mpi_start import load_mpi
from commlib.process.alone import Answer, ask, tell
from commlib.transport.cuda_aware import ask_loaded

SIZES = (64, 64 << 10, 4 << 20)  # bytes
SECONDS = 60.0
_MARK = "commlib.transport.cuda_probe: "


@dataclass(frozen=True, slots=True)
class Found:
    """Hold what a probe has found. claim: what the library said there. failure: why bytes did not arrive, or ""."""

    claim: str
    failure: str


def probe(command: Sequence[str] = (), seconds: float = SECONDS, environment: Mapping[str, str] = os.environ) -> Found:
    """Try it. command: what does so, for tests; it prints as `main` does. seconds: after them it is ended."""
    try:
        answer = ask(command or (sys.executable, "-m", "commlib.transport.cuda_probe"), _MARK, seconds, environment)
    except OSError as error:
        return Found("", f"no process to try it in: {error}")
    told = answer.told
    return Found(told[0] if told else "", told[1] if len(told) > 1 else _ending(answer, seconds))


def _ending(answer: Answer, seconds: float) -> str:
    if answer.code is None:
        return f"it did not end within {seconds:g} s"
    if answer.signal:
        return f"the process that tried it was ended by {answer.signal}"
    return f"the process that tried it ended with code {answer.code}: {answer.last}"


def main() -> None:
    """Tell what MPI says, then try it and tell what came of that: a line each. Then end, without MPI's finalisation."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # that it dies is an answer
    MPI = load_mpi()
    tell(_MARK, ask_loaded(MPI).how)
    tell(_MARK, send_to_itself(MPI, importlib.import_module("cupy")))
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


if __name__ == "__main__":
    main()
