"""Held: count what this process holds now and compare it with before, for programs that tests start."""

from __future__ import annotations

import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Held:
    """Open descriptors, mapped pieces of commlib's shared memory, and threads of Python."""

    descriptors: int
    mappings: int
    threads: int


def held() -> Held:
    """Return what is held once all that can be dropped has been."""
    gc.collect()
    return Held(len(os.listdir("/proc/self/fd")), mappings(), threading.active_count())


def mappings() -> int:
    """Return how many pieces of commlib's shared memory are mapped here."""
    return sum("commlib-" in line for line in Path("/proc/self/maps").read_text().splitlines())


def resident_bytes() -> int:
    """Return how much memory of this process is in the machine's."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
