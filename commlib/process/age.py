"""Age: the time since this process started, with its interpreter and imports."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age() -> float | None:
    """Return the seconds since this process started, or None if the system does not report it (only Linux does)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after boot; field 22 of the line
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return None
