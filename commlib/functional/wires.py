"""Wires: how moves travel between ranks, as they are or encoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from commlib.communicator import Communicator
from commlib.compress.activations import decode, encode
from commlib.compress.codec import Codec
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.schedule.layout import even, uneven


class Wire(Protocol):
    """The verbs that moves need, on contiguous arrays. All ranks know all lengths: nothing is asked for."""

    is_plain: bool
    """Arrays travel as they are."""

    def all_reduce(self, x: Array, *, out: Array) -> Array: ...

    def all_gather(self, x: Array, *, out: Array | None = None) -> Array: ...

    def all_gather_v(self, x: Array, lengths: Sequence[int]) -> Array: ...

    def reduce_scatter_v(self, x: Array, lengths: Sequence[int], *, out: Array) -> Array: ...

    def all_to_all_v(self, x: Array, splits: Sequence[int], takes: Sequence[int]) -> Array: ...


class Plain:
    """Arrays as they are."""

    is_plain = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def all_reduce(self, x: Array, *, out: Array) -> Array:
        """Add the arrays of all ranks."""
        found: Array = self._comm.all_reduce(x, out=out)
        return found

    def all_gather(self, x: Array, *, out: Array | None = None) -> Array:
        """Join arrays of equal shapes along dimension 0."""
        found: Array = self._comm.all_gather(x, out=out)
        return found

    def all_gather_v(self, x: Array, lengths: Sequence[int]) -> Array:
        """Join arrays of some lengths along dimension 0."""
        found: Array = self._comm.all_gather_v(x)
        return found

    def reduce_scatter_v(self, x: Array, lengths: Sequence[int], *, out: Array) -> Array:
        """Add the arrays of all ranks; keep this rank's rows of the sum."""
        if tuple(lengths) == even(len(x), self._comm.size).counts:
            self._comm.reduce_scatter(x, out=out)
        else:
            self._comm.reduce_scatter_v(x, lengths, out=out)
        return out

    def all_to_all_v(self, x: Array, splits: Sequence[int], takes: Sequence[int]) -> Array:
        """Send each rank its elements of a 1-D array; return what came."""
        if len({*splits, *takes}) == 1 and splits[0]:
            same: Array = self._comm.all_to_all(x)
            return same
        found: Array = self._comm.all_to_all_v(x, splits)[0]
        return found


class Encoded:
    """Floats as payloads of a codec of fixed length. Sums are taken in float32, in the order of ranks."""

    is_plain = False

    def __init__(self, comm: Communicator, codec: Codec) -> None:
        if not codec.fixed:
            raise UsageError(f"{codec.name}: the payload of an activation needs a fixed length: try bf16, int8 or fp8")
        self._comm, self._codec = comm, codec

    def all_reduce(self, x: Array, *, out: Array) -> Array:
        """Add the arrays of all ranks: every rank decodes the same bytes."""
        flat = x.reshape(-1)
        shares = even(flat.size, self._comm.size).counts
        own = self.reduce_scatter_v(flat, shares, out=np.empty(shares[self._comm.rank], np.float32))
        out.reshape(-1)[...] = self.all_gather_v(own, shares)
        return out

    def all_gather(self, x: Array, *, out: Array | None = None) -> Array:
        """Join arrays of equal shapes along dimension 0."""
        found = self.all_gather_v(x, [len(x)] * self._comm.size)
        if out is None:
            return found
        out[...] = found
        return out

    def all_gather_v(self, x: Array, lengths: Sequence[int]) -> Array:
        """Join arrays of some lengths along dimension 0."""
        row = math.prod(x.shape[1:])
        counts = [length * row for length in lengths]
        came = self._comm.all_gather_v(encode(self._codec, x))
        found = self._decoded(came, counts, x.dtype)
        return found.reshape(sum(lengths), *x.shape[1:])

    def reduce_scatter_v(self, x: Array, lengths: Sequence[int], *, out: Array) -> Array:
        """Add the arrays of all ranks; keep this rank's rows of the sum."""
        row = math.prod(x.shape[1:])
        own = lengths[self._comm.rank] * row
        came = self._exchanged(x.reshape(-1), [length * row for length in lengths], [own] * self._comm.size)
        parts = came.reshape(self._comm.size, own)
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total += part
        out.reshape(-1)[...] = total
        return out

    def all_to_all_v(self, x: Array, splits: Sequence[int], takes: Sequence[int]) -> Array:
        """Send each rank its elements of a 1-D array; return what came."""
        return self._exchanged(x, splits, takes).astype(x.dtype, copy=False)

    def _exchanged(self, x: Array, splits: Sequence[int], takes: Sequence[int]) -> Array:
        cuts = uneven(splits)
        parts = [x[slice(*cuts.slice_of(peer))] for peer in range(self._comm.size)]
        payloads = [encode(self._codec, part) for part in parts]
        came, _ = self._comm.all_to_all_v(np.concatenate(payloads), [len(payload) for payload in payloads])
        return self._decoded(came, takes, np.float32)

    def _decoded(self, payloads: Array, counts: Sequence[int], dtype: Any) -> Array:
        found, start, at = np.empty(sum(counts), dtype), 0, 0
        for count in counts:
            length = self._codec.payload_bytes(count)
            decode(self._codec, payloads[at : at + length], found[start : start + count])
            start, at = start + count, at + length
        return found
