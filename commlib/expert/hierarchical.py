"""Hierarchical: tokens to a node once over the network, and to its experts through the memory of that node.

Each rank has a partner on every other node, the rank with the same place there. A token with experts on a node goes to
the partner there; this one hands it on as if it were its own, and adds up what comes back before it returns that. So a
rank sends one message to each node instead of one to each rank, and a token crosses the network once for each node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.dtypes import Array
from commlib.expert.copies import Copies, Parts, unpacked
from commlib.expert.exchange import Empty
from commlib.expert.on_node import OnNode
from commlib.expert.passage import Assigned, Passage
from commlib.expert.placement import Placement


class _HandedOn(NamedTuple):
    tokens: Array
    counts: Array
    starts: Array
    slots: Array


class Hierarchical:
    """See `commlib.expert.exchange.Exchange`. Rows of an expert are ordered by place, node and token.

    comm: its nodes have equally many ranks, more than one, which share memory. Collective to make. codec: how floats
    travel between nodes, of a fixed length, or as they are.
    """

    def __init__(
        self, comm: Communicator, placement: Placement, empty: Empty = np.empty, *, codec: Codec | None = None
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
        """Those on which ranks may wait, beside that of all."""
        self._rail = Copies(rail, Placement(tuple(node_of[owner] for owner in placement.owners), len(nodes)), codec)
        here = [nodes[number].index(owner) for owner in placement.owners if node_of[owner] == number]
        self._node = OnNode(node, Placement(tuple(here), len(nodes[number])), empty)

    def dispatch(self, what: str, assigned: Assigned, x: Array, gates: Array) -> tuple[Passage, Array, Array, Array]:
        first, copies, numbers = self._rail.send(what, assigned, x, gates)
        p = unpacked(first)
        handed_on = _HandedOn(p.copy_of, p.local.astype(np.int64), p.copy_starts, p.by_copy)
        second, rows, came, counts = self._node.dispatch(what, handed_on, copies, numbers)
        passage = np.concatenate([np.array([len(first)], np.int32), first, second])
        return passage, rows, came, counts

    def combine_back(self, what: str, passage: Passage, x: Array) -> Array:
        self._rail.name(f"{what}, combine, backward")
        p, second = _both(passage)
        return self._node.combine_back(what, second, self._rail.send_again(p, x))

    def combine(self, what: str, passage: Passage, rows: Array, gates: Array) -> Array:
        self._rail.name(f"{what}, combine")
        p, second = _both(passage)
        return self._rail.send_back(p, self._node.combine(what, second, rows, gates), None, self._empty)[0]

    def dispatch_back(self, what: str, passage: Passage, rows: Array, numbers: Array) -> tuple[Array, Array]:
        self._rail.name(f"{what}, dispatch, backward")
        p, second = _both(passage)
        copies, told = self._node.dispatch_back(what, second, rows, numbers)
        return self._rail.send_back(p, copies, told, self._empty)


def _both(passage: Passage) -> tuple[Parts, Passage]:
    length = 1 + int(passage[0])
    return unpacked(passage[1:length]), passage[length:]
