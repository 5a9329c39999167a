"""Available memory: the bytes that can be allocated on this machine and in this process's control groups.

Unnamed memory files have no size limit. The kernel would grant the allocation and kill a process later.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")

# (controller, root folder, file of the limit, file of the usage) for control groups v2 and v1
_VERSIONS = (
    ("", _ROOT, "memory.max", "memory.current"),
    ("memory", _ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Estimate the bytes that can be allocated before the kernel kills a process for lack of memory."""
    limits = [sys.maxsize]
    with suppress(OSError, ValueError, KeyError):
        machine = _numbers(Path("/proc/meminfo"))
        limits.append(max(0, machine["MemAvailable:"] - machine["MemTotal:"] // 64) * 1024)
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller, root, limit, use in _VERSIONS:
                if controller in controllers.split(","):
                    own = root / path.lstrip("/")
                    groups = [own, *own.parents]
                    limits += [left_in(group, limit, use) for group in groups if group.is_relative_to(root)]
    return min(limits)


def left_in(group: Path, limit: str, use: str) -> int:
    """Return the bytes that a control group may still allocate; its cached files count as free."""
    try:
        cached = _numbers(group / "memory.stat")
        most, used = int((group / limit).read_text()), int((group / use).read_text())
    except (OSError, ValueError):  # no limit ("max"), or not visible in this container
        return sys.maxsize
    return max(0, most - used + cached.get("inactive_file", 0) + cached.get("active_file", 0))


def _numbers(file: Path) -> dict[str, int]:
    words = (line.split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1}
