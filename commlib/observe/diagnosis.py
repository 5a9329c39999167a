"""Diagnosis: find the cause of a hang from the dumps of the ranks. Pure.

Each wait points at ranks (see `job_dumps`). Following these edges leads to the cause: a stopped or dead rank, a rank
that is elsewhere in its own code, ranks that wait for each other in a cycle, or ranks that made different calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from commlib.config.settings import ranks_text
from commlib.observe.dump import Dump
from commlib.observe.job_dumps import JobDumps, describe_named, describe_wait

_MOST_WAITS, _MOST_NAMES = 4, 5  # reported for one rank
_MOST_STATES = 32  # printed


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of the hang. kind: stopped, gone, silent, mismatch, deadlock, missing, running or unknown."""

    kind: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class RankState:
    """The common state of some ranks. calls: the calls they wait in. place: the location of their user code, or ""."""

    ranks: tuple[int, ...]
    calls: tuple[str, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause of a hang. hang: its number in the job, 0 on request. seconds: the longest wait of any rank."""

    hang: int
    size: int
    seconds: float
    findings: tuple[Finding, ...]
    states: tuple[RankState, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the diagnosis as JSON-compatible values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"hang {self.hang} of this job: no progress for {self.seconds:.1f} s"]
        if not self.hang:
            lines = [
                f"the job now: its longest wait has lasted {self.seconds:.1f} s" if self.seconds else "the job now:"
            ]
        lines += [f"  {finding.text}" for finding in self.findings]
        lines += ["what each rank is doing:"]
        for state in self.states[:_MOST_STATES]:
            calls = "; ".join(state.calls)
            lines.append(f"  {ranks_text(state.ranks)}: {calls}" + (f"\n    at {state.place}" if state.place else ""))
        if (more := len(self.states) - _MOST_STATES) > 0:
            lines.append(f"  and {more} more: --json lists all")
        return "\n".join(lines)


def diagnose(dumps: Sequence[Dump]) -> Diagnosis:
    """Return the cause of a hang, from its dumps: at least one, at most one for each rank."""
    job = JobDumps(dumps)
    findings = (*_find_absent(job), *_find_mismatches(job), *_find_deadlocks(job), *_find_missing(job))
    seconds = max((wait for dump in dumps for wait in _wait_times(dump)), default=0.0)
    if not findings:
        text = (
            "no rank is missing from a call that others wait in: a message may be lost, or the ranks make slow progress"
        )
        findings = (Finding("unknown", (), text),)
        if not seconds:
            findings = (Finding("running", (), "no rank waits for another one in commlib"),)
    return Diagnosis(dumps[0].hang, job.size, seconds, findings, _states(job))


def _wait_times(dump: Dump) -> Iterator[float]:
    yield from (wait.seconds for wait in dump.waits)
    yield from (name.seconds for name in dump.named)


def _find_absent(job: JobDumps) -> Iterator[Finding]:
    """Find the ranks that wrote no dump."""
    seen = {state.rank: state for dump in job.dumps.values() for state in dump.neighbours}
    unseen = []
    for rank in range(job.size):
        if rank in job.dumps:
            continue
        state = seen.get(rank)
        if state is None:
            unseen.append(rank)
            continue
        where = f"process {state.process} on {state.host}"
        if state.state in ("T", "t"):
            why = f"by SIGSTOP, a terminal or a debugger; kill -CONT {state.process}"
            yield Finding("stopped", (rank,), f"rank {rank} is stopped ({where}): {why}")
        elif state.state in ("", "Z", "X"):
            yield Finding("gone", (rank,), f"rank {rank} is gone: {where} has ended")
        else:
            yield Finding(
                "silent", (rank,), f"rank {rank} wrote no dump but is alive: {where}, {_describe_process(state.state)}"
            )
    if unseen:
        text = "no dump from these ranks or others on their hosts: are the hosts up, do they see the folder?"
        yield Finding("silent", tuple(unseen), f"{ranks_text(unseen)}: {text}")


def _find_mismatches(job: JobDumps) -> Iterator[Finding]:
    """Find the first call of each group that differs between ranks, if a rank waits in that call or a later one."""
    waits = [wait for dump in job.dumps.values() for wait in dump.waits]
    for key in sorted({group for groups in job.groups.values() for group in groups}):
        first = job.first_difference(key)
        if first and any(wait.group == key and wait.sequence >= first for wait in waits):
            texts = job.texts(key, first)
            callers: dict[str, list[int]] = {}
            for rank, text in texts.items():
                callers.setdefault(text, []).append(rank)
            lines = "".join(f"\n    {ranks_text(ranks)}: {text}" for text, ranks in callers.items())
            name = next(groups[key].name for groups in job.groups.values() if key in groups)
            text = (
                f"{name}: call {first} is not the same on all ranks: "
                f"one skipped a call or passed other arguments{lines}"
            )
            yield Finding("mismatch", tuple(texts), text)


def _find_deadlocks(job: JobDumps) -> Iterator[Finding]:
    """Find ranks that wait for each other in a cycle, all inside commlib."""
    circle = job.circle()
    if circle:
        steps = []
        for rank, other in zip(circle, [*circle[1:], circle[0]], strict=True):
            place = job.place(rank)
            steps.append(
                f"\n    rank {rank} waits for rank {other} in {job.awaited[rank][other]}"
                + (f"\n      at {place}" if place else "")
            )
        text = f"deadlock of {ranks_text(sorted(circle))}: each waits for the next one{''.join(steps)}"
        yield Finding("deadlock", tuple(sorted(circle)), text)


def _find_missing(job: JobDumps) -> Iterator[Finding]:
    """Find ranks that others wait for and that wait for no rank themselves."""
    missing: dict[int, dict[str, list[int]]] = {}
    for waiting, awaited in job.awaited.items():
        for rank, call in awaited.items():
            missing.setdefault(rank, {}).setdefault(call, []).append(waiting)
    by_state: dict[tuple[str, str], list[int]] = {}
    for rank, calls in sorted(missing.items()):
        if rank in job.dumps and not job.awaited[rank]:
            calling = [
                f"{call}, where {ranks_text(ranks)} wait{'s' * (len(ranks) == 1)}" for call, ranks in calls.items()
            ]
            place = job.place(rank)
            by_state.setdefault((_shorten(calling), place), []).append(rank)
    for (where, place), ranks in by_state.items():
        are, they = ("is", "it is") if len(ranks) == 1 else ("are", "they are")
        text = f"{ranks_text(ranks)} {are} missing in {where}" + (f"; {they} at {place}" if place else "")
        yield Finding("missing", tuple(ranks), text)


def _states(job: JobDumps) -> tuple[RankState, ...]:
    """Return the states of the ranks, ranks in the same state grouped together."""
    ranks_by_state: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for rank, dump in job.dumps.items():
        calls = [describe_wait(wait) for wait in dump.waits[:_MOST_WAITS]]
        if dump.named:
            calls.append(_shorten([describe_named(name) for name in dump.named]))
        thread = dump.waits[0].thread if dump.waits else 0
        words = tuple(f"waits in {call}" for call in calls) or ("waits for no rank",)
        ranks_by_state.setdefault((words, job.place(rank, thread)), []).append(rank)
    return tuple(RankState(tuple(ranks), calls, place) for (calls, place), ranks in ranks_by_state.items())


def _shorten(texts: list[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return "; ".join(texts[:_MOST_NAMES]) + more


def _describe_process(state: str) -> str:
    if state == "D":
        return "waiting for a disk or a device (state D)"
    return f"state {state}: does C code hold Python's interpreter lock?"
