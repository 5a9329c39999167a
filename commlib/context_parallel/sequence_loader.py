"""SequenceLoader: give each rank of an axis its part of batches of sequences, with positions and shifted labels."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from commlib.comparison.agreement import agree_on_number, digest_of, make_or_refuse
from commlib.comparison.order import note_layout
from commlib.comparison.parameter_check import check_agreement
from commlib.context_parallel import ORDERS, SequenceLayout, document_bounds
from commlib.context_parallel.sequences import next_tokens, position_ids, shard
from commlib.dtypes import Array
from commlib.errors import PeerError, UsageError
from commlib.sharding.axis import ParallelAxis

_END = "there is no further batch"


class SequenceLoader:
    """Iterate over batches of full sequences, and yield this rank's part of each, as a dict.

    batches: any iterable of mappings of arrays (batch, tokens, ...), or of (tokens, labels), or of arrays of tokens.
    The loader yields dicts, in which all arrays are sharded along `dim`, except those named in `whole`. It adds

    - "labels": the tokens, or the given labels, each shifted to the next token, which another rank may hold. So the
    model
      must not shift them again. The last token of a sequence or a document gets `ignore`. With shift=False given labels
      are not shifted.
    - "position_ids": positions of this rank's tokens in their sequence, or in their document, unless they were given.

    An entry "documents" has the starts of packed documents and the end of the last one, (0, 5, 11), for all rows of the
    batch; it is passed on as a tuple, for `attention`. tokens, labels: other names for these two.

    reads: "all", every rank reads the same batches, which is checked; or "first", the first rank reads them and sends
    them to the others, which may pass None. Making a loader and iterating are collective. It has a separate group, so
    another thread may read ahead, as in Keras. Raises MismatchError if ranks have read different batches or passed
    different options, UsageError for arrays that do not fit, PeerError if another rank could not read.
    """

    def __init__(
        self,
        batches: Iterable[Any] | None,
        axis: ParallelAxis,
        *,
        layout: str = "balanced",
        dim: int = 1,
        tokens: str = "input_ids",
        labels: str = "labels",
        whole: Collection[str] = (),
        shift: bool = True,
        ignore: int = -100,
        reads: str = "all",
        to_array: Callable[[Any], Array] = np.asarray,
        from_array: Callable[[Array], Any] = np.asarray,
    ) -> None:
        self._reads_here = reads == "all" or axis.rank == 0

        def check() -> None:
            if reads not in ("all", "first"):
                raise UsageError(f"SequenceLoader: reads is {reads!r}, expected 'all' or 'first'")
            if layout not in ORDERS:
                raise UsageError(f"SequenceLoader: layout is {layout!r}, expected {' or '.join(map(repr, ORDERS))}")
            if batches is None and self._reads_here:
                raise UsageError(f"SequenceLoader: rank {axis.rank} of {axis.comm.name} reads, but has no batches")

        make_or_refuse(axis.comm, "SequenceLoader", check)
        options = {
            "reads": reads, "layout": layout, "dim": dim, "tokens": tokens, "labels": labels, "whole": sorted(whole),
            "shift": shift, "ignore": ignore,
        }  # fmt: skip
        if axis.size > 1:
            lines = [f"{name}: {value}" for name, value in options.items()]
            agree_on_number(axis.comm, "SequenceLoader", ["SequenceLoader", *lines])
        note_layout(axis.comm, layout)
        self._batches, self._axis, self._order, self._dim = batches, axis, layout, dim
        self._tokens, self._labels, self._whole = tokens, labels, frozenset(whole)
        self._shift, self._ignore, self._shares = shift, ignore, reads == "first"
        self._to_array, self._from_array = to_array, from_array
        split = axis.comm.split(0, axis.rank, name=f"{axis.comm.name}.batches")
        assert split is not None
        self._comm = split

    def __len__(self) -> int:
        """Return the number of batches, if this rank reads batches of known number."""
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        read = self._open()
        while (batch := self._next(read)) is not None:
            yield self._shard_batch(batch)

    def _open(self) -> Iterator[Any]:
        if self._batches is not None and self._reads_here:
            yield from self._batches  # opened at the first read, so that its errors are reported, too

    def _next(self, read: Iterator[Any]) -> dict[str, Any] | None:
        if self._shares:
            return self._broadcast_batch(read)
        if self._comm.size == 1:
            return self._read(read)
        return self._compare_batch(read)

    def _compare_batch(self, read: Iterator[Any]) -> dict[str, Any] | None:
        """Return this rank's batch, after comparing it between ranks. Read errors are reported to all ranks."""
        comm = self._comm
        try:
            batch = self._read(read)
            lines = [_END] if batch is None else [f"{name}: {_digest(value)}" for name, value in batch.items()]
        except Exception as error:
            comm.all_gather_object(("failed", f"{type(error).__name__}: {error}"))
            raise
        everyone = comm.all_gather_object(("read", digest_of(lines)))
        for rank, (kind, text) in enumerate(everyone):
            if kind == "failed":
                raise PeerError(f"SequenceLoader: rank {rank} of {comm.name} could not read a batch: {text}")
        if len(set(everyone)) > 1:
            check_agreement(comm, "SequenceLoader: batches differ", lines)
        return batch

    def _broadcast_batch(self, read: Iterator[Any]) -> dict[str, Any] | None:
        """Return the first rank's batch. Its errors are reported, so no rank waits for a missing batch."""
        comm = self._comm
        if self._axis.rank:
            kind, batch = comm.broadcast_object(None)
            if kind == "failed":
                raise PeerError(f"SequenceLoader: rank 0 of {comm.name} could not read a batch: {batch}")
            return pickle.loads(batch)  # type: ignore[no-any-return]
        try:
            batch = self._read(read)
            given = pickle.dumps(batch)  # a batch that cannot be pickled is reported, too
        except Exception as error:
            comm.broadcast_object(("failed", f"{type(error).__name__}: {error}"))
            raise
        comm.broadcast_object(("read", given))
        return batch

    def _read(self, read: Iterator[Any]) -> dict[str, Any] | None:
        batch = next(read, None)
        if batch is None:
            return None
        if not isinstance(batch, Mapping):
            parts = batch if isinstance(batch, tuple | list) else (batch,)
            if not 1 <= len(parts) <= 2:
                raise UsageError(
                    f"SequenceLoader: a batch has {len(parts)} elements, expected tokens, labels, or a mapping"
                )
            batch = dict(zip((self._tokens, self._labels), parts, strict=False))
        if self._tokens not in batch:
            raise UsageError(f"SequenceLoader: a batch has {list(batch)}, expected {self._tokens!r}: see `tokens`")
        return {name: self._value(name, value) for name, value in batch.items()}

    def _value(self, name: str, value: Any) -> Any:
        if name == "documents":
            return None if value is None else tuple(int(bound) for bound in value)
        return value if name in self._whole else self._to_array(value)

    def _shard_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        tokens, axis, dim = batch[self._tokens], self._axis, self._dim
        if tokens.ndim <= dim:
            raise UsageError(f"SequenceLoader: tokens of shape {list(tokens.shape)} have no dimension {dim}")
        length = tokens.shape[dim]
        layout = SequenceLayout(length, axis.size, self._order)
        bounds = document_bounds(batch.get("documents"), length)
        batch = {**batch, self._labels: self._targets(batch, bounds)}
        own: dict[str, Any] = {}
        for name, value in batch.items():
            if name == "documents" or name in self._whole:
                own[name] = value
                continue
            if value.ndim <= dim or value.shape[dim] != length:
                raise UsageError(
                    f"SequenceLoader: {name!r} has shape {list(value.shape)}, expected {length} tokens along dimension "
                    f"{dim}, like {self._tokens!r}. Name it in `whole` if it is not a sequence"
                )
            own[name] = self._from_array(shard(value, layout, axis.rank, dim))
        if "position_ids" not in own:
            places = position_ids(layout, axis.rank, bounds)
            shape = (*tokens.shape[:dim], len(places))
            own["position_ids"] = self._from_array(np.broadcast_to(places, shape).copy())  # may be written
        return own

    def _targets(self, batch: Mapping[str, Any], bounds: Sequence[int]) -> Array:
        given = batch.get(self._labels)
        if self._shift:
            return next_tokens(batch[self._tokens] if given is None else given, bounds, self._dim, self._ignore)
        if given is None:
            raise UsageError(f"SequenceLoader: shift=False, but a batch has no {self._labels!r}")
        return np.asarray(given)


def _digest(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value) if isinstance(value, tuple | int | float | str) else type(value).__name__
    bits = hashlib.sha256(np.ascontiguousarray(value).view(np.uint8).data if value.size else b"").hexdigest()
    return f"{value.dtype.name} {list(value.shape)} {bits[:16]}"
