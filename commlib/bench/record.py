"""Record: the figures of a benchmark with machine, date, commit and command, as one JSON file.

`commlib bench` and the programs in benchmarks/ write it; `benchmarks/pages.py` makes pages from such files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import commlib
from commlib.bench.load import busy_text, gather_loads
from commlib.bench.options import BenchSettings

_PACKAGES = ("numpy", "numba", "ml_dtypes", "mpi4py", "torch")
_ENVIRONMENT = ("COMMLIB_", "OMPI_MCA_", "MPIR_CVAR_", "I_MPI_", "UCX_", "FI_", "GLOO_", "OMP_NUM_THREADS")
_SLURM = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NAME"),
    *("SLURM_CLUSTER_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_NUM_NODES"),
    *("SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_MPI_TYPE", "SLURM_CPU_BIND"),
)
_MOST_HOSTS = 3  # named in a heading

# Facts of a program. Left out: host names and the builder of MPI, which mean nothing elsewhere.
_PUBLISHED = ("date", "ranks", "cores", "cpu", "load", "mpi", "commit", "versions", "environment")
_LAUNCHERS = ("PREFIXES", "cpu_type", "initial_wdir", "num_procs", "mpi_event", "orte_", "ess", "plm", "pmix", "shmem_")
_OF_LAUNCHERS = tuple(f"OMPI_MCA_{name}" for name in _LAUNCHERS)
_NUMBERS = re.compile(r"\[\s+([-\d.e+,\s]+?)\s+\]")  # a list of numbers, in JSON
_OUTPUTS = {"--out": 1, "--plot": 1, "--worker": 0}  # options that do not affect the figures: number of values


def gather_facts(world: Any, *, one_node: bool) -> dict[str, Any]:
    """Return the facts that a reader needs to judge the figures. Collective; the same on all ranks."""
    from mpi4py import MPI

    host = MPI.Get_processor_name()
    hosts = world.allgather(host)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": world.size,
        "one_node": one_node,
        "hosts": hosts,
        "cores": os.cpu_count(),
        "cores_of_rank": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
        "load": os.getloadavg()[0],
        **gather_loads(world, host),
        "mpi": name_of_library(MPI.Get_library_version()),
        "mpi_build": MPI.Get_library_version().strip("\0 \n"),
        "commit": commit_of(Path(commlib.__file__).parents[1]),
        "versions": {"commlib": commlib.__version__, "python": platform.python_version(), **_versions()},
        "environment": settings_of(os.environ),
        "slurm": slurm_job(os.environ),
        "command": sys.argv[1:],
    }


def gather_program_facts(world: Any, *, starts_itself: bool = False) -> dict[str, Any]:
    """Return the facts for a program in benchmarks/, to be published. Collective over the mpi4py communicator `world`.

    starts_itself: whether the benchmark starts its own job, so it is not run by mpirun.
    """
    gathered = gather_facts(world, one_node=True)
    facts = {name: gathered[name] for name in _PUBLISHED}
    used = [name for name in ("tensorflow", "keras") if name in sys.modules]
    facts["versions"] |= {name: sys.modules[name].__version__ for name in used}
    launcher = [] if starts_itself or world.size == 1 else ["mpirun", "-n", str(world.size)]
    script = f"benchmarks/{Path(sys.argv[0]).name}"
    return {**facts, "command": shlex.join([*launcher, "python", script, *program_arguments()])}


def program_arguments() -> list[str]:
    """Return this program's arguments except for output files."""
    arguments, skipped = [], 0
    for word in sys.argv[1:]:
        if skipped:
            skipped -= 1
        elif (name := word.partition("=")[0]) in _OUTPUTS:
            skipped = _OUTPUTS[name] if "=" not in word else 0
        else:
            arguments.append(word)
    return arguments


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, with "+" if files differ from it; "" without a checkout or git."""
    if not (checkout / ".git").exists():
        return ""
    git = ["git", "-C", str(checkout)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--"], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + "+" * bool(changed)


def name_of_library(text: str) -> str:
    """Return the name and version from the first line of an MPI library's description."""
    return " ".join(text.splitlines()[0].partition(",")[0].replace("Version:", "").split())


def settings_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that tune commlib, MPI and the transports."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_ENVIRONMENT) and not name.startswith(_OF_LAUNCHERS)
    }


def slurm_job(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return Slurm's variables that identify this job and step, and its resources; None outside of Slurm."""
    if "SLURM_JOB_ID" not in environment:
        return None
    return {name: environment[name] for name in _SLURM if name in environment}


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def options_of(settings: BenchSettings) -> dict[str, Any]:
    """Return the settings of a run for JSON."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {**values, "verb": settings.verb.name}


def stem(settings: BenchSettings, facts: Mapping[str, Any]) -> str:
    """Return the name of the files of a run, without suffix: verb, ranks and date."""
    return file_name(settings.verb.name, facts)


def file_name(what: str, facts: Mapping[str, Any]) -> str:
    """Return the name of the files of a run of `what`, without suffix."""
    moment = facts["date"].split("+")[0].replace("-", "").replace(":", "")
    return f"{what}-{facts['ranks']}-ranks-{moment}"


def heading(settings: BenchSettings, facts: Mapping[str, Any]) -> str:
    """Return the heading of a picture of the run: verb, hosts, date, load and Slurm job."""
    hosts = list(dict.fromkeys(facts["hosts"]))
    named = ", ".join(hosts[:_MOST_HOSTS]) + (f", ... ({len(hosts)} hosts)" if len(hosts) > _MOST_HOSTS else "")
    job = facts.get("slurm")
    second = [
        named,
        facts["date"].replace("T", " ").replace("+00:00", " UTC"),
        f"load {facts['load']:.1f} on {facts['cores']} cores at the start" if "load" in facts else "",
        f"Slurm job {job['SLURM_JOB_ID']}" if job else "",
    ]
    first = f"{settings.verb.name}, {facts['ranks']} ranks, {facts['mpi']}"
    lines = [first, "; ".join(filter(None, second)), (busy_text(facts) or "").partition(": other")[0]]
    return "\n".join(filter(None, lines))


def write(
    path: Path,
    benchmark: str,
    facts: Mapping[str, Any],
    options: argparse.Namespace | Mapping[str, Any],
    **measured: Any,
) -> None:
    """Write the record of one run. Times are in seconds, bandwidths in GB/s, sizes in bytes."""
    given = vars(options) if isinstance(options, argparse.Namespace) else options
    content = {
        "benchmark": benchmark,
        "facts": {**facts, "load_after": os.getloadavg()[0]},
        "options": {name: _plain(value) for name, value in given.items() if f"--{name}" not in _OUTPUTS},
        **measured,
    }
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(content, indent=1))
    path.write_text(text + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
