"""Node device paths: move data directly between the devices of a node; on several nodes, hierarchically."""

from __future__ import annotations

from functools import partial

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.device.hierarchical import DeviceSteps
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.paths import Path, Verb, refuse_mean_of_halves
from commlib.execution.reduce_function import ReduceFunction
from commlib.node.device_collective import Enqueue, exchange
from commlib.runtime.compiled_call import CompiledCall


class NodeDevicePath(Path):
    """The path between the devices of one node. by_host: through host memory, if they have no peer access."""

    name, takes_host, takes_devices, only_queues = "node", False, True, True

    def __init__(self, *, by_host: bool = False) -> None:
        self._by_host = by_host

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        if not context.group.one_node:
            return f"{context.group.name} is on several nodes"
        if verb.exchange is None and verb.on_devices is None:
            return "it has no implementation between devices"
        return refuse_mean_of_halves(context, call) or context.peers.refusal

    def is_open(self, context: PathContext) -> bool:
        board = context.peers.board
        return context.group.one_node and board is not None and (self._by_host or not board.by_host)

    def open(self, context: PathContext, text: str) -> bool:
        context.peers.open(text)
        return self.is_open(context)

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        group, (board, open_slots) = context.group, context.peers.opened()
        if verb.on_devices is not None:
            return _make_call(context, call, verb.on_devices(board, open_slots, call))
        assert verb.exchange is not None
        op = ReduceFunction.of(call.dtype, call.op, group.size) if call.op else None
        what = verb.exchange(call, group.rank, group.size)
        return _make_call(context, call, exchange(board, open_slots, what, op))


class HierarchicalDevicePath(Path):
    """The path between the devices of each node, and between the nodes."""

    name, takes_host, takes_devices = "hierarchical", False, True

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        if context.group.one_node:
            return f"{context.group.name} is on one node"
        if verb.hierarchical is None:
            return "it has no hierarchical implementation"
        return refuse_mean_of_halves(context, call) or context.peers.refusal

    def is_open(self, context: PathContext) -> bool:
        return not context.group.one_node and context.peers.board is not None

    def open(self, context: PathContext, text: str) -> bool:
        context.peers.open(text)
        return self.is_open(context)

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        assert verb.hierarchical is not None
        group = context.group
        steps = DeviceSteps(*context.peers.opened(), group, call, verb.hierarchical(call, group.size))
        return _make_call(context, call, steps.run)


def _make_call(context: PathContext, call: Call, enqueue: Enqueue) -> CompiledCall:
    group = context.group
    return MessageCall(group, call.text, partial(enqueue, on_wait=group.waits.watch_each(call.text)), flat=False)
