"""States: parse Slurm's description of a job, from its controller or its database. [pure]"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# As in squeue's manual; a requeued job is pending again. Slurm may also hold a job: see `pending_reasons.HELD_STATES`.
ENDED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobTask:
    """The state of a job, or of one task of an array."""

    id: str
    """Slurm's number: "12", or "12_3" of an array."""
    state: str
    exit_code: int = 0
    """Exit code of the batch script."""
    signal: int = 0
    """Signal that ended the batch script; 0 if none did."""
    reason: str = ""
    """The reason why it waits, or failed."""
    nodes: str = ""
    """In Slurm's form: "h[0-3]"."""
    run_time: str = ""
    """Days, hours, minutes and seconds: "1-02:03:04"."""
    restarts: int = 0

    @property
    def ended(self) -> bool:
        """Whether it will not run again by itself."""
        return self.state in ENDED

    @property
    def code(self) -> int:
        """The exit code as in a shell: 0 if the task succeeded, 128 + n after signal n."""
        if self.signal:
            return 128 + self.signal
        return self.exit_code or int(self.state != "COMPLETED")


def from_controller(text: str) -> list[JobTask]:
    """Return the tasks printed by `scontrol --oneliner show job`, one per line."""
    return [_from_line(line) for line in text.splitlines() if line.strip()]


def _from_line(line: str) -> JobTask:
    def value(key: str, default: str = "") -> str:
        match = re.search(rf"(?:^| ){key}=(\S*)", line)
        return default if match is None or match[1] in ("(null)", "None", "N/A") else match[1]

    code, _, signal = value("ExitCode", "0:0").partition(":")
    number = value("ArrayTaskId")
    return JobTask(
        id=f"{value('ArrayJobId')}_{number}" if number else value("JobId"),
        state=value("JobState", "UNKNOWN"),
        exit_code=int(code),
        signal=int(signal or 0),
        reason=value("Reason"),
        nodes=value("NodeList"),
        run_time=value("RunTime"),
        restarts=int(value("Restarts", "0")),
    )


DATABASE_FIELDS = "JobID,State,ExitCode,NodeList,Elapsed"


def from_database(text: str) -> list[JobTask]:
    """Return the tasks printed by `sacct --allocations --noheader --parsable2` with DATABASE_FIELDS."""
    tasks = []
    for line in text.splitlines():
        if line.count("|") == DATABASE_FIELDS.count(","):
            number, state, exit_code, nodes, elapsed = line.split("|")
            code, _, signal = exit_code.partition(":")
            state = state.partition(" ")[0]  # "CANCELLED by 1000"
            tasks.append(JobTask(number, state, int(code), int(signal or 0), nodes=nodes, run_time=elapsed))
    return tasks


def code(tasks: Sequence[JobTask]) -> int:
    """Return the exit code of a job: the highest of its tasks."""
    return max((task.code for task in tasks), default=1)


def summary(tasks: Sequence[JobTask]) -> str:
    """Return one line about a job of one or several tasks. It changes when the state of a task changes."""
    if len(tasks) == 1:
        [task] = tasks
        details = [task.state, task.reason and f"({task.reason})", task.nodes and f"on {task.nodes}"]
        again = [f"restarted {task.restarts} times"] * bool(task.restarts)
        return " ".join(filter(None, [*details, *again]))
    counts = {state: [task.state for task in tasks].count(state) for state in sorted({task.state for task in tasks})}
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def elapsed(tasks: Sequence[JobTask]) -> str:
    """Return the longest run time of a task: "00:01:16". Empty if none has begun."""
    return max(
        (task.run_time for task in tasks if task.state != "PENDING"), key=lambda text: (len(text), text), default=""
    )
