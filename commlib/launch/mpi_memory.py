"""MPI's shared memory: unlink its files once all ranks have mapped them, so a killed job leaves none in /dev/shm.

MPICH unlinks the files only in MPI_Finalize: each killed job left 2 to 4 MB in /dev/shm. Open MPI's launcher removes
its files.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_OF_MPICH = re.compile(r"/dev/shm/mpich_shm_\w+$")


def find_files() -> set[str]:
    """Return the files of MPICH's shared memory that this process maps and that are not unlinked yet."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {found[0] for line in lines if (found := _OF_MPICH.search(line))}


def unlink_files() -> None:
    """Unlink these files. Call it after all ranks of the node have called MPI_Init."""
    for path in find_files():
        with suppress(OSError):  # another rank was faster
            os.unlink(path)
