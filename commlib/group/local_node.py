"""LocalNode: the memory that a group's ranks on this node share. The first operation that needs its board makes it."""

from __future__ import annotations

from commlib.group.completion import Completion
from commlib.group.group_status import GroupStatus, Liveness
from commlib.group.hierarchy import Hierarchy, Memories
from commlib.group.programs import Programs
from commlib.group.waits import Waits
from commlib.node.board import NodeBoard
from commlib.runtime.process import Runtime
from commlib.runtime.progress import Progress


class LocalNode:
    """The board and the symmetric memories of one group on this node."""

    def __init__(
        self,
        runtime: Runtime,
        hierarchy: Hierarchy,
        status: GroupStatus,
        waits: Waits,
        programs: Programs,
        progress: Progress,
    ) -> None:
        self._runtime, self._hierarchy, self._status, self._waits = runtime, hierarchy, status, waits
        self._gather = programs.gather_in_node
        self.memories = Memories(hierarchy, programs.gather_in_node, programs.gather_objects)
        self.places = self.memories.host.places
        """The address of the table of the group's symmetric memory on the host."""
        self.completion = Completion(status, waits, progress)

    def open(self) -> NodeBoard:
        """Return the board. The first call creates it: collective, within an operation."""
        status = self._status
        if status.is_open:
            assert status.board is not None
            return status.board
        config = self._runtime.config
        board = status.board = NodeBoard(
            self._hierarchy.node,
            self._gather,
            slot_bytes=config.slot_kib * 1024,
            spins=self._runtime.spins,
            members=self._hierarchy.ranks,
            peer_reads=config.peer_reads,
        )
        board.enter(self._waits.watch("set-up of shared memory"))  # from here on the board shows failures
        board.calls = status.count
        self._waits.liveness = Liveness(board)
        status.is_open = True
        return board

    def close(self) -> None:
        """Release the board and the memories. Collective."""
        self.memories.close()
        if self._status.board is not None:
            self._status.board.close()
