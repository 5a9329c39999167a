"""broadcast: every rank gets one rank's array."""

from __future__ import annotations

from typing import Any

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.host.schedule_path import plan_program
from commlib.collectives.operands import Result, source
from commlib.collectives.paths import Move, Verb
from commlib.devices.arrays import as_view, as_writable, name_of_device
from commlib.dtypes import Array
from commlib.execution.streaming import Region
from commlib.group.arguments import check_root
from commlib.group.group import Group
from commlib.node.collective import Exchange, NodeCollective
from commlib.node.context import NodeContext
from commlib.schedule.layout import blocks


def broadcast(calls: Calls, x: Any, root: int, algorithm: str) -> PreparedCall:
    group = calls.group
    root = check_root(group, "broadcast", root)
    at_root = group.rank == root
    array = as_view(x, "broadcast") if at_root else as_writable(x, "broadcast")
    contiguous = source(array, "broadcast")
    flat = contiguous.reshape(-1)
    call = Call("broadcast", array.size, array.dtype, root=root, algorithm=algorithm, device=name_of_device(array))
    compiled = calls.find(VERB, call, (array.dtype, array.shape, root, algorithm), array.shape)
    return PreparedCall.into(compiled, flat, Result(array, flat, x, staged=contiguous is not array and not at_root), x)


def _on_node(context: NodeContext, call: Call) -> NodeCollective:
    return NodeCollective.broadcast(context, call.text, call.nbytes, call.root)


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    return Exchange.broadcast(call.nbytes, call.root, rank, size)


def _messages(group: Group, call: Call) -> Move:
    steps, pieces = plan_program(group, call, call.nbytes)
    layouts = blocks(call.count, steps.regions[0], pieces)

    def move(x: Array, target: Array) -> None:
        group.programs.execute(steps, [[Region(x, layout)] for layout in layouts], call.text)

    return move


VERB = Verb(
    "broadcast",
    _messages,
    exchange=_exchange,
    on_node=_on_node,
    hierarchical=lambda call, size: (call.count,),
    elementwise=True,
)
