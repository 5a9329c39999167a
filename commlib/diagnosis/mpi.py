"""The MPI library: its description, its start, and whether one process can read another's memory.

Without a launcher, MPI starts in a separate process, `python -m commlib.diagnosis.mpi`, under a time limit: a failure
of that process is a result. Under a launcher it starts in this process, under the time limit of `watch`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commlib.diagnosis.facts import MpiFacts
from commlib.errors import TransportError
from commlib.launch import mpi_start
from commlib.process.probe_process import report, run_probe
from commlib.transport.cuda_aware import query_loaded

_MARK = "commlib.diagnosis: "
_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_VENDORS = ("Open MPI", "Spectrum", "Intel", "MVAPICH", "CRAY MPICH", "MPICH")


@dataclass(frozen=True, slots=True)
class MpiTrial:
    """The result of starting MPI in a separate process. failure: the reason if it did not start, or ""."""

    mpi: MpiFacts | None = None
    peer_reads: bool | None = None
    failure: str = ""


def find_mpi() -> MpiFacts:
    """Return the library that Python finds, without starting it. Raises TransportError if it finds none."""
    library, file = mpi_start.find_library()
    return MpiFacts(library, file, vendor(library), "", _prefix(file))


def _prefix(file: str) -> str:
    """Return the environment of the wheel that installed this library; "" if it is not from a wheel."""
    return sys.prefix if file.startswith(f"{sys.prefix}/lib/") else ""


def vendor(library: str) -> str:
    """Return the vendor of a library, given its name; "" if unknown."""
    return next((name for name in _VENDORS if name in library), "")


def start_mpi() -> MpiFacts:
    """Start MPI in this process and describe it. Raises TransportError as `launch.load_mpi` does."""
    library, file = mpi_start.find_library()
    began = time.perf_counter()
    MPI = mpi_start.load_mpi()
    seconds = time.perf_counter() - began
    threads = {getattr(MPI, f"THREAD_{level}"): level for level in _LEVELS}
    answer = query_loaded(MPI)
    called = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())  # as `query_loaded` calls it
    label = {True: "yes", False: "no", None: "unknown"}[answer.is_supported]
    return MpiFacts(
        library=library,
        file=file,
        vendor=vendor(library),
        abi=_abi(MPI),
        prefix=_prefix(file),
        standard="{}.{}".format(*MPI.Get_version()),
        threads=threads[MPI.Query_thread()],
        cuda=f"{label} ({answer.how.removeprefix(f'{called}: ')})",
        seconds=seconds,
    )


def _abi(MPI: Any) -> str:
    """Return the ABI from mpi4py's loaded module: MPI.openmpi.cpython-..., or a module that was built locally."""
    part = Path(MPI.__file__).name.split(".")[1]
    return part if not part.startswith("cpython") else "that of mpi4py's build"


def count_node(MPI: Any) -> int:
    """Return the number of ranks that MPI sees on this rank's node. Collective."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    count = int(node.Get_size())
    node.Free()
    return count


def try_neighbour(MPI: Any) -> bool | None:
    """Return whether this rank can read the memory of the next rank on its host; None without one. Collective."""
    from commlib.buffers.peer_reading import Probe, can_read  # imports numpy, which not every command needs

    comm, probe, here = MPI.COMM_WORLD, Probe(), os.uname().nodename
    entries = comm.allgather((here, os.getpid(), probe.place))
    mine = [entry for entry in entries if entry[0] == here]
    result = None
    if len(mine) > 1:
        _, process, place = mine[(mine.index((here, os.getpid(), probe.place)) + 1) % len(mine)]
        result = can_read(process, *place)
    comm.Barrier()  # every probe lives until its peer has read it
    return result


def try_alone(seconds: float, environment: Mapping[str, str] = os.environ, command: tuple[str, ...] = ()) -> MpiTrial:
    """Start MPI in a separate process, for at most `seconds`. command: the command that does so, for tests."""
    from commlib.buffers.peer_reading import Probe

    probe = Probe()
    start = command or (sys.executable, "-m", "commlib.diagnosis.mpi", *map(str, probe.place))
    try:
        answer = run_probe(start, _MARK, seconds, environment)
    except OSError as error:
        return MpiTrial(failure=f"no process to start MPI in: {error}")
    if answer.code is None:
        return MpiTrial(failure=f"MPI did not start within {seconds:g} s")
    if answer.values:
        result = answer.values[0]
        mpi = None if result["mpi"] is None else MpiFacts(**result["mpi"])
        return MpiTrial(mpi, result["peer_reads"], result["failure"])
    ended = answer.signal or f"exit code {answer.code}"
    return MpiTrial(failure=f"the process that started MPI ended with {ended}: {answer.last}")


def main() -> None:
    """Start MPI, read a number from the parent process, and print both results as a line of JSON."""
    from commlib.buffers.peer_reading import can_read

    address, expected = map(int, sys.argv[1:])
    try:
        tried = MpiTrial(start_mpi(), can_read(os.getppid(), address, expected))
    except TransportError as error:
        tried = MpiTrial(failure=str(error))
    report(_MARK, asdict(tried))
    os._exit(0)  # without finalizing MPI: the result is printed


if __name__ == "__main__":
    main()
