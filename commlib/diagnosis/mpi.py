"""The MPI library: what it is, how it starts, whether one process reads another's memory.

Not launched, MPI is started in a process of its own, `python -m commlib.diagnosis.mpi`, under a time limit: what goes
wrong there is an answer. Launched, it is started here, under the time limit of `watch`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from commlib.diagnosis.facts import Mpi
from commlib.errors import TransportError
from commlib.launch import mpi_start
from commlib.process.alone import ask, tell
from commlib.transport.cuda_aware import ask_loaded

_MARK = "commlib.diagnosis: "
_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_VENDORS = ("Open MPI", "Spectrum", "Intel", "MVAPICH", "CRAY MPICH", "MPICH")


@dataclass(frozen=True, slots=True)
class Tried:
    """Hold what came of starting MPI in a process of its own. failure: why it did not start, or ""."""

    mpi: Mpi | None = None
    peer_reads: bool | None = None
    failure: str = ""


def find_mpi() -> Mpi:
    """Return the library that Python finds, without starting it. Raises TransportError if there is none."""
    library, file = mpi_start.find_library()
    return Mpi(library, file, vendor(library), "", _prefix(file))


def _prefix(file: str) -> str:
    """Return where a wheel with this library was installed; "" if it comes from elsewhere."""
    return sys.prefix if file.startswith(f"{sys.prefix}/lib/") else ""


def vendor(library: str) -> str:
    """Return whose a library is by its name; "" if nobody's that is known here."""
    return next((name for name in _VENDORS if name in library), "")


def start_mpi() -> Mpi:
    """Start MPI in this process and describe it. Raises TransportError as `launch.load_mpi` does."""
    library, file = mpi_start.find_library()
    began = time.perf_counter()
    MPI = mpi_start.load_mpi()
    seconds = time.perf_counter() - began
    threads = {getattr(MPI, f"THREAD_{level}"): level for level in _LEVELS}
    answer = ask_loaded(MPI)
    called = " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())  # as `ask_loaded` calls it
    says = {True: "yes", False: "no", None: "unknown"}[answer.says]
    return Mpi(
        library=library,
        file=file,
        vendor=vendor(library),
        abi=_abi(MPI),
        prefix=_prefix(file),
        standard="{}.{}".format(*MPI.Get_version()),
        threads=threads[MPI.Query_thread()],
        cuda=f"{says} ({answer.how.removeprefix(f'{called}: ')})",
        seconds=seconds,
    )


def _abi(MPI: Any) -> str:
    """Return which of mpi4py's modules has been loaded: MPI.openmpi.cpython-... or one that was built here."""
    part = Path(MPI.__file__).name.split(".")[1]
    return part if not part.startswith("cpython") else "that of mpi4py's build"


def count_node(MPI: Any) -> int:
    """Return how many ranks MPI sees on this rank's node. Collective."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    count = int(node.Get_size())
    node.Free()
    return count


def try_neighbour(MPI: Any) -> bool | None:
    """Return whether this rank can read the memory of the next rank on its host; None if it is alone. Collective."""
    from commlib.buffers.peer_reading import Probe, can_read  # brings numpy: not every command needs it

    comm, probe, here = MPI.COMM_WORLD, Probe(), os.uname().nodename
    told = comm.allgather((here, os.getpid(), probe.place))
    mine = [entry for entry in told if entry[0] == here]
    found = None
    if len(mine) > 1:
        _, process, place = mine[(mine.index((here, os.getpid(), probe.place)) + 1) % len(mine)]
        found = can_read(process, *place)
    comm.Barrier()  # nobody's number goes before it was looked at
    return found


def try_alone(seconds: float, environment: Mapping[str, str] = os.environ, command: tuple[str, ...] = ()) -> Tried:
    """Start MPI in a process of its own. seconds: after them it is ended. command: what does so, for tests."""
    from commlib.buffers.peer_reading import Probe

    probe = Probe()
    start = command or (sys.executable, "-m", "commlib.diagnosis.mpi", *map(str, probe.place))
    try:
        answer = ask(start, _MARK, seconds, environment)
    except OSError as error:
        return Tried(failure=f"no process to start MPI in: {error}")
    if answer.code is None:
        return Tried(failure=f"MPI did not start within {seconds:g} s")
    if answer.told:
        told = answer.told[0]
        mpi = None if told["mpi"] is None else Mpi(**told["mpi"])
        return Tried(mpi, told["peer_reads"], told["failure"])
    ended = answer.signal or f"exit code {answer.code}"
    return Tried(failure=f"the process that started MPI ended with {ended}: {answer.last}")


def main() -> None:
    """Start MPI, read a number of the process that started this one, and tell both as a line of JSON."""
    from commlib.buffers.peer_reading import can_read

    address, expected = map(int, sys.argv[1:])
    try:
        tried = Tried(start_mpi(), can_read(os.getppid(), address, expected))
    except TransportError as error:
        tried = Tried(failure=str(error))
    tell(_MARK, asdict(tried))
    os._exit(0)  # without MPI's finalisation: the answer is there


if __name__ == "__main__":
    main()
