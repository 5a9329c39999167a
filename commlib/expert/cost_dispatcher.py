"""Dispatcher between nodes: each token goes to each rank separately or once to each node, whichever is cheaper."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.cost.exchanges import direct_seconds, hierarchical_seconds
from commlib.dtypes import Array
from commlib.expert.dispatch_plan import Assignments, DispatchPlan
from commlib.expert.dispatcher import Dispatcher, Empty
from commlib.expert.hierarchical_dispatcher import HierarchicalDispatcher
from commlib.expert.message_dispatcher import MessageDispatcher
from commlib.expert.placement import ExpertPlacement


class CostDispatcher:
    """See `commlib.expert.dispatcher.Dispatcher`. Chooses at the first dispatch, by the number of tokens sent then."""

    def __init__(
        self, comm: Communicator, placement: ExpertPlacement, empty: Empty = np.empty, *, codec: Codec | None = None
    ) -> None:
        self.placement = placement
        self._comm, self._empty, self._codec = comm, empty, codec
        self._dispatcher: Dispatcher | None = None

    @property
    def comms(self) -> Sequence[Communicator]:
        """Communicators on which ranks may wait, in addition to that of all ranks."""
        return self._dispatcher.comms if isinstance(self._dispatcher, HierarchicalDispatcher) else ()

    def dispatch(
        self, what: str, assigned: Assignments, x: Array, gates: Array
    ) -> tuple[DispatchPlan, Array, Array, Array]:
        if self._dispatcher is None:
            self._dispatcher = self._choose(len(x), len(gates), x.itemsize * x.shape[1])
        return self._dispatcher.dispatch(what, assigned, x, gates)

    def dispatch_back(self, what: str, passage: DispatchPlan, rows: Array, numbers: Array) -> tuple[Array, Array]:
        assert self._dispatcher is not None
        return self._dispatcher.dispatch_back(what, passage, rows, numbers)

    def combine(self, what: str, passage: DispatchPlan, rows: Array, gates: Array) -> Array:
        assert self._dispatcher is not None
        sums: Array = self._dispatcher.combine(what, passage, rows, gates)
        return sums

    def combine_back(self, what: str, passage: DispatchPlan, x: Array) -> Array:
        assert self._dispatcher is not None
        rows: Array = self._dispatcher.combine_back(what, passage, x)
        return rows

    def _choose(self, tokens: int, assignments: int, row_bytes: int) -> Dispatcher:
        comm, nodes = self._comm, self._comm.topology.nodes
        made = (comm, self.placement, self._empty)
        if len({len(ranks) for ranks in nodes}) > 1 or not comm.is_hierarchical:
            return MessageDispatcher(*made, codec=self._codec)
        told = comm.all_reduce(np.array([tokens, assignments], np.int64))
        each, top_k = int(told[0]) / comm.size, max(1, round(int(told[1]) / max(1, int(told[0]))))
        shape = len(nodes), len(nodes[0]), each, float(row_bytes), top_k, comm.runtime.chooser.machine
        if hierarchical_seconds(*shape) < direct_seconds(*shape):
            return HierarchicalDispatcher(*made, codec=self._codec)
        return MessageDispatcher(*made, codec=self._codec)
