"""MPI's own shared memory: it loses its name once all ranks have it, so that a job that is killed leaves none behind.

MPICH keeps the name until MPI_Finalize: each job that a signal ended left 2 to 4 MB in /dev/shm. Open MPI's launcher
removes what is left.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_OF_MPICH = re.compile(r"/dev/shm/mpich_shm_\w+$")


def named() -> set[str]:
    """Return the files of MPICH's shared memory that this process has, and that still have a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {found[0] for line in lines if (found := _OF_MPICH.search(line))}


def unname() -> None:
    """Remove these names. When all ranks of the node have called MPI_Init."""
    for path in named():
        with suppress(OSError):  # another rank was faster
            os.unlink(path)
