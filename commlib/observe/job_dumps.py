"""Job dumps: the dumps of one hang by rank, and the waits-for relation between ranks that follows from them. Pure.

A rank has reached a call of a group if its count of calls is that high. All ranks that have reached the call wait for
all that have not, so each wait points at ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from commlib.observe.dump import Dump, GroupState, NamedCall, Wait, members


class JobDumps:
    """The dumps of some ranks: at least one in all, at most one for each rank.

    size: the number of ranks in the job. groups: by rank and key. awaited: for each rank, the ranks it waits for and
    the reason.
    """

    def __init__(self, dumps: Iterable[Dump]) -> None:
        self.dumps = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.rank)}
        self.size = next(iter(self.dumps.values())).size
        self.groups = {rank: {group.key: group for group in dump.groups} for rank, dump in self.dumps.items()}
        self._late_in: dict[tuple[str, int], list[int]] = {}  # cached: all ranks in a call need the same answer
        self.awaited = {rank: self._find_awaited_ranks(dump) for rank, dump in self.dumps.items()}

    def _find_awaited_ranks(self, dump: Dump) -> dict[int, str]:
        """Return the ranks that a rank waits for, each with the first reason found."""
        peers: dict[int, str] = {}
        for name in dump.named:
            for rank in members(name.ranks):
                if rank != dump.rank and rank in self.dumps and not self._has_requested(rank, name):
                    peers.setdefault(rank, describe_named(name))
        for wait in dump.waits:
            for rank in self._find_late(dump, wait):
                peers.setdefault(rank, describe_wait(wait))
        return peers

    def _find_late(self, dump: Dump, wait: Wait) -> list[int]:
        if wait.peers is not None:
            return [peer for peer in wait.peers if peer != dump.rank]
        group = self.groups[dump.rank].get(wait.group)
        if group is None:
            return []
        call = group.key, wait.sequence
        if call not in self._late_in:
            ranks = members(group.ranks)
            self._late_in[call] = [member for member in ranks if self._count_calls(member, group) < wait.sequence]
        return self._late_in[call]

    def _count_calls(self, rank: int, group: GroupState) -> int:
        """Return how many calls of a group a rank has reached; -1 for a rank without a dump."""
        if rank not in self.dumps:
            return -1
        counts = self.groups[rank].get(group.key)
        return 0 if counts is None else counts.calls

    def _has_requested(self, rank: int, name: NamedCall) -> bool:
        return any((other.group, other.name) == (name.group, name.name) for other in self.dumps[rank].named)

    def place(self, rank: int, thread: int = 0) -> str:
        """Return the location of a rank's user code: in `thread` if it has any, else in the first thread that has."""
        threads = self.dumps[rank].threads
        matches = [state for state in threads if state.identifier == thread and state.place] or [
            state for state in threads if state.place
        ]
        return str(matches[0].place) if matches else ""

    def is_inside(self, rank: int) -> bool:
        """Return whether a rank's user code is inside a call of commlib.

        A framework's own thread counts, for example in a graph. commlib's threads do not: they only finish operations
        already started.
        """
        dump = self.dumps[rank]
        ours = {thread.identifier for thread in dump.threads if thread.name.startswith("commlib-")}
        return any(thread.inside for thread in dump.threads) or any(wait.thread not in ours for wait in dump.waits)

    def texts(self, key: str, sequence: int) -> dict[int, str]:
        """Return the text of one call by rank, for the ranks that still have it."""
        result = {}
        for rank, groups in self.groups.items():
            for operation in groups[key].operations if key in groups else ():
                if operation.sequence == sequence:
                    result[rank] = operation.text
        return result

    def first_difference(self, key: str) -> int:
        """Return the number of the first recorded call whose text differs between ranks; 0 if there is none."""
        by_sequence: dict[int, str] = {}
        first = 0
        for groups in self.groups.values():
            for operation in groups[key].operations if key in groups else ():
                text = by_sequence.setdefault(operation.sequence, operation.text)
                if operation.sequence and text != operation.text and not 0 < first <= operation.sequence:
                    first = operation.sequence
        return first

    def circle(self) -> list[int]:
        """Return a cycle of ranks, each waiting for the next and the last for the first, all of them inside commlib."""
        stuck = {rank for rank in self.awaited if self.is_inside(rank)}
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


def describe_wait(wait: Wait) -> str:
    """Return the text of a wait."""
    return wait.text + (f" (call {wait.sequence})" if wait.sequence else "")


def describe_named(name: NamedCall) -> str:
    """Return the text of a named operation."""
    return f"{name.group}: {name.text}"
