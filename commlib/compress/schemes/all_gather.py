"""AllGather: reduce sparse payloads. Their lengths and indices differ from rank to rank.

Every rank sends one message, in one all-gather, and decodes the messages of all ranks in rank order; so all have the
same bits. Bytes grow with the number of ranks P: P - 1 messages come in, where a ring would bring 2(P-1)/P arrays, so
it pays while ratio times P is small. Where all ranks draw the same indices, only the values travel, and an all-reduce
adds them up on the way. Source: Strom 2015; Stich et al. 2018.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from commlib.compress.checks import with_options
from commlib.compress.codec import Codec, draws
from commlib.compress.codecs.sparse import RandomK
from commlib.compress.feedback import Residual, add_counter, counter, is_finite
from commlib.compress.memory import Memory
from commlib.compress.scheme import Comm, Part, State
from commlib.compress.schemes.sparse_payload import GatheredPayload, SharedIndices
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array

DENSE_BELOW = 1024
"""Elements: smaller parameters travel as they are. Biases and norms; they are few bytes, and matter."""


@dataclass(frozen=True, slots=True)
class AllGather:
    """The scheme for codecs of varying length, such as TopK and RandomK. Each parameter is encoded by itself.

    feedback: keep residuals; None leaves it to the codec. dense_below: parameters with fewer elements travel as they
    are, in the same message.
    """

    codec: Codec
    feedback: bool | None = None
    dense_below: int = DENSE_BELOW

    @property
    def name(self) -> str:
        return with_options(self.codec.name, self, AllGather)

    @property
    def divisible(self) -> bool:
        return True

    @property
    def wants_feedback(self) -> bool:
        """Whether residuals are kept."""
        return self.codec.feedback if self.feedback is None else self.feedback

    def reducer(self, comm: Comm, parts: Sequence[Part], *, key: str = "", device: Device = HOST) -> AllGatherReducer:
        """Return the reducer of a bucket with these parts."""
        return AllGatherReducer(comm, parts, self, key, Memory(device, comm.watch))


class AllGatherReducer:
    """Reduces one bucket, by messages or, if all ranks draw the same indices, by an all-reduce of the values there."""

    def __init__(self, comm: Comm, parts: Sequence[Part], scheme: AllGather, key: str, memory: Memory) -> None:
        codec = scheme.codec
        self._comm, self._codec = comm, codec
        self._count = max((part.stop for part in parts), default=0)
        self._sparse = [part for part in parts if part.count >= scheme.dense_below]
        dense = [part for part in parts if part.count < scheme.dense_below]
        self._residual = Residual(self._count, memory) if scheme.wants_feedback else None
        self._seeds = [zlib.crc32(f"{key}/{part.name}".encode()) << 24 for part in self._sparse]
        self._draws = 0  # of steps that were skipped too: all ranks count alike, also those that cannot know
        self._has_draws = draws(codec)
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
        """Let the last reduction count."""
        if self._residual is not None:
            self._residual.commit()

    def rollback(self) -> None:
        """Let the last reduction count as not done."""
        if self._residual is not None:
            self._residual.rollback()

    def state(self) -> State:
        """Return {"residual": what this rank has not sent yet} of the parameters that are encoded.

        Where chance plays a role, also {"draws": how often there was one}.
        """
        state = {} if self._residual is None else self._residual.state(self._sparse, "residual")
        return add_counter(self._sparse, "draws", self._draws, state) if self._has_draws else state

    def load(self, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Take over what is known by parameter names."""
        self._draws = counter(self._sparse, "draws", state, self._draws)
        if self._residual is not None:
            self._residual.commit()
            self._residual.load(self._sparse, "residual", state)
