"""Device peers: the board that connects the devices of a group's ranks.

A group's first call with device arrays tests whether the ranks' streams can synchronize and their memory can be shared.
If this fails on any rank, the group's calls use another path from then on.
"""

from __future__ import annotations

import logging
from functools import partial

from commlib.collectives.device.staging_queue import StagingQueue
from commlib.errors import TransportError
from commlib.group.group import Group
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import OpenSlots

log = logging.getLogger("commlib")


class DevicePeers:
    """The board that connects the devices of a group's ranks, once it is made."""

    def __init__(self, group: Group, queue: StagingQueue) -> None:
        self.group, self._queue = group, queue
        self.board: DeviceBoard | None = None
        self.refusal = _refusal(group)

    @property
    def may_exchange(self) -> bool:
        """Whether uneven rows may go between the devices, as far as is known. The same on all ranks."""
        return self.group.one_node and not self.refusal

    def opened(self) -> tuple[DeviceBoard, OpenSlots]:
        """Return the board, which must exist, and the function that opens its slots."""
        assert self.board is not None
        group = self.group
        slot_bytes, gather = group.config.device_slot_kib * 1024, group.programs.gather_in_node
        return self.board, partial(self.board.open_slots, slot_bytes, gather)

    def open(self, text: str) -> DeviceBoard | None:
        """Return the board of this node; the first call of all ranks makes it. None if a node cannot have one."""
        if self.board is None and not self.refusal:
            first = f"{text}, first connecting the streams of {self._queue.device.name}"
            self.group.calls.perform(first, self._make, first, must_match=True)
        return self.board

    def _make(self, text: str) -> None:
        group, device, device_board, refusal = self.group, self._queue.device, None, ""
        memory, gather, watch = group.symmetric_on(device), group.programs.gather_in_node, group.waits.watch(text)
        try:
            board, node = group.open().board, group.hierarchy.node
            device_board = DeviceBoard.make(device, board, memory, node, gather, watch, ipc=group.config.device_ipc)
            if device_board.by_host and not group.one_node:
                refusal = "on some node the devices cannot address each other's memory"
        except TransportError as error:
            refusal = str(error)
        refusals = [text for text in group.programs.gather_objects(refusal) if text]
        if device_board is None or refusals:
            if device_board is not None:
                device_board.close()
            self.refusal = refusals[0]
            level = logging.WARNING if group.rank == 0 else logging.DEBUG
            log.log(level, "%s: collectives on %s go through the host: %s", group.name, device.name, self.refusal)
            return
        self.board, self._queue.let_go = device_board, device_board.release
        group.attach(device_board)


def _refusal(group: Group) -> str:
    """Return why the settings or the topology rule the board out, or "". The same on all ranks."""
    if not group.config.device_peers:
        return "COMMLIB_DEVICE_PEERS=0"
    if not (group.shares_memory or group.is_hierarchical):
        return "the ranks share no host memory"
    return "" if min(map(len, group.topology.nodes)) > 1 else "some node has only one rank"
