"""Load: how busy this machine is with other work, and which processes take its cores."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SAMPLE = 0.2  # seconds between the two readings of the processes' times
_MOST = 3  # processes that are named
_LEAST = 0.2  # of a core
_TICKS = os.sysconf("SC_CLK_TCK")
_USER, _SYSTEM, _PARENT = 11, 12, 1  # fields of /proc/PID/stat behind the name


def read_load(root: Path = Path("/")) -> float | None:
    """Return the processes that ran or waited for a core, on average over the last minute; None: unknown."""
    with suppress(OSError, ValueError, IndexError):
        return float((root / "proc/loadavg").read_text().split()[0])
    return None


def is_busy(load: float | None, cores: int) -> bool:
    """Return whether other work takes so much of a machine that timings are off."""
    return load is not None and load > max(0.7, 0.25 * cores)


def find_busy(root: Path = Path("/"), seconds: float = SAMPLE) -> tuple[str, ...]:
    """Return the processes that take most of the cores now, without this one and its siblings. Takes `seconds`."""
    before = dict(_times(root))
    time.sleep(seconds)
    family = {os.getpid(), os.getppid()}
    used = []
    for process, (name, parent, ticks) in _times(root):
        if process not in before or process in family or parent in family:
            continue
        share = (ticks - before[process][2]) / _TICKS / seconds
        if share >= _LEAST:
            used.append((share, f"{name} (process {process}, {share:.0%} of a core)"))
    return tuple(text for _, text in sorted(used, reverse=True)[:_MOST])


def _times(root: Path) -> Iterator[tuple[int, tuple[str, int, int]]]:
    """Yield each process with its name, its parent and its time on the cores, in ticks."""
    for path in (root / "proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            start, _, rest = path.read_text().rpartition(")")
            values = rest.split()
            ticks = int(values[_USER]) + int(values[_SYSTEM])
            yield int(path.parent.name), (start.partition("(")[2], int(values[_PARENT]), ticks)
