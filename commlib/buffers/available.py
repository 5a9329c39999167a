"""Count the memory that can be taken on this machine and in the control groups (containers, jobs) of this process.

Memory of files without a name has no limit of its own. The kernel would not refuse to give it, but end a process later.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")

# (where the groups are, the limit, the use) of the second and the first version of control groups
_VERSIONS = (
    ("", _ROOT, "memory.max", "memory.current"),
    ("memory", _ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available() -> int:
    """Return the bytes that can be taken without a process being ended for want of memory, as far as can be told."""
    found = [sys.maxsize]
    with suppress(OSError, ValueError, KeyError):
        machine = _numbers(Path("/proc/meminfo"))
        found.append(max(0, machine["MemAvailable:"] - machine["MemTotal:"] // 64) * 1024)
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller, root, limit, use in _VERSIONS:
                if controller in controllers.split(","):
                    own = root / path.lstrip("/")
                    groups = [own, *own.parents]
                    found += [left_in(group, limit, use) for group in groups if group.is_relative_to(root)]
    return min(found)


def left_in(group: Path, limit: str, use: str) -> int:
    """Return what a control group may still take; the files that it has read can go."""
    try:
        cached = _numbers(group / "memory.stat")
        most, used = int((group / limit).read_text()), int((group / use).read_text())
    except (OSError, ValueError):  # it has no limit ("max"), or is seen from within a container elsewhere
        return sys.maxsize
    return max(0, most - used + cached.get("inactive_file", 0) + cached.get("active_file", 0))


def _numbers(file: Path) -> dict[str, int]:
    words = (line.split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1}
