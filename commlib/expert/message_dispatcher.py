"""Dispatcher over messages, for ranks that share no memory."""

from __future__ import annotations

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.dtypes import Array
from commlib.expert.dispatch_plan import Assignments, DispatchPlan
from commlib.expert.dispatcher import Empty
from commlib.expert.placement import ExpertPlacement
from commlib.expert.token_copies import CopyPlan, TokenCopies, add_up, unpack_plan


class MessageDispatcher:
    """See `commlib.expert.dispatcher.Dispatcher`. codec: fixed-length codec for floats sent; None: no encoding."""

    def __init__(
        self, comm: Communicator, placement: ExpertPlacement, empty: Empty = np.empty, *, codec: Codec | None = None
    ) -> None:
        self.placement, self._empty = placement, empty
        self._copies = TokenCopies(comm, placement, codec)

    def dispatch(
        self, what: str, assigned: Assignments, x: Array, gates: Array
    ) -> tuple[DispatchPlan, Array, Array, Array]:
        plan, copies, numbers = self._copies.send(what, assigned, x, gates)
        p = unpack_plan(plan)
        return plan, self._take_rows(copies, p.copy_of), numbers, p.local

    def combine_back(self, what: str, plan: DispatchPlan, x: Array) -> Array:
        self._copies.name(f"{what}, combine, backward")
        p = unpack_plan(plan)
        return self._take_rows(self._copies.send_again(p, x), p.copy_of)

    def combine(self, what: str, plan: DispatchPlan, rows: Array, gates: Array) -> Array:
        self._copies.name(f"{what}, combine")
        p = unpack_plan(plan)
        return self._copies.send_back(p, _by_copy(p, rows, gates), None, self._empty)[0]

    def dispatch_back(self, what: str, plan: DispatchPlan, rows: Array, numbers: Array) -> tuple[Array, Array]:
        self._copies.name(f"{what}, dispatch, backward")
        p = unpack_plan(plan)
        return self._copies.send_back(p, _by_copy(p, rows, np.ones(len(rows), np.float32)), numbers, self._empty)

    def _take_rows(self, copies: Array, numbers: Array) -> Array:
        rows: Array = self._empty((len(numbers), copies.shape[1]), copies.dtype)
        np.take(copies, numbers, axis=0, out=rows, mode="clip")
        return rows


def _by_copy(p: CopyPlan, rows: Array, factors: Array) -> Array:
    """Return the sum over the rows of each copy, weighted by factors."""
    sums = np.empty((len(p.copy_starts) - 1, rows.shape[1]), rows.dtype)
    add_up(sums, p.copy_starts, p.by_copy, rows, factors)
    return sums
