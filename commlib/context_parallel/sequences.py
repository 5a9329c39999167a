"""Sequences that are divided among the ranks of an axis: agreeing on them, and cutting arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.comparison.agreement import all_told
from commlib.context_parallel import Layout, document_bounds
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import Axis


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks must call alike: an operation on a sequence, and how this is divided.

    length: of the whole sequence, or None for what the ranks' tokens add up to. rest: what else must agree, by name.
    """

    what: str
    order: str
    length: int | None = None
    documents: tuple[int, ...] | None = None
    rest: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls, what: str, order: str, length: int | None, documents: Iterable[int] | None, rest: Mapping[str, Any]
    ) -> Terms:
        """Return terms in a form that can be compared."""
        packed = None if documents is None else tuple(int(bound) for bound in documents)
        return cls(what, order, length, packed, tuple(rest.items()))

    def lines(self) -> list[str]:
        """Return them as text: what ranks compare."""
        named = {"layout": self.order, "length": self.length, "documents": self.documents, **dict(self.rest)}
        return [self.what, *(f"{name}: {value}" for name, value in named.items())]

    def layout(self, counts: Sequence[int]) -> Layout:
        """Return how the sequence is divided. counts: each rank's tokens. Raises UsageError where these do not fit."""
        found = Layout(sum(counts) if self.length is None else self.length, len(counts), self.order)
        if tuple(counts) != found.counts:
            raise UsageError(
                f"{self.what}: ranks 0, 1, ... have {tuple(counts)} tokens, but of {found.length} the layout "
                f"{self.order!r} gives them {found.counts}: divide sequences with shard_sequence or a SequenceLoader"
            )
        return found

    def bounds(self, layout: Layout) -> tuple[int, ...]:
        """Return where documents begin and the last one ends. Raises UsageError."""
        return document_bounds(self.documents, layout.length)


def settle(axis: Axis, terms: Terms, tokens: int) -> Layout:
    """Return how a sequence is divided, of which this rank has some tokens. Collective: one small message.

    Every call is compared, not only the first: what is exchanged afterwards has no other guard against ranks that
    mean different things. Raises on all ranks, or on none: MismatchError if terms differ, UsageError if the ranks'
    tokens are not those of the layout.
    """
    return settle_with(axis, terms, tokens, 0)[0]


def settle_with(axis: Axis, terms: Terms, tokens: int, number: int) -> tuple[Layout, int]:
    """Return what `settle` does, and the number that the first rank of the axis gives."""
    if axis.size == 1:
        return terms.layout((tokens,)), number
    everyone = all_told(axis.comm, terms.what, terms.lines(), (tokens, number))
    return terms.layout([theirs for theirs, _ in everyone]), everyone[0][1]


def shard(array: Array, layout: Layout, rank: int, dim: int) -> Array:
    """Return a rank's part of an array with whole sequences along `dim`: a new, contiguous array."""
    return picked(array, layout.ranges(rank), dim)


def picked(array: Array, ranges: Sequence[range], dim: int) -> Array:
    """Return the rows in these ranges along `dim`, one behind another, in a new array."""
    front = (slice(None),) * (dim % array.ndim)
    parts = [array[(*front, slice(part.start, part.stop))] for part in ranges]
    return np.concatenate(parts or [array[(*front, slice(0, 0))]], axis=dim)


def positions(layout: Layout, rank: int) -> Array:
    """Return the positions of a rank's tokens in the whole sequence, as int64."""
    parts = [np.arange(part.start, part.stop, dtype=np.int64) for part in layout.ranges(rank)]
    return np.concatenate([np.arange(0, dtype=np.int64), *parts])


def position_ids(layout: Layout, rank: int, bounds: Sequence[int]) -> Array:
    """Return the positions of a rank's tokens within their documents, as int64. bounds: see `document_bounds`."""
    own = positions(layout, rank)
    starts = np.asarray(bounds, np.int64)
    return np.asarray(own - starts[np.searchsorted(starts, own, "right") - 1], np.int64)


def next_tokens(tokens: Array, bounds: Sequence[int], dim: int, ignore: int) -> Array:
    """Return for each token the next one along `dim`, and `ignore` for the last one of each document.

    To be taken of whole sequences, before they are divided. Unsigned integers become int64.
    """
    found = np.full(tokens.shape, ignore, np.int64 if tokens.dtype.kind == "u" else tokens.dtype)
    rows = np.moveaxis(found, dim, 0)
    rows[:-1] = np.moveaxis(tokens, dim, 0)[1:]
    rows[[stop - 1 for stop in bounds[1:]]] = ignore
    return found
