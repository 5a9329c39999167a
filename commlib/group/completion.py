"""Completion: finish a node's kernels that must wait, or raise the mismatch that they found."""

from __future__ import annotations

from dataclasses import dataclass

from commlib.group.call_check import mismatch
from commlib.group.call_sequence import CallSequence
from commlib.group.group_status import GroupStatus
from commlib.group.waiting import WaitWatcher
from commlib.kernels.fields.node import (
    BROKEN,
    MISMATCH,
)
from commlib.node.board import Kernel, KernelCall
from commlib.runtime.progress import Progress


@dataclass(frozen=True, slots=True)
class Completion:
    """Finishes kernels of one group, and watches their waits."""

    name: str
    rank: int
    one_node: bool
    standing: GroupStatus
    calls: CallSequence
    progress: Progress
    group: WaitWatcher

    def complete(self, kernel: Kernel, argument: int, calls: KernelCall, status: int, text: str) -> int:
        """Finish a kernel that did not complete at once: keep waiting, or raise a mismatch. Return its status."""
        board, standing, journal = self.standing.board, self.standing, self.progress.journal
        assert board is not None
        if standing.failure is not None:
            standing.raise_failure(text)
        try:
            with self.progress.refuse_others():
                if journal.current is not None:
                    journal.current.round("waits on its node")
                watch = self.group.watch(text)
                status = board.resume(kernel, argument, calls, status, watch)
                if status == MISMATCH:
                    texts = board.exchange_texts(text, watch)
                    number, by_all = self.calls.number, self.one_node
                    raise mismatch(self.name, number, self.rank, texts, board.members, by_all=by_all)
        except BaseException as error:
            standing.note(text, error, out_of_step=not self.one_node)  # the other nodes do not know of it
            raise
        if status == BROKEN:  # another thread's call has failed meanwhile
            standing.raise_failure(text)
        return status
