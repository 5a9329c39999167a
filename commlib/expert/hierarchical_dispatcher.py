"""Hierarchical dispatcher: tokens cross the network once per node, then reach experts through that node's memory.

Each rank has a partner on every other node: the rank with the same local index. A token with experts on a node goes to
the partner on that node. The partner dispatches it within the node like a token of its own, and adds up the experts'
rows before it returns them. A rank sends one message to each node instead of one to each rank, and a token crosses the
network once for each node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.dtypes import Array
from commlib.expert.dispatch_plan import Assignments, DispatchPlan
from commlib.expert.dispatcher import Empty
from commlib.expert.placement import ExpertPlacement
from commlib.expert.shared_memory_dispatcher import SharedMemoryDispatcher
from commlib.expert.token_copies import CopyPlan, TokenCopies, unpack_plan


class _NodeAssignments(NamedTuple):
    tokens: Array
    counts: Array
    starts: Array
    slots: Array


class HierarchicalDispatcher:
    """See `commlib.expert.dispatcher.Dispatcher`. Rows of an expert are ordered by local index, node and token.

    comm: its nodes have equally many ranks, more than one, which share memory. Collective to make. codec: fixed-length
    codec for floats between nodes; None: no encoding.
    """

    def __init__(
        self, comm: Communicator, placement: ExpertPlacement, empty: Empty = np.empty, *, codec: Codec | None = None
    ) -> None:
        self.placement, self._empty = placement, empty
        nodes = comm.topology.nodes
        number = comm.topology.node(comm.rank)
        place = nodes[number].index(comm.rank)
        node_of = {rank: at for at, ranks in enumerate(nodes) for rank in ranks}
        rail, node = comm.split_all([(place, number, f"{comm.name}.rail"), (number, place, f"{comm.name}.node")])
        assert rail is not None
        assert node is not None
        self.comms = rail, node
        """Communicators on which ranks may wait, in addition to that of all ranks."""
        self._rail = TokenCopies(
            rail, ExpertPlacement(tuple(node_of[owner] for owner in placement.owners), len(nodes)), codec
        )
        here = [nodes[number].index(owner) for owner in placement.owners if node_of[owner] == number]
        self._node = SharedMemoryDispatcher(node, ExpertPlacement(tuple(here), len(nodes[number])), empty)

    def dispatch(
        self, what: str, assigned: Assignments, x: Array, gates: Array
    ) -> tuple[DispatchPlan, Array, Array, Array]:
        first, copies, numbers = self._rail.send(what, assigned, x, gates)
        p = unpack_plan(first)
        handed_on = _NodeAssignments(p.copy_of, p.local.astype(np.int64), p.copy_starts, p.by_copy)
        second, rows, node_numbers, counts = self._node.dispatch(what, handed_on, copies, numbers)
        plan = np.concatenate([np.array([len(first)], np.int32), first, second])
        return plan, rows, node_numbers, counts

    def combine_back(self, what: str, plan: DispatchPlan, x: Array) -> Array:
        self._rail.name(f"{what}, combine, backward")
        p, second = _split_plan(plan)
        return self._node.combine_back(what, second, self._rail.send_again(p, x))

    def combine(self, what: str, plan: DispatchPlan, rows: Array, gates: Array) -> Array:
        self._rail.name(f"{what}, combine")
        p, second = _split_plan(plan)
        return self._rail.send_back(p, self._node.combine(what, second, rows, gates), None, self._empty)[0]

    def dispatch_back(self, what: str, plan: DispatchPlan, rows: Array, numbers: Array) -> tuple[Array, Array]:
        self._rail.name(f"{what}, dispatch, backward")
        p, second = _split_plan(plan)
        copies, node_numbers = self._node.dispatch_back(what, second, rows, numbers)
        return self._rail.send_back(p, copies, node_numbers, self._empty)


def _split_plan(plan: DispatchPlan) -> tuple[CopyPlan, DispatchPlan]:
    length = 1 + int(plan[0])
    return unpack_plan(plan[1:length]), plan[length:]
