"""Node path: move data through shared memory, for groups on one node."""

from __future__ import annotations

from functools import partial
from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.context import PathContext
from commlib.collectives.paths import Path, Verb
from commlib.execution.reduce_function import ReduceFunction
from commlib.group.group import Group
from commlib.node.collective import NodeCollective
from commlib.node.context import NodeContext
from commlib.runtime.compiled_call import CompiledCall


class NodePath(Path):
    """The path through a node's shared memory."""

    name = "node"

    def refusal(self, context: PathContext, verb: Verb, call: Call) -> str:
        group = context.group
        if not group.shares_memory:
            return f"{group.name} has no shared memory: its ranks are on several nodes, or COMMLIB_NODE_PATH=0"
        return "" if verb.exchange or verb.on_node else "it has no shared-memory implementation"

    def compile(self, context: PathContext, verb: Verb, call: Call) -> CompiledCall:
        group = context.group
        return _compile(verb, call, group.open()) if group.status.is_open else Opening(group, verb, call)


def _compile(verb: Verb, call: Call, context: NodeContext) -> NodeCollective:
    if verb.on_node is not None:
        return verb.on_node(context, call)
    assert verb.exchange is not None
    board = context.board
    exchange = verb.exchange(call, board.rank, board.size)
    op = ReduceFunction.of(call.dtype, call.op, board.size) if call.op else None
    return NodeCollective.exchange(context, call.text, exchange, op, counted=True)


class Opening(CompiledCall):
    """A call of a group without a board. The first call to run opens the board, on all ranks."""

    __slots__ = ("_call", "_group", "_made", "_verb")

    def __init__(self, group: Group, verb: Verb, call: Call) -> None:
        super().__init__(group.progress, call.text)
        self._group, self._verb, self._call = group, verb, call
        self._made: NodeCollective | None = None

    @property
    def settled(self) -> CompiledCall:
        return self if self._made is None else self._made

    def perform(self, x: Any, target: Any) -> Any:
        if not self._group.status.is_open:
            return self._group.calls.perform(self.text, partial(self._open, x, target))
        return self._open(x, target)

    def _open(self, x: Any, target: Any) -> Any:
        if self._made is None:
            self._made = _compile(self._verb, self._call, self._group.open())
        return self._made.perform(x, target)
