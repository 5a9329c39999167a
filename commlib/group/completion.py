"""Completion: finish a node's kernels that must wait, or raise the mismatch that they found."""

from __future__ import annotations

from dataclasses import dataclass

from commlib.group.call_check import mismatch
from commlib.group.group_status import GroupStatus
from commlib.group.waits import Waits
from commlib.kernels.host.node import BROKEN, MISMATCH
from commlib.node.board import Kernel, KernelCall
from commlib.runtime.progress import Progress


@dataclass(frozen=True, slots=True)
class Completion:
    """Finishes kernels of one group."""

    status: GroupStatus
    waits: Waits
    progress: Progress

    def complete(self, kernel: Kernel, argument: int, calls: KernelCall, status: int, text: str) -> int:
        """Finish a kernel that did not complete at once: keep waiting, or raise a mismatch. Return its status."""
        own, journal = self.status, self.progress.journal
        board = own.board
        assert board is not None
        if own.failure is not None:
            own.raise_failure(text)
        try:
            with self.progress.refuse_others():
                if journal.current is not None:
                    journal.current.round("waits on its node")
                watch = self.waits.watch(text)
                status = board.resume(kernel, argument, calls, status, watch)
                if status == MISMATCH:
                    texts = board.exchange_texts(text, watch)
                    number, by_all = own.call_number, own.one_node
                    raise mismatch(own.name, number, own.rank, texts, board.members, by_all=by_all)
        except BaseException as error:
            own.note(text, error, out_of_step=not own.one_node)  # the other nodes do not know of it
            raise
        if status == BROKEN:  # another thread's call has failed meanwhile
            own.raise_failure(text)
        return status
