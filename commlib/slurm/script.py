"""Script: write a job as a readable batch script that runs without this project. [pure]"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator

from commlib.slurm.job import LAUNCHERS, Job, option_name

_PLAIN = ("partition", "account", "qos", "nodes", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "time", "mem",
          "constraint", "array")  # fmt: skip

# Slurm signals only the shell of the script (B:): mpirun's daemons would get the signal, and it would end them.
_HAND_ON = """# Slurm signals this shell, which passes the signal on to the ranks.
trap 'for job in $(jobs -p); do kill -{signal} $job; done' {signal}
{command} &
ranks=$!
while kill -0 $ranks 2>/dev/null; do
    wait $ranks || true  # a signal ends the wait, too
done
wait $ranks"""


def script(job: Job, writer: str = "commlib slurm run") -> str:
    """Return the batch script of a job that has passed `commlib.slurm.job.check`. writer: named as its author."""
    sections = ("\n".join(lines) for lines in (_options(job), _software(job), _environment(job), _ranks(job)) if lines)
    return f"#!/bin/bash\n# Written by `{writer}`; sbatch submits it.\n" + "\n\n".join(sections) + "\n"


def _options(job: Job) -> list[str]:
    lines = [f"--job-name={job.job_name}", f"--output={_quoted(job.output)}"]
    lines += [f"--{option_name(name)}={value}" for name in _PLAIN if (value := getattr(job, name)) is not None]
    if job.exclusive:
        lines.append("--exclusive")
    if job.signal is not None:
        lines.append(f"--signal=B:{job.signal}")
    if job.requeue is not None:
        # Without append, the output of the previous run is lost.
        lines += ["--requeue", "--open-mode=append"] if job.requeue else ["--no-requeue"]
    return [f"#SBATCH {option}" for option in (*lines, *job.sbatch)]


def _quoted(path: str) -> str:
    return f'"{path}"' if " " in path or "#" in path else path


def _software(job: Job) -> list[str]:
    lines = []
    if job.modules:
        lines.append(f"module load {shlex.join(job.modules)}")
    if job.venv is not None:
        lines.append(f"source {shlex.quote(job.venv.rstrip('/') + '/bin/activate')}")
    return ["# Software: an error ends the job.", "set -e", *lines, *job.setup]


def _environment(job: Job) -> list[str]:
    lines = [] if job.cpus_per_task is None else ["export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env.items()]
    return ["# Environment of every rank.", *lines] if lines else []


def _ranks(job: Job) -> list[str]:
    lines = [
        f"# The ranks: {job.ntasks_per_node} on each of {job.nodes} nodes.",
        "trap : TERM  # scancel and the time limit also signal the ranks: let them end",
    ]
    command = " \\\n    ".join(" ".join(words) for words in _command(job))
    if job.signal is None:
        return [*lines, command]
    name = job.signal.partition("@")[0].removeprefix("SIG")
    return [*lines, *_HAND_ON.format(command=command, signal=name).split("\n")]


def _command(job: Job) -> Iterator[list[str]]:
    """Yield the words of the launcher, of the container and of the command, quoted for bash."""
    launcher = [LAUNCHERS[job.mpi]]
    under_srun = launcher[0].startswith("srun")
    if under_srun and job.cpus_per_task is not None:
        launcher.append(f"--cpus-per-task={job.cpus_per_task}")  # srun does not inherit it from the job
    yield launcher
    if job.container is not None and job.runtime == "pyxis":
        mounts = [f"--container-mounts={','.join(job.bind)}"] if job.bind else []
        yield _words([f"--container-image={job.container}", *mounts])
    elif job.container is not None:
        gpus = ["--nv"] if job.gpus_per_node is not None else []
        binds = [word for folder in job.bind for word in ("--bind", folder)]
        yield _words([job.runtime, "exec", *gpus, *binds, job.container])
    yield _words(job.command)


def _words(words: Iterable[str]) -> list[str]:
    """Quote words for bash, which expands Slurm's variables and no others."""
    return [_expanding(word) if "$SLURM_" in word else shlex.quote(word) for word in words]


def _expanding(word: str) -> str:
    escaped = re.sub(r'["\\`]|\$(?!SLURM_)', r"\\\g<0>", word)
    return f'"{escaped}"'
