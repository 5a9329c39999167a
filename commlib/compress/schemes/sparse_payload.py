"""Pack the sparse parameters of one bucket into one message, and add up the messages of all ranks.

Every rank gets the payloads of all ranks. If ranks share the indices, an all-reduce adds up the values instead. Small
parameters (called "dense" here) travel uncompressed in the same message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from commlib.compress.codecs.sparse import RandomK
from commlib.compress.feedback import is_finite
from commlib.compress.flags import count_flags, pack_flags
from commlib.compress.memory import Memory
from commlib.compress.scheme import BucketPart, CodecRanks
from commlib.devices.arrays import as_contiguous
from commlib.observe.journal import journal_of


class GatheredPayload:
    """Reduction of one bucket by an all-gather. Layout of a message:

        lengths: of the message and of each payload (int64) | dense parts (float32) | flags (bits) | payloads

    Payloads start at multiples of 8 bytes.
    """

    def __init__(
        self,
        comm: CodecRanks,
        dense: Sequence[BucketPart],
        sparse: Sequence[BucketPart],
        most: Callable[[int], int],
        decode: Callable[..., None],
        memory: Memory,
    ) -> None:
        self._comm, self._dense, self._sparse, self._decode, self._memory = comm, dense, sparse, decode, memory
        self._journal = journal_of(comm)
        self._head = 8 * (1 + len(sparse))
        self._exact = self._head + 4 * sum(part.count for part in dense)
        self._room = sum(_round_up(most(part.count)) for part in sparse)
        self._message = memory.empty(0, np.uint8)  # allocated when the number of flags is known
        self.sent_bytes = 0

    def reduce(self, values: Any, flags: Any, encode: Callable[[int, Any, Any], int]) -> bool:
        """Replace values and flags by their sums. `encode` writes the payload of the i-th sparse part."""
        memory, kernels = self._memory, self._memory.kernels
        bits = self._exact + -(-len(flags) // 8)
        first = _round_up(bits)
        if len(self._message) != first + self._room:
            self._message = memory.zeros(first + self._room, np.uint8)
        message, lengths = self._message, np.zeros(1 + len(self._sparse), np.int64)
        with self._journal.span("codec", "encode", bytes=message.nbytes):
            _pack(values, self._dense, message[self._head : self._exact].view(np.float32))
            memory.put(message[self._exact : bits], pack_flags(*memory.on_host(flags)))
            at = first
            for number, part in enumerate(self._sparse):
                lengths[1 + number] = used = encode(number, values[part.start : part.stop], message[at:])
                at += _round_up(used)
            lengths[0] = at
            memory.put(message[: self._head], lengths.view(np.uint8))
        arrived = as_contiguous(self._comm.all_gather_v(message[:at]), "compression")
        self.sent_bytes = (self._comm.size - 1) * at
        with self._journal.span("codec", "decode", bytes=arrived.nbytes):
            kernels.fill(values, 0)
            total, all_bits, start = memory.zeros((self._exact - self._head) // 4), [], 0
            for _ in range(self._comm.size):
                head, flag_bits = memory.on_host(
                    arrived[start : start + self._head], arrived[start + self._exact : start + bits]
                )
                lengths = head.view(np.int64)
                if len(total):
                    exact = arrived[start + self._head : start + self._exact].view(np.float32)
                    kernels.reduce("float32", "sum", 0, [total, exact], total)
                all_bits.append(flag_bits)
                at = start + first
                for part, length in zip(self._sparse, lengths[1:].tolist(), strict=True):
                    self._decode(arrived[at : at + length], values[part.start : part.stop], add=True)
                    at += _round_up(length)
                start += int(lengths[0])
            memory.put(flags, count_flags(all_bits, len(flags)))
            _unpack(total, self._dense, values)
            memory.wait()
        return is_finite(values)


class SharedIndices:
    """Reduction of one bucket with shared indices: all-reduces flags, dense parts and the chosen values."""

    def __init__(
        self,
        comm: CodecRanks,
        dense: Sequence[BucketPart],
        sparse: Sequence[BucketPart],
        codec: RandomK,
        memory: Memory,
    ) -> None:
        self._comm, self._dense, self._sparse, self._codec, self._memory = comm, dense, sparse, codec, memory
        self._journal = journal_of(comm)
        self._exact = sum(part.count for part in dense)
        self._chosen = sum(codec.sent(part.count) for part in sparse)
        self._buffer = memory.empty(0)  # allocated when the number of flags is known

    @property
    def sent_bytes(self) -> int:
        return round(2 * (self._comm.size - 1) / self._comm.size * int(self._buffer.nbytes))

    def reduce(
        self, values: Any, flags: Any, seeds: Sequence[int], residuals: Sequence[tuple[Any, Any] | None]
    ) -> bool:
        """Replace values and flags by their sums."""
        memory, kernels = self._memory, self._memory.kernels
        exact = len(flags) + self._exact
        if len(self._buffer) != exact + self._chosen:
            self._buffer = memory.empty(exact + self._chosen)
        buffer = self._buffer
        with self._journal.span("codec", "encode", bytes=buffer.nbytes):
            memory.put(buffer[: len(flags)], memory.on_host(flags)[0] > 0)
            _pack(values, self._dense, buffer[len(flags) : exact])
            chosen, at = [], exact
            for part, seed, residual in zip(self._sparse, seeds, residuals, strict=True):
                indices = memory.here(self._codec.choose(part.count, seed))
                piece = buffer[at : at + len(indices)]
                self._codec.take(values[part.start : part.stop], indices, piece, residual)
                chosen.append((part, indices, piece))
                at += len(indices)
        self._comm.all_reduce(buffer, out=buffer)
        with self._journal.span("codec", "decode", bytes=buffer.nbytes):
            kernels.fill(values, 0)
            flags[:] = buffer[: len(flags)]
            _unpack(buffer[len(flags) : exact], self._dense, values)
            for part, indices, piece in chosen:
                kernels.place(piece, indices, values[part.start : part.stop])
            memory.wait()
        return is_finite(buffer)


def _round_up(length: int) -> int:
    return -(-length // 8) * 8


def _pack(values: Any, parts: Sequence[BucketPart], packed: Any) -> None:
    at = 0
    for part in parts:
        packed[at : at + part.count] = values[part.start : part.stop]
        at += part.count


def _unpack(packed: Any, parts: Sequence[BucketPart], values: Any) -> None:
    at = 0
    for part in parts:
        values[part.start : part.stop] = packed[at : at + part.count]
        at += part.count
