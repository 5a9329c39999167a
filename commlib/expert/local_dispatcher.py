"""Dispatcher for one rank: all experts are local, and rows are only sorted by expert."""

from __future__ import annotations

import numpy as np

from commlib.buffers.views import address_of
from commlib.dtypes import Array
from commlib.expert.dispatch_plan import Assignments, DispatchPlan, list_by_token, local_counts, make_plan, tokens_of
from commlib.expert.dispatcher import Empty
from commlib.expert.placement import ExpertPlacement
from commlib.kernels.host.dispatch_plan import find_rows, put_rows
from commlib.kernels.host.rows import sum_rows

_HERE, _NO_GATES = np.zeros(1, np.int64), np.empty(0, np.float32)


class LocalDispatcher:
    """See `commlib.expert.dispatcher.Dispatcher`."""

    def __init__(self, placement: ExpertPlacement, empty: Empty = np.empty) -> None:
        self.placement, self._empty = placement, empty
        self._owners, self._order = (np.array(each, np.int32) for each in (placement.owners, placement.order))

    def dispatch(
        self, what: str, assigned: Assignments, x: Array, gates: Array
    ) -> tuple[DispatchPlan, Array, Array, Array]:
        counts = assigned.counts.reshape(1, -1)
        plan = make_plan(assigned, counts, self._order, self._owners, 0, counts.size)
        return plan, self.combine_back(what, plan, x), gates, local_counts(plan)

    def dispatch_back(self, what: str, plan: DispatchPlan, rows: Array, numbers: Array) -> tuple[Array, Array]:
        return self._sum_rows(plan, rows, _NO_GATES), numbers

    def combine(self, what: str, plan: DispatchPlan, rows: Array, gates: Array) -> Array:
        return self._sum_rows(plan, rows, gates)

    def combine_back(self, what: str, plan: DispatchPlan, x: Array) -> Array:
        rows: Array = self._empty((int(plan[0]), x.shape[1]), x.dtype)
        put_rows(plan, self._owners, address_of(x), x.itemsize * x.shape[1], 0, _at(rows), _HERE)
        return rows

    def _sum_rows(self, plan: DispatchPlan, rows: Array, gates: Array) -> Array:
        addresses, factors = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
        own = address_of(rows)
        item = rows.itemsize * rows.shape[1]
        find_rows(plan, self._owners, 0, item, _at(rows), _HERE, own, gates, addresses, factors)
        sums: Array = self._empty((tokens_of(plan), rows.shape[1]), rows.dtype)
        sum_rows(sums, *list_by_token(plan), addresses, factors)
        return sums


def _at(rows: Array) -> Array:
    return np.array([[address_of(rows)]], np.int64)
