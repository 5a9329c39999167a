"""AllGather: reduce sparse payloads, whose lengths and indices differ between ranks.

All ranks exchange their messages in one all-gather and decode them in rank order, so all get the same bits. Traffic
grows with the number of ranks P: a rank receives P - 1 messages, where a ring would bring 2(P-1)/P arrays. The scheme
pays while ratio times P is small. If all ranks draw the same indices, only the values travel, and an all-reduce adds
them up. Source: Strom 2015; Stich et al. 2018.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.compress.checks import describe_scheme
from commlib.compress.codec import Codec, uses_seed
from commlib.compress.codecs.sparse import RandomK
from commlib.compress.feedback import Residual, add_counter, counter, is_finite
from commlib.compress.memory import Memory
from commlib.compress.scheme import BucketPart, CodecRanks, State
from commlib.compress.schemes.sparse_payload import GatheredPayload, SharedIndices
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array

DENSE_BELOW = 1024
"""Elements: smaller parameters, such as biases and norms, travel uncompressed. They take few bytes, and matter."""


@dataclass(frozen=True, slots=True)
class AllGather:
    """The scheme for codecs of varying length, such as TopK and RandomK. Each parameter is encoded separately.

    feedback: keep residuals; None leaves it to the codec. dense_below: parameters with fewer elements travel
    uncompressed, in the same message.
    """

    codec: Codec
    feedback: bool | None = None
    dense_below: int = DENSE_BELOW

    @property
    def name(self) -> str:
        return describe_scheme(self.codec.name, self, AllGather)

    @property
    def divisible(self) -> bool:
        return True

    @property
    def uses_feedback(self) -> bool:
        """Whether residuals are kept."""
        return self.codec.feedback if self.feedback is None else self.feedback

    def reducer(
        self, comm: CodecRanks, parts: Sequence[BucketPart], *, key: str = "", device: Device = HOST
    ) -> AllGatherReducer:
        """Return the reducer of a bucket with these parts."""
        return AllGatherReducer(comm, parts, self, key, Memory(device, comm.watch))


class AllGatherReducer:
    """Reduces one bucket by gathered messages, or by an all-reduce of values with shared indices."""

    def __init__(
        self, comm: CodecRanks, parts: Sequence[BucketPart], scheme: AllGather, key: str, memory: Memory
    ) -> None:
        codec = scheme.codec
        self._comm, self._codec = comm, codec
        self._count = max((part.stop for part in parts), default=0)
        self._sparse = [part for part in parts if part.count >= scheme.dense_below]
        dense = [part for part in parts if part.count < scheme.dense_below]
        self._residual = Residual(self._count, memory) if scheme.uses_feedback else None
        self._seeds = [zlib.crc32(f"{key}/{part.name}".encode()) << 24 for part in self._sparse]
        self._draws = 0  # skipped steps count too: every rank counts the same, even if it does not know of a skip
        self._has_draws = uses_seed(codec)
        if isinstance(codec, RandomK):
            self._shared: SharedIndices | None = SharedIndices(comm, dense, self._sparse, codec, memory)
        else:
            self._shared = None
            self._payload = GatheredPayload(comm, dense, self._sparse, codec.payload_bytes, codec.decode, memory)

    @property
    def sent_bytes(self) -> int:
        return (self._payload if self._shared is None else self._shared).sent_bytes

    def reduce(self, values: Any, flags: Any) -> bool:
        """Replace values and flags by their sums over the ranks. See `Reducer`."""
        if self._comm.size == 1:
            return is_finite(values[: self._count])
        self._draws += 1
        seeds = [seed + self._draws for seed in self._seeds]
        residual = None if self._residual is None else self._residual.stage()
        pieces = [
            None if residual is None else (residual[0][part.start : part.stop], residual[1][part.start : part.stop])
            for part in self._sparse
        ]
        if self._shared is not None:
            return self._shared.reduce(values, flags, seeds, pieces)

        def encode(number: int, x: Any, room: Any) -> int:
            return self._codec.encode(x, room, seed=seeds[number], residual=pieces[number])

        return self._payload.reduce(values, flags, encode)

    def commit(self) -> None:
        """Accept the last reduction."""
        if self._residual is not None:
            self._residual.commit()

    def rollback(self) -> None:
        """Undo the last reduction."""
        if self._residual is not None:
            self._residual.rollback()

    def state(self) -> State:
        """Return {"residual": this rank's unsent values} of the parameters that are encoded.

        With random codecs, also {"draws": the number of draws}.
        """
        state = {} if self._residual is None else self._residual.state(self._sparse, "residual")
        return add_counter(self._sparse, "draws", self._draws, state) if self._has_draws else state

    def load(self, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Load the state by parameter names."""
        self._draws = counter(self._sparse, "draws", state, self._draws)
        if self._residual is not None:
            self._residual.commit()
            self._residual.load(self._sparse, "residual", state)
