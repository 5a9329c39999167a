"""Request: make a job of what was asked for, and of what this command itself runs with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from commlib.errors import UsageError
from commlib.slurm import here, results
from commlib.slurm.job import Job, check

_TO_A_FILE = ("sweep", "step")  # benchmarks that add to a file: the next job finds it, and goes on from there
NONE = "none"  # as a virtual environment: activate none


def job(kind: str, given: Mapping[str, Any], folder: Path) -> Job:
    """Return the job of these values by field of Job. kind: "run", or "bench", whose command is that of a benchmark.

    folder: of its output and results. Raises UsageError for values that are missing or cannot be right.
    """
    values = {"command": (), **given}
    if "%" in str(folder):
        raise UsageError(f"folder {folder}: expected a path without %, which Slurm replaces")
    is_array = values.get("array") is not None
    values["output"] = str(folder / results.output_pattern(is_array=is_array, is_named=folder == Path()))
    if values.get("venv") == NONE:
        values["venv"] = None
    elif "container" not in values:
        values.setdefault("venv", here.venv())
    if "mpi" not in values:
        if "container" in values:
            raise UsageError("mpi is not given, and nobody but you knows the MPI library in the container")
        values["mpi"] = here.mpi()
    values["env"] = {**here.environment(values["mpi"], values.get("venv")), **values.get("env", {})}
    if kind == "bench":
        values.setdefault("job_name", "commlib-bench")
        values["command"] = _bench(values["command"], folder, is_array=is_array)
    made = Job(**values)
    check(made)
    return made


def _bench(arguments: tuple[str, ...], folder: Path, *, is_array: bool) -> tuple[str, ...]:
    """Return the command of a benchmark, with a place for its results."""
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
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"env {text!r}: expected NAME=VALUE")
        found[name] = value
    return found
