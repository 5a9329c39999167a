"""barrier: every rank waits until all ranks have called it."""

from __future__ import annotations

import numpy as np

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, PreparedCall
from commlib.collectives.host.schedule_path import own_program
from commlib.collectives.paths import Move, Verb
from commlib.dtypes import Array
from commlib.group.group import Group
from commlib.node.collective import NodeCollective
from commlib.node.context import NodeContext

NOTHING = np.empty(0, np.uint8)
_CALL = Call("barrier", None, NOTHING.dtype)


def barrier(calls: Calls) -> PreparedCall:
    return PreparedCall.into(calls.find(VERB, _CALL, (NOTHING.dtype, ())), NOTHING, None, None)


def _on_node(context: NodeContext, call: Call) -> NodeCollective:
    return NodeCollective.barrier(context, call.text)


def _messages(group: Group, call: Call) -> Move:
    steps = own_program(group, "barrier", "dissemination")

    def move(x: Array, target: Array) -> None:
        group.programs.execute(steps, [[]], call.text)

    return move


VERB = Verb("barrier", _messages, on_node=_on_node, hierarchical=lambda call, size: ())
