"""Diagnosis: from what the ranks of a job that hangs have written to why it hangs. Pure.

A rank has come to a call of a group if it has counted that far; whoever has not come is waited for by all who have. So
each wait points at ranks, and what hangs is found by following these: a rank that is stopped or gone, one that is
somewhere else in its own code, ranks that wait for each other in a circle, or ranks that have come to different calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from commlib.config import ranks_text
from commlib.observe.dump import Dump, GroupState, Named, Wait

_MOST_WAITS, _MOST_NAMES = 4, 5  # of one rank that are told of


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. kind: stopped, gone, silent, mismatch, deadlock, missing or unknown."""

    kind: str
    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class RankState:
    """What ranks are doing that do the same. calls: what they wait for. place: where their own code is, or ""."""

    ranks: tuple[int, ...]
    calls: tuple[str, ...]
    place: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a job hangs. hang: its number in the job. seconds: how long somebody has waited."""

    hang: int
    size: int
    seconds: float
    findings: tuple[Finding, ...]
    states: tuple[RankState, ...]

    def as_dict(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"hang {self.hang} of this job: no progress for {self.seconds:.1f} s"]
        lines += [f"  {finding.text}" for finding in self.findings]
        lines += ["what each rank is doing:"]
        for state in self.states:
            calls = "; ".join(state.calls)
            lines.append(f"  {ranks_text(state.ranks)}: {calls}" + (f"\n    at {state.place}" if state.place else ""))
        return "\n".join(lines)


def diagnose(dumps: Sequence[Dump]) -> Diagnosis:
    """Return why the job hangs, from the dumps of one hang: at least one, at most one of each rank."""
    job = _Job({dump.rank: dump for dump in dumps})
    findings = (*job.absent(), *job.mismatches(), *job.deadlocks(), *job.missing())
    seconds = max((lasted for dump in dumps for lasted in _lasted(dump)), default=0.0)
    if not findings:
        text = "nobody is missing where somebody waits: a message may be lost, or the ranks go on slowly"
        findings = (Finding("unknown", (), text),)
    return Diagnosis(dumps[0].hang, job.size, seconds, findings, job.states())


def _lasted(dump: Dump) -> Iterator[float]:
    yield from (wait.seconds for wait in dump.waits)
    yield from (name.seconds for name in dump.named)


class _Job:
    """All dumps of one hang, by rank."""

    def __init__(self, dumps: Mapping[int, Dump]) -> None:
        self.dumps = dict(sorted(dumps.items()))
        self.size = next(iter(self.dumps.values())).size
        self._groups = {rank: {group.key: group for group in dump.groups} for rank, dump in self.dumps.items()}
        self.awaited = {rank: self._awaited_by(dump) for rank, dump in self.dumps.items()}

    # Who waits for whom

    def _awaited_by(self, dump: Dump) -> dict[int, str]:
        """Return the ranks that a rank waits for, each with what for: the first counts."""
        found: dict[int, str] = {}
        for name in dump.named:
            for rank in name.ranks:
                if rank != dump.rank and rank in self.dumps and not self._has_asked(rank, name):
                    found.setdefault(rank, _worded_name(name))
        for wait in dump.waits:
            for rank in self._late(dump, wait):
                found.setdefault(rank, _worded(wait))
        return found

    def _late(self, dump: Dump, wait: Wait) -> list[int]:
        if wait.peers is not None:
            return [peer for peer in wait.peers if peer != dump.rank]
        group = self._groups[dump.rank].get(wait.group)
        if group is None:
            return []
        return [member for member in group.ranks if self._calls(member, group) < wait.sequence]

    def _calls(self, rank: int, group: GroupState) -> int:
        """Return how many calls of a group a rank has come to; of one that has written nothing, -1."""
        if rank not in self.dumps:
            return -1
        found = self._groups[rank].get(group.key)
        return 0 if found is None else found.calls

    def _has_asked(self, rank: int, name: Named) -> bool:
        return any((other.group, other.name) == (name.group, name.name) for other in self.dumps[rank].named)

    def place(self, rank: int, thread: int = 0) -> str:
        """Return where the code of a rank's user is: in a thread, if it has any there, else in the main one."""
        threads = self.dumps[rank].threads
        found = [state for state in threads if state.identifier == thread and state.place] or [
            state for state in threads if state.place
        ]
        return str(found[0].place) if found else ""

    def _is_inside(self, rank: int) -> bool:
        """Return whether the code of a rank's user has called commlib and is still there.

        A framework's own thread counts, as in a graph; those of commlib only finish what has been started.
        """
        dump = self.dumps[rank]
        ours = {thread.identifier for thread in dump.threads if thread.name.startswith("commlib-")}
        return any(thread.inside for thread in dump.threads) or any(wait.thread not in ours for wait in dump.waits)

    # What is wrong

    def absent(self) -> Iterator[Finding]:
        """Find the ranks that have written nothing."""
        seen = {state.rank: state for dump in self.dumps.values() for state in dump.neighbours}
        unseen = []
        for rank in range(self.size):
            if rank in self.dumps:
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
                    "silent", (rank,), f"rank {rank} has written nothing, but lives: {where}, {_busy(state.state)}"
                )
        if unseen:
            text = (
                "has written nothing, and nobody on its host has: is the folder shared by all hosts, or the host down?"
            )
            yield Finding("silent", tuple(unseen), f"{ranks_text(unseen)}: {text}")

    def mismatches(self) -> Iterator[Finding]:
        """Find the first call of each group that some ranks called something else for, if somebody waits since."""
        for key in sorted({group for groups in self._groups.values() for group in groups}):
            first = self._first_difference(key)
            if first and any(wait.group == key and wait.sequence >= first for wait in self._all_waits()):
                texts = self._texts(key, first)
                callers: dict[str, list[int]] = {}
                for rank, text in texts.items():
                    callers.setdefault(text, []).append(rank)
                lines = "".join(f"\n    {ranks_text(ranks)}: {text}" for text, ranks in callers.items())
                name = next(groups[key].name for groups in self._groups.values() if key in groups)
                text = (
                    f"{name}: call {first} is not the same on all ranks: one was skipped, or has other arguments{lines}"
                )
                yield Finding("mismatch", tuple(texts), text)

    def _all_waits(self) -> Iterator[Wait]:
        for dump in self.dumps.values():
            yield from dump.waits

    def _texts(self, key: str, sequence: int) -> dict[int, str]:
        found = {}
        for rank, groups in self._groups.items():
            for operation in groups[key].operations if key in groups else ():
                if operation.sequence == sequence:
                    found[rank] = operation.text
        return found

    def _first_difference(self, key: str) -> int:
        """Return the number of the first call whose texts differ among those that are kept; 0 if none does."""
        by_sequence: dict[int, str] = {}
        first = 0
        for groups in self._groups.values():
            for operation in groups[key].operations if key in groups else ():
                text = by_sequence.setdefault(operation.sequence, operation.text)
                if operation.sequence and text != operation.text and not 0 < first <= operation.sequence:
                    first = operation.sequence
        return first

    def deadlocks(self) -> Iterator[Finding]:
        """Find ranks that wait for each other in a circle, inside of commlib, each of them."""
        circle = self._circle()
        if circle:
            steps = []
            for rank, other in zip(circle, [*circle[1:], circle[0]], strict=True):
                place = self.place(rank)
                steps.append(
                    f"\n    rank {rank} waits for rank {other} in {self.awaited[rank][other]}"
                    + (f"\n      at {place}" if place else "")
                )
            text = f"deadlock of {ranks_text(sorted(circle))}: each waits for the next one{''.join(steps)}"
            yield Finding("deadlock", tuple(sorted(circle)), text)

    def _circle(self) -> list[int]:
        stuck = {rank for rank in self.awaited if self._is_inside(rank)}
        edges = {rank: [other for other in self.awaited[rank] if other in stuck] for rank in stuck}
        while ended := [rank for rank, others in edges.items() if not others]:
            for rank in ended:
                del edges[rank]
            edges = {rank: [other for other in others if other in edges] for rank, others in edges.items()}
        path: list[int] = []
        rank = min(edges, default=-1)
        while edges and rank not in path:
            path.append(rank)
            rank = edges[rank][0]
        return path[path.index(rank) :] if path else []

    def missing(self) -> Iterator[Finding]:
        """Find ranks that somebody waits for, and that wait for nobody themselves."""
        wanted: dict[int, dict[str, list[int]]] = {}
        for waiting, awaited in self.awaited.items():
            for rank, call in awaited.items():
                wanted.setdefault(rank, {}).setdefault(call, []).append(waiting)
        for rank, calls in sorted(wanted.items()):
            if rank in self.dumps and not self.awaited[rank]:
                where = _few(
                    [
                        f"{call}, where {ranks_text(waiting)} wait{'s' * (len(waiting) == 1)}"
                        for call, waiting in calls.items()
                    ]
                )
                place = self.place(rank)
                text = f"rank {rank} is missing in {where}" + (f"; it is at {place}" if place else "")
                yield Finding("missing", (rank,), text)

    # What all are doing

    def states(self) -> tuple[RankState, ...]:
        """Return what the ranks do; those that do the same together."""
        found: dict[tuple[tuple[str, ...], str], list[int]] = {}
        for rank, dump in self.dumps.items():
            calls = [_worded(wait) for wait in dump.waits[:_MOST_WAITS]]
            if dump.named:
                calls.append(_few([_worded_name(name) for name in dump.named]))
            thread = dump.waits[0].thread if dump.waits else 0
            words = tuple(f"waits in {call}" for call in calls) or ("waits for nobody",)
            found.setdefault((words, self.place(rank, thread)), []).append(rank)
        return tuple(RankState(tuple(ranks), calls, place) for (calls, place), ranks in found.items())


def _worded(wait: Wait) -> str:
    return wait.text + (f" (call {wait.sequence})" if wait.sequence else "")


def _worded_name(name: Named) -> str:
    return f"{name.group}: {name.text}"


def _few(texts: list[str]) -> str:
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return "; ".join(texts[:_MOST_NAMES]) + more


def _busy(state: str) -> str:
    if state == "D":
        return "waiting for a disk or a device (state D)"
    return f"state {state}: does its code hold Python's interpreter lock?"
