"""Job dumps: the dumps of one hang by rank, and who waits for whom by them. Pure.

A rank has come to a call of a group if it has counted that far; whoever has not come is waited for by all who have. So
each wait points at ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from commlib.observe.dump import Dump, GroupState, Named, Wait, members


class JobDumps:
    """The dumps of some ranks: at least one, at most one of each.

    size: how many ranks the job has. groups: by rank and key. awaited: whom a rank waits for, each with what for.
    """

    def __init__(self, dumps: Iterable[Dump]) -> None:
        self.dumps = {dump.rank: dump for dump in sorted(dumps, key=lambda dump: dump.rank)}
        self.size = next(iter(self.dumps.values())).size
        self.groups = {rank: {group.key: group for group in dump.groups} for rank, dump in self.dumps.items()}
        self._late_in: dict[tuple[str, int], list[int]] = {}  # found before: all who are in a call ask the same
        self.awaited = {rank: self._awaited_by(dump) for rank, dump in self.dumps.items()}

    def _awaited_by(self, dump: Dump) -> dict[int, str]:
        """Return the ranks that a rank waits for, each with what for: the first counts."""
        found: dict[int, str] = {}
        for name in dump.named:
            for rank in members(name.ranks):
                if rank != dump.rank and rank in self.dumps and not self._has_asked(rank, name):
                    found.setdefault(rank, worded_name(name))
        for wait in dump.waits:
            for rank in self._late(dump, wait):
                found.setdefault(rank, worded(wait))
        return found

    def _late(self, dump: Dump, wait: Wait) -> list[int]:
        if wait.peers is not None:
            return [peer for peer in wait.peers if peer != dump.rank]
        group = self.groups[dump.rank].get(wait.group)
        if group is None:
            return []
        call = group.key, wait.sequence
        if call not in self._late_in:
            ranks = members(group.ranks)
            self._late_in[call] = [member for member in ranks if self._calls(member, group) < wait.sequence]
        return self._late_in[call]

    def _calls(self, rank: int, group: GroupState) -> int:
        """Return how many calls of a group a rank has come to; of one that has written nothing, -1."""
        if rank not in self.dumps:
            return -1
        found = self.groups[rank].get(group.key)
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

    def is_inside(self, rank: int) -> bool:
        """Return whether the code of a rank's user has called commlib and is still there.

        A framework's own thread counts, as in a graph; those of commlib only finish what has been started.
        """
        dump = self.dumps[rank]
        ours = {thread.identifier for thread in dump.threads if thread.name.startswith("commlib-")}
        return any(thread.inside for thread in dump.threads) or any(wait.thread not in ours for wait in dump.waits)

    def texts(self, key: str, sequence: int) -> dict[int, str]:
        """Return what ranks called, where that is still known."""
        found = {}
        for rank, groups in self.groups.items():
            for operation in groups[key].operations if key in groups else ():
                if operation.sequence == sequence:
                    found[rank] = operation.text
        return found

    def first_difference(self, key: str) -> int:
        """Return the number of the first call whose texts differ among those that are kept; 0 if none does."""
        by_sequence: dict[int, str] = {}
        first = 0
        for groups in self.groups.values():
            for operation in groups[key].operations if key in groups else ():
                text = by_sequence.setdefault(operation.sequence, operation.text)
                if operation.sequence and text != operation.text and not 0 < first <= operation.sequence:
                    first = operation.sequence
        return first

    def circle(self) -> list[int]:
        """Return ranks of which each waits for the next one, and the last for the first, all inside of commlib."""
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


def worded(wait: Wait) -> str:
    """Return a wait in words."""
    return wait.text + (f" (call {wait.sequence})" if wait.sequence else "")


def worded_name(name: Named) -> str:
    """Return an operation by name in words."""
    return f"{name.group}: {name.text}"
