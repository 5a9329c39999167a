"""What travels of one bucket whose parameters are sparse: payloads that all ranks get, or values at common places.

Parameters that are small ("dense" here) travel with it as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from commlib.compress.feedback import is_finite
from commlib.compress.scheme import Lane, Part
from commlib.compress.sparse import RandomK
from commlib.dtypes import Array


class Messages:
    """The all-gather of one bucket.

    lengths: of the message and of each payload (int64) | dense parts (float32) | flags (bits) | payloads

    Payloads start at multiples of 8 bytes.
    """

    def __init__(
        self,
        lane: Lane,
        dense: Sequence[Part],
        sparse: Sequence[Part],
        most: Callable[[int], int],
        decode: Callable[..., None],
    ) -> None:
        self._lane, self._dense, self._sparse, self._decode = lane, dense, sparse, decode
        self._head = 8 * (1 + len(sparse))
        self._exact = self._head + 4 * sum(part.count for part in dense)
        self._room = sum(_up(most(part.count)) for part in sparse)
        self._message = np.empty(0, np.uint8)  # made when the number of flags is known
        self.sent_bytes = 0

    def reduce(self, values: Array, flags: Array, encode: Callable[[int, Array, Array], int]) -> bool:
        """Replace values and flags by their sums. `encode` writes the payload of the i-th sparse part to the room."""
        bits = self._exact + -(-len(flags) // 8)
        first = _up(bits)
        if len(self._message) != first + self._room:
            self._message = np.zeros(first + self._room, np.uint8)
        message = self._message
        lengths, exact = message[: self._head].view(np.int64), message[self._head : self._exact].view(np.float32)
        _pack(values, self._dense, exact)
        message[self._exact : bits] = np.packbits(flags > 0)
        at = first
        for number, part in enumerate(self._sparse):
            lengths[1 + number] = used = encode(number, values[part.start : part.stop], message[at:])
            at += _up(used)
        lengths[0] = at
        arrived = self._lane.all_gather_v(message[:at])
        self.sent_bytes = (self._lane.size - 1) * at
        values[:] = 0
        flags[:] = 0
        total, start = np.zeros_like(exact), 0
        for _ in range(self._lane.size):
            lengths = arrived[start : start + self._head].view(np.int64)
            total += arrived[start + self._head : start + self._exact].view(np.float32)
            flags += np.unpackbits(arrived[start + self._exact : start + bits], count=len(flags))
            at = start + first
            for part, length in zip(self._sparse, lengths[1:].tolist(), strict=True):
                self._decode(arrived[at : at + length], values[part.start : part.stop], add=True)
                at += _up(length)
            start += int(lengths[0])
        _unpack(total, self._dense, values)
        return is_finite(values)


class Values:
    """The all-reduce of one bucket whose places are the same on all ranks: flags, dense parts, what is chosen."""

    def __init__(self, lane: Lane, dense: Sequence[Part], sparse: Sequence[Part], codec: RandomK) -> None:
        self._lane, self._dense, self._sparse, self._codec = lane, dense, sparse, codec
        self._exact = sum(part.count for part in dense)
        self._chosen = sum(codec.sent(part.count) for part in sparse)
        self._buffer = np.empty(0, np.float32)  # made when the number of flags is known

    @property
    def sent_bytes(self) -> int:
        return round(2 * (self._lane.size - 1) / self._lane.size * self._buffer.nbytes)

    def reduce(
        self, values: Array, flags: Array, seeds: Sequence[int], residuals: Sequence[tuple[Array, Array] | None]
    ) -> bool:
        """Replace values and flags by their sums."""
        exact = len(flags) + self._exact
        if len(self._buffer) != exact + self._chosen:
            self._buffer = np.empty(exact + self._chosen, np.float32)
        buffer = self._buffer
        buffer[: len(flags)] = flags > 0
        _pack(values, self._dense, buffer[len(flags) : exact])
        chosen, at = [], exact
        for part, seed, residual in zip(self._sparse, seeds, residuals, strict=True):
            places = self._codec.choose(part.count, seed)
            piece = buffer[at : at + len(places)]
            self._codec.take(values[part.start : part.stop], places, piece, residual)
            chosen.append((part, places, piece))
            at += len(places)
        self._lane.all_reduce(buffer, out=buffer)
        values[:] = 0
        flags[:] = buffer[: len(flags)]
        _unpack(buffer[len(flags) : exact], self._dense, values)
        for part, places, piece in chosen:
            values[part.start : part.stop][places] = piece
        return is_finite(buffer)


def _up(length: int) -> int:
    return -(-length // 8) * 8


def _pack(values: Array, parts: Sequence[Part], packed: Array) -> None:
    at = 0
    for part in parts:
        packed[at : at + part.count] = values[part.start : part.stop]
        at += part.count


def _unpack(packed: Array, parts: Sequence[Part], values: Array) -> None:
    at = 0
    for part in parts:
        values[part.start : part.stop] = packed[at : at + part.count]
        at += part.count
