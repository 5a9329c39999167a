"""Resources: measure this process' resources, and detect growth."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Usage:
    """Beyond the arrays that last: private memory and shared mappings in MiB, and numbers of things.

    `blocks` are Python's small allocations: they reveal objects that are too few to be seen in the memory.
    """

    private: float
    shared: float
    descriptors: int
    threads: int
    blocks: float

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {getattr(self, field.name):.0f}" for field in fields(self))


# How much more a process may hold at the end than after the warm-up, for any calls, and for each operation. Caches of
# kinds of calls still fill, at the rate of new kinds; MPI's buffers and the heap's fragments grow by some MiB.
# One object or 200 bytes that each operation leaves behind are too much, in a run that is long enough: caches
# take 40,000 blocks from operation 1,200 to 24,000 (--seed 5: 455,600, 475,300 at 4,800, 494,500) and then no more.
ALLOWANCE = Usage(private=8, shared=1, descriptors=4, threads=1, blocks=40_000)
FOR_EACH = Usage(private=100 / 2**20, shared=0, descriptors=0, threads=0, blocks=0.5)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_KEEP = 1 << 16


def keep_no_free_memory() -> None:
    """Let glibc give freed arrays back to the system at once: the tens of MiB that it caches would hide a leak."""
    libc = ctypes.CDLL(None)
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        libc.mallopt(option, _KEEP)


def measure(ordinary: int, symmetric: int) -> Usage:
    """Measure this process while it pauses; the given bytes of ordinary and symmetric arrays are known to be in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Usage(
        (int(status["RssAnon"].split()[0]) * 1024 - ordinary) / 2**20,
        (_shared_bytes() - symmetric) / 2**20,
        len(os.listdir("/proc/self/fd")),
        int(status["Threads"]),
        sys.getallocatedblocks(),
    )


def _shared_bytes() -> int:
    """Return the size of all shared mappings. A window's file is unlinked at once: it appears nowhere else."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions = line.split()[:2]
        if permissions.endswith("s"):
            start, stop = addresses.split("-")
            total += int(stop, 16) - int(start, 16)
    return total


def growth(before: Usage, after: Usage, operations: int) -> list[str]:
    """Return the resources that grew by more than their allowance."""
    grown = []
    for field in fields(Usage):
        first, last, fixed, each = (getattr(usage, field.name) for usage in (before, after, ALLOWANCE, FOR_EACH))
        if last - first > fixed + each * operations:
            allowed = f"{fixed + each * operations:.0f} more are allowed"
            grown.append(f"{field.name} grew from {first:.0f} to {last:.0f}, {allowed}")
    return grown
