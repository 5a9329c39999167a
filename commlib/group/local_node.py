"""LocalNode: the memory that a group's ranks on this node share. The first operation that needs its board makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from commlib.buffers.symmetric_memory import SymmetricMemory
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.group.call_check import mismatch
from commlib.group.group_status import GroupStatus, Liveness
from commlib.group.hierarchy import Hierarchy
from commlib.group.programs import Programs
from commlib.group.waits import Waits
from commlib.kernels.host.node import BROKEN, MISMATCH
from commlib.node.board import Kernel, KernelCall, NodeBoard
from commlib.runtime.process import Runtime
from commlib.runtime.progress import Progress


class LocalNode:
    """The board of one group on this node, and its symmetric memories, on the host and on devices."""

    def __init__(
        self,
        runtime: Runtime,
        hierarchy: Hierarchy,
        status: GroupStatus,
        waits: Waits,
        programs: Programs,
        progress: Progress,
    ) -> None:
        self._runtime, self._hierarchy, self._programs = runtime, hierarchy, programs
        self._status, self._waits, self._progress = status, waits, progress
        self._memories: dict[Device, SymmetricMemory] = {}
        self.places = self.symmetric_on(HOST).places
        """The address of the table of the symmetric memory on the host."""

    def open(self) -> NodeBoard:
        """Return the board. The first call creates it: collective, within an operation."""
        status = self._status
        if status.is_open:
            assert status.board is not None
            return status.board
        config = self._runtime.config
        board = status.board = NodeBoard(
            self._hierarchy.node,
            self._programs.gather_in_node,
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

    def complete(self, kernel: Kernel, argument: int, calls: KernelCall, status: int, text: str) -> int:
        """Finish a kernel that did not complete at once: keep waiting, or raise a mismatch. Return its status."""
        group, journal = self._status, self._progress.journal
        board = group.board
        assert board is not None
        if group.failure is not None:
            group.raise_failure(text)
        try:
            with self._progress.refuse_others():
                if journal.current is not None:
                    journal.current.round("waits on its node")
                watch = self._waits.watch(text)
                status = board.resume(kernel, argument, calls, status, watch)
                if status == MISMATCH:
                    texts = board.exchange_texts(text, watch)
                    number, by_all = group.call_number, group.one_node
                    raise mismatch(group.name, number, group.rank, texts, board.members, by_all=by_all)
        except BaseException as error:
            group.note(text, error, out_of_step=not group.one_node)  # the other nodes do not know of it
            raise
        if status == BROKEN:  # another thread's call has failed meanwhile
            group.raise_failure(text)
        return status

    def symmetric_on(self, device: Device) -> SymmetricMemory:
        """Return the symmetric memory of a device."""
        memory = self._memories.get(device)
        if memory is None:
            place, gather = self._hierarchy.place, self._programs.gather_in_node
            share: Callable[[int], Any] = partial(device.share, rank=place, gather=gather)
            if device is HOST:
                share = partial(self._hierarchy.node.share, gather=gather)
            memory = self._memories[device] = SymmetricMemory(place, share, self._programs.gather_objects)
        return memory

    def close(self) -> None:
        """Release the board and the memories. Collective."""
        for memory in self._memories.values():
            memory.close()
        if self._status.board is not None:
            self._status.board.close()
