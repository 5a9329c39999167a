"""ByMessages: rows between ranks that share no memory."""

from __future__ import annotations

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.dtypes import Array
from commlib.expert.copies import Copies, Parts, add_up, unpacked
from commlib.expert.exchange import Empty
from commlib.expert.passage import Assigned, Passage
from commlib.expert.placement import Placement


class ByMessages:
    """See `commlib.expert.exchange.Exchange`. codec: how floats travel, of a fixed length, or as they are."""

    def __init__(
        self, comm: Communicator, placement: Placement, empty: Empty = np.empty, *, codec: Codec | None = None
    ) -> None:
        self.placement, self._empty = placement, empty
        self._copies = Copies(comm, placement, codec)

    def dispatch(self, what: str, assigned: Assigned, x: Array, gates: Array) -> tuple[Passage, Array, Array, Array]:
        passage, copies, numbers = self._copies.send(what, assigned, x, gates)
        p = unpacked(passage)
        return passage, self._taken(copies, p.copy_of), numbers, p.local

    def combine_back(self, what: str, passage: Passage, x: Array) -> Array:
        self._copies.name(f"{what}, combine, backward")
        p = unpacked(passage)
        return self._taken(self._copies.send_again(p, x), p.copy_of)

    def combine(self, what: str, passage: Passage, rows: Array, gates: Array) -> Array:
        self._copies.name(f"{what}, combine")
        p = unpacked(passage)
        return self._copies.send_back(p, _by_copy(p, rows, gates), None, self._empty)[0]

    def dispatch_back(self, what: str, passage: Passage, rows: Array, numbers: Array) -> tuple[Array, Array]:
        self._copies.name(f"{what}, dispatch, backward")
        p = unpacked(passage)
        return self._copies.send_back(p, _by_copy(p, rows, np.ones(len(rows), np.float32)), numbers, self._empty)

    def _taken(self, copies: Array, numbers: Array) -> Array:
        rows: Array = self._empty((len(numbers), copies.shape[1]), copies.dtype)
        np.take(copies, numbers, axis=0, out=rows, mode="clip")
        return rows


def _by_copy(p: Parts, rows: Array, factors: Array) -> Array:
    """Return the sum of the rows of each copy, times factors."""
    sums = np.empty((len(p.copy_starts) - 1, rows.shape[1]), rows.dtype)
    add_up(sums, p.copy_starts, p.by_copy, rows, factors)
    return sums
