"""Request: make a job from the given values, with the environment of this command as defaults."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from commlib.errors import TransportError, UsageError
from commlib.launch import mpi_start
from commlib.slurm import results
from commlib.slurm.job import LAUNCHERS, Job, check

_TO_A_FILE = ("sweep", "step")  # benchmarks that append to a file: the next job continues from it
NONE = "none"  # as a virtual environment: activate none


def job(kind: str, options: Mapping[str, Any], folder: Path) -> Job:
    """Return the job of these values, by field of Job. kind: "run", or "bench", whose command is a benchmark.

    folder: for its output and results. Raises UsageError for missing or invalid values.
    """
    values = {"command": (), **options}
    if "%" in str(folder):
        raise UsageError(f"folder {folder}: expected a path without %, which Slurm replaces")
    is_array = values.get("array") is not None
    values["output"] = str(folder / results.output_pattern(is_array=is_array, is_named=folder == Path()))
    if values.get("venv") == NONE:
        values["venv"] = None
    elif "container" not in values:
        values.setdefault("venv", default_venv())
    if "mpi" not in values:
        if "container" in values:
            raise UsageError("mpi is not given: a container's MPI library is unknown, so name its launcher")
        values["mpi"] = default_mpi()
    values["env"] = {**default_environment(values["mpi"], values.get("venv")), **values.get("env", {})}
    if kind == "bench":
        values.setdefault("job_name", "commlib-bench")
        values["command"] = _bench(values["command"], folder, is_array=is_array)
    result = Job(**values)
    check(result)
    return result


def _bench(arguments: tuple[str, ...], folder: Path, *, is_array: bool) -> tuple[str, ...]:
    """Return the command of a benchmark, with a destination for its results."""
    if not arguments:
        raise UsageError("no benchmark: expected the arguments of `commlib bench` after --, such as: -- all_reduce")
    if arguments[0] == "report":
        raise UsageError("bench report reads results and needs no job: run `commlib bench report` here")
    command = ("python", "-m", "commlib", "bench", *arguments)
    if any(word == "-o" or word.partition("=")[0] == "--out" for word in arguments):
        return command
    where = folder / ("$SLURM_ARRAY_JOB_ID" if is_array else "$SLURM_JOB_ID")
    if arguments[0] in _TO_A_FILE:
        plan = next((word for word in arguments if word.endswith(".toml")), arguments[0])
        where = folder / Path(plan).with_suffix(".jsonl").name
    return (*command, "--out", str(where))


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """Return the variables in texts such as NAME=VALUE. Raises UsageError."""
    result = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"env {text!r}: expected NAME=VALUE")
        result[name] = value
    return result


def default_venv() -> str | None:
    """Return the folder of this Python's virtual environment, or None if there is none that can be activated."""
    is_venv = sys.prefix != sys.base_prefix and (Path(sys.prefix) / "bin/activate").exists()
    return sys.prefix if is_venv else None


def default_mpi() -> str:
    """Return the one of LAUNCHERS that fits the MPI library of this Python. Raises UsageError if it loads none."""
    try:
        library, _ = mpi_start.find_library()
    except TransportError as error:
        raise UsageError(
            f"mpi is not given, and this Python finds no MPI library to infer it from: {error}. Expected one of "
            f"{', '.join(LAUNCHERS)}"
        ) from None
    return "pmix" if "Open MPI" in library else "pmi2"


def default_environment(default_mpi: str, default_venv: str | None) -> dict[str, str]:
    """Return a variable that mpirun sets for ranks and srun does not: the folder of a wheel of Open MPI.

    mpi: one of LAUNCHERS. venv: the job's; only this Python's environment is supported.
    """
    if default_mpi != "pmix" or default_venv != sys.prefix:
        return {}
    try:
        library, files = mpi_start.find_library()
    except TransportError:
        return {}  # the job will find another MPI
    is_wheel = "Open MPI" in library and files.startswith(f"{sys.prefix}/lib/")
    return {"OPAL_PREFIX": sys.prefix} if is_wheel else {}
