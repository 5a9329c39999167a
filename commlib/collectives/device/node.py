"""Node device path: move data directly between the devices of a node; on several nodes, hierarchically.

A group's first call with device arrays tests whether the ranks' streams can synchronize and their memory can be shared.
If this fails on any rank, the group's calls use another path from then on.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.device.hierarchical import DeviceSteps
from commlib.collectives.device.staging_queue import OnWait, Run, StagingQueue
from commlib.collectives.paths import Verb
from commlib.devices.array import DeviceArray
from commlib.errors import TransportError
from commlib.execution.reduce_function import ReduceFunction
from commlib.group.group import Group
from commlib.group.weak_references import WeakPart
from commlib.node.device_board import DeviceBoard
from commlib.node.device_collective import Enqueue, OpenSlots, exchange

log = logging.getLogger("commlib")


class DevicePeers:
    """The board that connects the devices of a group's ranks, once it is made."""

    def __init__(self, group: Group, station: StagingQueue) -> None:
        self.group, self._station = group, station
        self.board: DeviceBoard | None = None
        self.refusal = _refusal(group)

    def may_take(self, verb: Verb, call: Call) -> bool:
        """Return whether a call may go between the devices, as far as is known. The same on all ranks."""
        if self.refusal:
            return False
        if self.group.one_node:
            has_form = verb.exchange is not None or verb.on_devices is not None
            return has_form and call.algorithm in ("auto", "node", "")
        return verb.hierarchical is not None and call.algorithm in ("auto", "hierarchical")

    @property
    def may_exchange(self) -> bool:
        """Whether uneven rows may go between the devices, as far as is known. The same on all ranks."""
        return self.group.one_node and not self.refusal

    def opened(self) -> tuple[DeviceBoard, OpenSlots]:
        """Return the board, which must exist, and the function that opens its slots."""
        assert self.board is not None
        group = self.group
        return self.board, partial(self.board.open_slots, group.config.device_slot_kib * 1024, group.gather_in_node)

    def open(self, text: str, on_wait: OnWait) -> DeviceBoard | None:
        """Return the board of this node; the first call of all ranks makes it. None if a node cannot have one."""
        if self.board is None and not self.refusal:
            first = f"{text}, first connecting the streams of {self._station.device.name}"
            self.group.perform_call(first, partial(self._make, on_wait), must_match=True)
        return self.board

    def _make(self, on_wait: OnWait) -> None:
        group, device, device_board, refusal = self.group, self._station.device, None, ""
        memory, gather = group.symmetric_on(device), group.gather_in_node
        try:
            board, node = group.open().board, group.hierarchy.node
            device_board = DeviceBoard.make(device, board, memory, node, gather, on_wait, ipc=group.config.device_ipc)
            if device_board.by_host and not group.one_node:
                refusal = "on some node the devices cannot address each other's memory"
        except TransportError as error:
            refusal = str(error)
        refusals = [text for text in group.gather_objects(refusal) if text]
        if device_board is None or refusals:
            if device_board is not None:
                device_board.close()
            self.refusal = refusals[0]
            level = logging.WARNING if group.rank == 0 else logging.DEBUG
            log.log(level, "%s: collectives on %s go through the host: %s", group.name, device.name, self.refusal)
            return
        self.board, self._station.let_go = device_board, device_board.release
        group.attach(WeakPart(device_board))


def _refusal(group: Group) -> str:
    """Return why the settings or the topology rule the path out, or "". The same on all ranks."""
    if not group.config.device_peers:
        return "COMMLIB_DEVICE_PEERS=0"
    if not (group.shares_memory or group.is_hierarchical):
        return "the ranks share no host memory"
    return "" if min(map(len, group.topology.nodes)) > 1 else "some node has only one rank"


class NodeDevicePath:
    """The device path between a node's devices. by_host: through host memory if they have no peer access."""

    def __init__(self, peers: DevicePeers, *, by_host: bool = False) -> None:
        self._peers, self._by_host = peers, by_host
        self.name = "node" if peers.group.one_node else "hierarchical"

    @property
    def refusal(self) -> str:
        return self._peers.refusal

    @property
    def is_open(self) -> bool:
        board = self._peers.board
        return board is not None and (self._by_host or not board.by_host)

    @property
    def only_queues(self) -> bool:
        return self._peers.group.one_node

    def takes(self, verb: Verb, call: Call) -> bool:
        return self._peers.may_take(verb, call)

    def open(self, text: str, on_wait: OnWait) -> bool:
        self._peers.open(text, on_wait)
        return self.is_open

    def run(self, verb: Verb, call: Call) -> Run:
        group, text, peers = self._peers.group, call.text, self._peers
        compiled: list[Enqueue] = []

        def move(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> None:
            if not compiled:
                compiled.append(_compile(peers, verb, call))
            compiled[0](x, target, on_wait)

        def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> Any:
            return group.perform_call(text, move, x.reshape(-1), target.reshape(-1), on_wait)

        return run


def _compile(peers: DevicePeers, verb: Verb, call: Call) -> Enqueue:
    group, (board, open_slots) = peers.group, peers.opened()
    if not group.one_node:
        assert verb.hierarchical is not None
        return DeviceSteps(board, open_slots, group, call, verb.hierarchical(call, group.size)).run
    if verb.on_devices is not None:
        return verb.on_devices(board, open_slots, call)
    assert verb.exchange is not None
    op = ReduceFunction.of(call.dtype, call.op, group.size) if call.op else None
    return exchange(board, open_slots, verb.exchange(call, group.rank, group.size), op)
