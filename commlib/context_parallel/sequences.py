"""Sharded sequences: agree on them among the ranks of an axis, and shard arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.comparison.agreement import agree_on_numbers
from commlib.context_parallel import SequenceLayout, document_bounds
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.sharding.axis import ParallelAxis


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """The arguments that must be equal on all ranks: an operation on a sequence, and the sharding of the sequence.

    length: of the full sequence, or None for the sum of the ranks' tokens. rest: further arguments that must be equal.
    """

    what: str
    order: str
    length: int | None = None
    documents: tuple[int, ...] | None = None
    rest: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(
        cls, what: str, order: str, length: int | None, documents: Iterable[int] | None, rest: Mapping[str, Any]
    ) -> SequenceSpec:
        """Return terms in a form that can be compared."""
        packed = None if documents is None else tuple(int(bound) for bound in documents)
        return cls(what, order, length, packed, tuple(rest.items()))

    @classmethod
    def of_unshard(
        cls, order: str, length: int | None, shape: Sequence[int | None], dim: int, dtype: str, partial: bool
    ) -> SequenceSpec:
        """Return the terms of `unshard_sequence` for a tensor of this shape, with tokens along `dim`."""
        others = [*shape[:dim], *shape[dim + 1 :]]
        rest = {"dimension": dim, "other dimensions": others, "dtype": dtype, "partial": partial}
        return cls.of("unshard_sequence", order, length, None, rest)

    def lines(self) -> list[str]:
        """Return the terms as the lines of text that ranks compare."""
        named = {"layout": self.order, "length": self.length, "documents": self.documents, **dict(self.rest)}
        return [self.what, *(f"{name}: {value}" for name, value in named.items())]

    def layout(self, counts: Sequence[int]) -> SequenceLayout:
        """Return the layout of the sequence. counts: tokens of each rank. Raises UsageError if they do not fit."""
        result = SequenceLayout(sum(counts) if self.length is None else self.length, len(counts), self.order)
        if tuple(counts) != result.counts:
            raise UsageError(
                f"{self.what}: ranks 0, 1, ... have {tuple(counts)} tokens, but of {result.length} the layout "
                f"{self.order!r} gives them {result.counts}: shard sequences with shard_sequence or a SequenceLoader"
            )
        return result

    def bounds(self, layout: SequenceLayout) -> tuple[int, ...]:
        """Return the starts of documents, and the end of the last one. Raises UsageError."""
        return document_bounds(self.documents, layout.length)


def dimension(what: str, shape: Sequence[int | None] | None, dim: int) -> int:
    """Return a dimension of a tensor, counted from the front. shape: None if it is unknown. Raises UsageError."""
    if shape is None or not -len(shape) <= dim < len(shape):
        raise UsageError(f"{what}: a tensor of shape {_text(shape)} has no dimension {dim}")
    return dim % len(shape)


def check_loss_sum(shape: Sequence[int | None] | None, dtype: str) -> None:
    """Raise UsageError unless the argument of `loss_mean` is one float."""
    if shape is None or any(length != 1 for length in shape) or "float" not in dtype:
        raise UsageError(
            f"loss_mean: loss_sum has shape {_text(shape)} and dtype {dtype}, expected one float: the sum over this "
            "rank's tokens (reduction='sum')"
        )


def _text(shape: Sequence[int | None] | None) -> str:
    return "?" if shape is None else str(list(shape))


def settle(axis: ParallelAxis, terms: SequenceSpec, tokens: int) -> SequenceLayout:
    """Return the layout of a sequence, given this rank's number of tokens. Collective: one small message.

    Every call is compared, not only the first, because the exchanges that follow do not check for ranks with different
    arguments. Raises on all ranks, or on none: MismatchError if terms differ, UsageError if the ranks' numbers of
    tokens do not fit the layout.
    """
    return settle_with(axis, terms, tokens, 0)[0]


def settle_with(axis: ParallelAxis, terms: SequenceSpec, tokens: int, number: int) -> tuple[SequenceLayout, int]:
    """Return the result of `settle`, and the number that the first rank of the axis passes."""
    if axis.size == 1:
        return terms.layout((tokens,)), number
    everyone = agree_on_numbers(axis.comm, terms.what, terms.lines(), (tokens, number))
    return terms.layout([theirs for theirs, _ in everyone]), everyone[0][1]


def shard(array: Array, layout: SequenceLayout, rank: int, dim: int) -> Array:
    """Return a rank's part of an array with full sequences along `dim`: a new, contiguous array."""
    return pick_rows(array, layout.ranges(rank), dim)


def pick_rows(array: Array, ranges: Sequence[range], dim: int) -> Array:
    """Return the rows in these ranges along `dim`, concatenated, in a new array."""
    front = (slice(None),) * (dim % array.ndim)
    parts = [array[(*front, slice(part.start, part.stop))] for part in ranges]
    return np.concatenate(parts or [array[(*front, slice(0, 0))]], axis=dim)


def positions(layout: SequenceLayout, rank: int) -> Array:
    """Return the positions of a rank's tokens in the full sequence, as int64."""
    parts = [np.arange(part.start, part.stop, dtype=np.int64) for part in layout.ranges(rank)]
    return np.concatenate([np.arange(0, dtype=np.int64), *parts])


def position_ids(layout: SequenceLayout, rank: int, bounds: Sequence[int]) -> Array:
    """Return the positions of a rank's tokens within their documents, as int64. bounds: see `document_bounds`."""
    own = positions(layout, rank)
    starts = np.asarray(bounds, np.int64)
    return np.asarray(own - starts[np.searchsorted(starts, own, "right") - 1], np.int64)


def next_tokens(tokens: Array, bounds: Sequence[int], dim: int, ignore: int) -> Array:
    """Return the next token of each token along `dim`, and `ignore` for the last one of each document.

    Call it on full sequences, before they are sharded. Unsigned integers become int64.
    """
    result = np.full(tokens.shape, ignore, np.int64 if tokens.dtype.kind == "u" else tokens.dtype)
    rows = np.moveaxis(result, dim, 0)
    rows[:-1] = np.moveaxis(tokens, dim, 0)[1:]
    rows[[stop - 1 for stop in bounds[1:]]] = ignore
    return result
