"""Environment: the facts of a sweep's job, and the differences from earlier ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from commlib.bench.record import gather_facts
from commlib.launch.launchers import find_launcher
from commlib.topology import Topology

_ALWAYS_OTHER = ("date", "load", "load_of_hosts", "command", "slurm")  # differ between any two starts


def launcher_of(environment: Mapping[str, str]) -> str:
    """Return the command that started this process, judged by its variables."""
    match = find_launcher(environment)
    return "no launcher" if match is None else match.launcher.command


def gather(comm: Any, world: Any) -> dict[str, Any]:
    """Return the facts of a job, the same on all ranks. Collective."""
    topology: Topology = comm.topology
    facts = gather_facts(world, one_node=comm.one_node)
    return {
        **facts,
        "launcher": world.bcast(launcher_of(os.environ)),
        "ranks_of_nodes": [len(ranks) for ranks in topology.nodes],
        "environment": world.bcast(facts["environment"]),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return texts on the differences between two sets of facts, except the usual ones; of tables, for each entry."""
    lines: list[str] = []
    for name in sorted({*before, *now} - set(_ALWAYS_OTHER)):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            lines += differences(old, new, f"{prefix}{name}.")
        elif name == "mpi_build":
            lines += [] if before.get("mpi") != now.get("mpi") else [f"{prefix}{name}: another build"]
        else:
            lines.append(f"{prefix}{name}: {_text(old)} before, {_text(new)} now")
    return lines


def _text(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return ", ".join(map(str, dict.fromkeys(value)))
    return str(value) or "nothing"
