"""Chosen: between nodes, tokens go to each rank by itself or to each node once, whichever the cost model says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.cost.exchanges import direct_seconds, hierarchical_seconds
from commlib.dtypes import Array
from commlib.expert.by_messages import ByMessages
from commlib.expert.exchange import Empty, Exchange
from commlib.expert.hierarchical import Hierarchical
from commlib.expert.passage import Assigned, Passage
from commlib.expert.placement import Placement


class Chosen:
    """See `commlib.expert.exchange.Exchange`. It chooses when it is first used, by how much ranks send then."""

    def __init__(
        self, comm: Communicator, placement: Placement, empty: Empty = np.empty, *, codec: Codec | None = None
    ) -> None:
        self.placement = placement
        self._comm, self._empty, self._codec = comm, empty, codec
        self._way: Exchange | None = None

    @property
    def comms(self) -> Sequence[Communicator]:
        """Those on which ranks may wait, beside that of all."""
        return self._way.comms if isinstance(self._way, Hierarchical) else ()

    def dispatch(self, what: str, assigned: Assigned, x: Array, gates: Array) -> tuple[Passage, Array, Array, Array]:
        if self._way is None:
            self._way = self._choose(len(x), len(gates), x.itemsize * x.shape[1])
        return self._way.dispatch(what, assigned, x, gates)

    def dispatch_back(self, what: str, passage: Passage, rows: Array, numbers: Array) -> tuple[Array, Array]:
        assert self._way is not None
        return self._way.dispatch_back(what, passage, rows, numbers)

    def combine(self, what: str, passage: Passage, rows: Array, gates: Array) -> Array:
        assert self._way is not None
        sums: Array = self._way.combine(what, passage, rows, gates)
        return sums

    def combine_back(self, what: str, passage: Passage, x: Array) -> Array:
        assert self._way is not None
        rows: Array = self._way.combine_back(what, passage, x)
        return rows

    def _choose(self, tokens: int, assignments: int, row_bytes: int) -> Exchange:
        comm, nodes = self._comm, self._comm.topology.nodes
        made = (comm, self.placement, self._empty)
        if len({len(ranks) for ranks in nodes}) > 1 or not comm.is_hierarchical:
            return ByMessages(*made, codec=self._codec)
        told = comm.all_reduce(np.array([tokens, assignments], np.int64))
        each, top_k = int(told[0]) / comm.size, max(1, round(int(told[1]) / max(1, int(told[0]))))
        shape = len(nodes), len(nodes[0]), each, float(row_bytes), top_k, comm.runtime.chooser.machine
        if hierarchical_seconds(*shape) < direct_seconds(*shape):
            return Hierarchical(*made, codec=self._codec)
        return ByMessages(*made, codec=self._codec)
