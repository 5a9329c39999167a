"""Record: write the figures of a benchmark, with machine, date, commit and command, to one JSON file.

`benchmarks/pages.py` makes pages from such files.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from commlib.bench.record import gather_facts

# Left out: host names and the builder of MPI, which mean nothing elsewhere, and variables set by launchers.
_KEPT = ("date", "ranks", "cores", "cpu", "load", "mpi", "commit", "versions")
_TOLD = ("PREFIXES", "cpu_type", "initial_wdir", "num_procs", "mpi_event", "orte_", "ess", "plm", "pmix", "shmem_")
_LAUNCHERS = tuple(f"OMPI_MCA_{name}" for name in _TOLD)
_OWN = {"--out": 1, "--plot": 1, "--worker": 0}  # options that do not affect the figures: number of values


def find_facts(world: Any, *, starts_itself: bool = False) -> dict[str, Any]:
    """Return the facts that a reader needs to judge the figures. Collective over the mpi4py communicator `world`.

    starts_itself: whether the benchmark starts its own job, so it is not run by mpirun.
    """
    found = gather_facts(world, one_node=True)
    facts = {name: found[name] for name in _KEPT}
    given = found["environment"].items()
    facts["environment"] = {name: value for name, value in given if not name.startswith(_LAUNCHERS)}
    used = [name for name in ("tensorflow", "keras") if name in sys.modules]
    facts["versions"] |= {name: sys.modules[name].__version__ for name in used}
    launcher = [] if starts_itself or world.size == 1 else ["mpirun", "-n", str(world.size)]
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    return {**facts, "command": shlex.join([*launcher, "python", script, *arguments()])}


def write(path: Path, benchmark: str, facts: dict[str, Any], options: argparse.Namespace, **measured: Any) -> None:
    """Write the record of one run. Times are in seconds, sizes in bytes."""
    chosen = {name: _plain(value) for name, value in vars(options).items() if f"--{name}" not in _OWN}
    facts = {**facts, "load_after": os.getloadavg()[0]}
    content = {"benchmark": benchmark, "facts": facts, "options": chosen, **measured}
    path.write_text(json.dumps(content, indent=1) + "\n")


def arguments() -> list[str]:
    """Return this program's arguments except for output files."""
    kept, skipped = [], 0
    for word in sys.argv[1:]:
        if skipped:
            skipped -= 1
        elif (name := word.partition("=")[0]) in _OWN:
            skipped = _OWN[name] if "=" not in word else 0
        else:
            kept.append(word)
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
