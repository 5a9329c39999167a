"""Resources: count those of this process and compare them with earlier counts, for programs that tests start."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Resources:
    """Open descriptors, mapped pieces of commlib's shared memory, and threads of Python."""

    descriptors: int
    mappings: int
    threads: int


def count_resources() -> Resources:
    """Return the counts once everything droppable has been dropped."""
    gc.collect()
    return Resources(len(os.listdir("/proc/self/fd")), mappings(), threading.active_count())


def mappings() -> int:
    """Return the number of mapped pieces of commlib's shared memory."""
    return sum("commlib-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
