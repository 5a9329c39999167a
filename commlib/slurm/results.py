"""Results: save the outcome of a job next to its output: its state, its exit code and its result files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from commlib.slurm import states
from commlib.slurm.states import JobTask


def output_pattern(*, is_array: bool, is_named: bool) -> str:
    """Return the name of a job's output as a pattern of sbatch; unless it is named, `output` returns the same path."""
    return "%x-" * is_named + ("%A_%a.out" if is_array else "%j.out")


def output(folder: Path, task: JobTask) -> Path:
    """Return the file with a task's output."""
    return folder / f"{task.id}.out"


def facts(folder: Path, job: str, tasks: Sequence[JobTask]) -> dict[str, Any]:
    """Return the outcome of a job with files in this folder. results: the files in the subfolder JOB."""
    return {
        "job": job,
        "exit_code": states.code(tasks),
        "tasks": [{**asdict(task), "code": task.code, "output": str(output(folder, task))} for task in tasks],
        "results": sorted(str(path) for path in (folder / job).glob("*") if path.is_file()),
    }


def save(folder: Path, results: dict[str, Any]) -> None:
    """Write the result of `facts` to JOB.json in the folder. Raises OSError on failure."""
    (folder / f"{results['job']}.json").write_text(json.dumps(results, indent=1) + "\n")


def tail(path: Path, lines: int) -> list[str]:
    """Return the last lines of an output, from its last 64 KiB; none if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return text.splitlines()[-lines:]
