"""Wires: send the arrays of moves between ranks, encoded or not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.agreement import digest_of
from commlib.comparison.parameter_check import check_agreement
from commlib.compress.activations import decode, encode
from commlib.compress.codec import Codec
from commlib.dtypes import Array
from commlib.errors import MismatchError, UsageError
from commlib.schedule.layout import even, uneven

_HEADER = 16
"""Bytes of the header of each payload: a digest of the call, and the length of the payload."""


class Wire(Protocol):
    """The verbs that moves need, on contiguous arrays. All ranks have all lengths, so none are exchanged."""

    is_plain: bool
    """Whether arrays are sent without a codec."""

    def all_reduce(self, x: Array, *, out: Array) -> Array: ...

    def all_gather(self, x: Array, *, out: Array | None = None) -> Array: ...

    def all_gather_v(self, x: Array, lengths: Sequence[int]) -> Array: ...

    def reduce_scatter_v(self, x: Array, lengths: Sequence[int], *, out: Array) -> Array: ...

    def all_to_all_v(self, x: Array, splits: Sequence[int], takes: Sequence[int]) -> Array: ...


class PlainWire:
    """Wire without a codec."""

    is_plain = True

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def all_reduce(self, x: Array, *, out: Array) -> Array:
        """Add the arrays of all ranks."""
        result: Array = self._comm.all_reduce(x, out=out)
        return result

    def all_gather(self, x: Array, *, out: Array | None = None) -> Array:
        """Join arrays of equal shapes along dimension 0."""
        result: Array = self._comm.all_gather(x, out=out)
        return result

    def all_gather_v(self, x: Array, lengths: Sequence[int]) -> Array:
        """Join arrays of these lengths along dimension 0."""
        result: Array = self._comm.all_gather_v(x)
        if result.shape[0] != sum(lengths):
            raise MismatchError(
                f"{self._comm.name}: all_gather: {result.shape[0]} rows arrived, but rank {self._comm.rank} "
                f"expected {list(lengths)}"
            )
        return result

    def reduce_scatter_v(self, x: Array, lengths: Sequence[int], *, out: Array) -> Array:
        """Add the arrays of all ranks; keep this rank's rows of the sum."""
        if tuple(lengths) == even(len(x), self._comm.size).counts:
            self._comm.reduce_scatter(x, out=out)
        else:
            self._comm.reduce_scatter_v(x, lengths, out=out)
        return out

    def all_to_all_v(self, x: Array, splits: Sequence[int], takes: Sequence[int]) -> Array:
        """Send each rank its elements of a 1-D array; return the elements received."""
        result: Array
        result, _ = self._comm.all_to_all_v(x, splits, takes=takes)
        return result


class EncodedWire:
    """Wire with a codec of fixed length for floats. Sums are computed in float32, in the order of ranks.

    A payload has a header that identifies its rank's call. Without it, a rank with another codec or shape would decode
    the bytes to wrong numbers.
    """

    is_plain = False

    def __init__(self, comm: Communicator, codec: Codec) -> None:
        if not codec.fixed:
            raise UsageError(f"{codec.name}: the payload of an activation needs a fixed length: try bf16, int8 or fp8")
        self._comm, self._codec = comm, codec

    def all_reduce(self, x: Array, *, out: Array) -> Array:
        """Add the arrays of all ranks: every rank decodes the same bytes."""
        flat = x.reshape(-1)
        shares = even(flat.size, self._comm.size).counts
        own = np.empty(shares[self._comm.rank], np.float32)
        self._add(flat, shares, own, self._lines("all_reduce", x, x.shape))
        lines = self._lines("all_reduce, second part", own, shares)
        out.reshape(-1)[...] = self._gather(own, shares, lines)
        return out

    def all_gather(self, x: Array, *, out: Array | None = None) -> Array:
        """Join arrays of equal shapes along dimension 0."""
        result = self.all_gather_v(x, [len(x)] * self._comm.size)
        if out is None:
            return result
        out[...] = result
        return out

    def all_gather_v(self, x: Array, lengths: Sequence[int]) -> Array:
        """Join arrays of these lengths along dimension 0."""
        row = math.prod(x.shape[1:])
        lines = self._lines("all_gather", x, (tuple(lengths), *x.shape[1:]))
        result = self._gather(x, [length * row for length in lengths], lines)
        return result.reshape(sum(lengths), *x.shape[1:])

    def reduce_scatter_v(self, x: Array, lengths: Sequence[int], *, out: Array) -> Array:
        """Add the arrays of all ranks; keep this rank's rows of the sum."""
        row = math.prod(x.shape[1:])
        lines = self._lines("reduce_scatter", x, (tuple(lengths), *x.shape[1:]))
        return self._add(x.reshape(-1), [length * row for length in lengths], out, lines)

    def all_to_all_v(self, x: Array, splits: Sequence[int], takes: Sequence[int]) -> Array:
        """Send each rank its elements of a 1-D array; return the elements received."""
        return self._exchange(x, splits, takes, self._lines("all_to_all", x, "")).astype(x.dtype, copy=False)

    def _lines(self, verb: str, x: Array, shape: object) -> list[str]:
        return [verb, f"codec: {self._codec.name}", f"dtype: {x.dtype}", f"shape: {shape}"]

    def _add(self, x: Array, counts: Sequence[int], out: Array, lines: list[str]) -> Array:
        own = counts[self._comm.rank]
        parts = self._exchange(x, counts, [own] * self._comm.size, lines).reshape(self._comm.size, own)
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total += part
        out.reshape(-1)[...] = total
        return out

    def _gather(self, x: Array, counts: Sequence[int], lines: list[str]) -> Array:
        return self._decode(self._comm.all_gather_v(self._encode(x, lines)), counts, x.dtype, lines)

    def _exchange(self, x: Array, splits: Sequence[int], takes: Sequence[int], lines: list[str]) -> Array:
        cuts = uneven(splits)
        parts = [x[slice(*cuts.slice_of(peer))] for peer in range(self._comm.size)]
        payloads = [self._encode(part, lines) for part in parts]
        received, _ = self._comm.all_to_all_v(np.concatenate(payloads), [len(payload) for payload in payloads])
        return self._decode(received, takes, np.float32, lines)

    def _encode(self, x: Array, lines: list[str]) -> Array:
        payload = encode(self._codec, x)
        return np.concatenate([np.array([digest_of(lines), len(payload)], np.int64).view(np.uint8), payload])

    def _decode(self, received: Array, counts: Sequence[int], dtype: Any, lines: list[str]) -> Array:
        """Return the values that payloads decode to. Every rank sees all headers, so all raise if one differs."""
        payloads, digests = list[Array](), set[int]()
        while len(received):
            digest, length = received[:_HEADER].copy().view(np.int64).tolist()
            digests.add(digest)
            payloads.append(received[_HEADER : _HEADER + length])
            received = received[_HEADER + length :]
        if len(digests) > 1:
            check_agreement(self._comm, f"{self._comm.name}: {lines[0]}", lines)
        needed = [self._codec.payload_bytes(count) for count in counts]
        sizes = [len(payload) for payload in payloads]
        if sizes != needed:
            raise MismatchError(
                f"{self._comm.name}: {lines[0]}: ranks 0, 1, ... sent {sizes} bytes to rank {self._comm.rank}, which "
                f"expected {needed}: their shapes differ"
            )
        result, start = np.empty(sum(counts), dtype), 0
        for count, payload in zip(counts, payloads, strict=True):
            decode(self._codec, payload, result[start : start + count])
            start += count
        return result
