"""Load: the load average of each host of a run against the cores that its ranks may use, and BUSY if it is higher."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from commlib.launch.launchers import find_launcher

_MOST_HOSTS = 3  # named in a text


def gather_loads(world: Any, host: str) -> dict[str, Any]:
    """Return the facts "load_of_hosts", "usable_cores" and, if a host is busy, "busy". Collective.

    host: this rank's. The load is the average over a minute of processes that run or wait for a core.
    """
    loads: dict[str, float] = {}
    cores: dict[str, set[int]] = {}
    for name, load, usable in world.allgather((host, os.getloadavg()[0], _usable_cores(os.environ))):
        loads[name] = max(load, loads.get(name, 0.0))
        cores.setdefault(name, set()).update(usable)
    usable_cores = {name: len(indices) for name, indices in cores.items()}
    busy = [name for name, load in loads.items() if load > usable_cores[name]]
    return {"load_of_hosts": loads, "usable_cores": usable_cores, **({"busy": busy} if busy else {})}


def _usable_cores(environment: Mapping[str, str]) -> set[int]:
    """Return the cores of this process and of its launcher: ranks may be bound to a core each, a launcher is not."""
    own = os.sched_getaffinity(0)
    if find_launcher(environment) is None:
        return own
    try:
        return own | os.sched_getaffinity(os.getppid())
    except OSError:
        return own


def busy_text(facts: Mapping[str, Any]) -> str | None:
    """Return a warning if a host's load exceeded its usable cores when the run began, else None."""
    if "usable_cores" not in facts:  # of an older version, which recorded one load
        facts = {
            "load_of_hosts": {"rank 0's host": facts.get("load", 0)},
            "usable_cores": {"rank 0's host": facts.get("cores", math.inf)},
        }
    loads, cores = facts["load_of_hosts"], facts["usable_cores"]
    busy = [host for host, load in loads.items() if load > cores[host]]
    if not busy:
        return None
    named = [f"load {loads[host]:.1f} on {cores[host]} usable cores of {host}" for host in busy[:_MOST_HOSTS]]
    more = f", and {len(busy) - _MOST_HOSTS} more hosts" if len(busy) > _MOST_HOSTS else ""
    return (
        f"BUSY: {', '.join(named)}{more}: other programs took turns with the ranks, so the times are too long and the "
        "ratios uncertain. Repeat the run when the load is lower."
    )
