"""Job: the contents of a batch script as data, with checks. [pure]"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from commlib.errors import UsageError

LAUNCHERS = {
    "pmix": "srun --mpi=pmix --kill-on-bad-exit=1",
    "pmi2": "srun --mpi=pmi2 --kill-on-bad-exit=1",
    "srun": "srun --kill-on-bad-exit=1",
    "mpirun": 'mpirun -n "$SLURM_NTASKS" --bind-to none',
    "mpiexec": 'mpiexec -n "$SLURM_NTASKS"',
}
"""The command that starts one process per rank: pmix and mpirun for Open MPI, pmi2 and mpiexec for MPICH, Intel MPI."""

RUNTIMES = ("apptainer", "singularity", "pyxis")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A requested job. Names are sbatch's options if it has one; None leaves the choice to the site.

    Call `check` after constructing one.
    """

    command: tuple[str, ...]
    """The command of each rank, word by word."""
    mpi: str
    """One of LAUNCHERS."""
    job_name: str = "commlib"
    output: str = "%x-%j.out"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int = 1
    ntasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    time: str | None = None
    mem: str | None = None
    constraint: str | None = None
    exclusive: bool = False
    signal: str | None = None
    """A signal for every rank, and the seconds before the time limit: "USR1@120"."""
    requeue: bool | None = None
    array: str | None = None
    sbatch: tuple[str, ...] = ()
    """Other options of sbatch, one per line."""
    modules: tuple[str, ...] = ()
    venv: str | None = None
    """Folder of a virtual environment."""
    env: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    """Lines of bash, run on the first node before the ranks start."""
    container: str | None = None
    """An image: a file or an address for the runtime."""
    runtime: str = "apptainer"
    """One of RUNTIMES."""
    bind: tuple[str, ...] = ()
    """Folders bound into the container: "/scratch", "/here:/there"."""


_NAME = r"[\w.,+-]+", "letters, digits and any of _ . , + -"
_TIME = r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED"
_RANGE = r"\d+(-\d+(:\d+)?)?"
# A field, the pattern that its value must match entirely, and a description of it.
_PATTERNS = {
    "job_name": (r"[\w.+-]+", "letters, digits and any of _ . + -"),
    "partition": _NAME,
    "account": _NAME,
    "qos": _NAME,
    "gpus_per_node": (r"([\w.-]+:)?[1-9]\d*", "a number, or a kind and a number such as a100:4"),
    "time": (_TIME, "minutes, hours:minutes:seconds or days-hours, such as 90, 01:30:00 or 2-12"),
    "mem": (r"\d+[KMGT]?", "the memory of a node, such as 64G; 0 is all of it"),
    "signal": (r"(SIG)?[A-Z]+\d?@\d+", "a signal, and the seconds before the time limit, such as USR1@120"),
    "array": (rf"{_RANGE}(,{_RANGE})*(%\d+)?", "numbers and ranges, such as 0-7 or 1,3,5-9%2"),
    "constraint": (r"\S+", "features of nodes without spaces, such as ib&a100"),
}
_ONE_LINE = re.compile(r"[^\x00-\x1f\x7f]*")


def option_name(name: str) -> str:
    """Return the name of a field as users write it."""
    return name.replace("_", "-")


def check(job: Job) -> None:
    """Raise UsageError if no cluster could run this job. It gives the option, the expected and the actual value."""
    for problem in _problems(job):
        raise UsageError(problem)


def _problems(job: Job) -> Iterator[str]:
    for name in (item.name for item in fields(Job)):
        value = getattr(job, name)
        for text in _texts(value):
            if not _ONE_LINE.fullmatch(text):
                yield f"{option_name(name)} {text!r}: expected one line without control characters"
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            yield f"{option_name(name)} is {value}: expected at least 1"
        if name in _PATTERNS and value is not None and not re.fullmatch(_PATTERNS[name][0], value):
            yield f"{option_name(name)} {value!r}: expected {_PATTERNS[name][1]}"
    if not job.command:
        yield "no command: expected the command of each rank, after --, such as: -- python train.py"
    if job.mpi not in LAUNCHERS:
        yield f"mpi {job.mpi!r}: expected {', '.join(LAUNCHERS)}"
    yield from _wrong_names(job)
    yield from _wrong_containers(job)
    for line in job.sbatch:
        yield from _wrong_lines(line)


def _texts(value: object) -> Iterator[str]:
    """Yield all text in the value of a field."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()


def _wrong_names(job: Job) -> Iterator[str]:
    for name in job.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield f"env {name!r}: expected the name of a variable and its value, such as NCCL_DEBUG=INFO"
    if '"' in job.output:
        yield f'output {job.output!r}: expected a path without "'


def _wrong_containers(job: Job) -> Iterator[str]:
    if job.runtime not in RUNTIMES:
        yield f"runtime {job.runtime!r}: expected {', '.join(RUNTIMES)}"
    if job.container is None:
        if job.bind:
            yield f"bind {', '.join(job.bind)}: there is no container to bind it into; name an image with container"
        return
    if job.venv is not None:
        yield f"venv {job.venv}: a container has its own Python; leave venv out"
    if job.runtime == "pyxis" and not LAUNCHERS.get(job.mpi, "srun").startswith("srun"):
        yield f"mpi {job.mpi}: with pyxis srun starts the container; expected pmix, pmi2 or srun"


def _wrong_lines(line: str) -> Iterator[str]:
    option = re.match(r"--?([\w-]+)", line)
    if option is None:
        yield f"sbatch {line!r}: expected an option of sbatch, such as --mail-type=END"
        return
    options = {option_name(item.name) for item in fields(Job)} - {
        "command",
        "mpi",
        "sbatch",
        "modules",
        "venv",
        "env",
        "setup",
    }
    if option[1] in options:
        yield f"sbatch {line!r}: commlib slurm has this option itself; use {option[1]} instead"
