"""AllToAll: reduce payloads that cannot be added in transit, such as casts, quantized values and signs.

    values of rank r       c0    c1    c2       cut into one chunk per rank
    all-to-all             q(c)  q(c)  q(c)     rank i gets chunk i of all ranks, encoded
    reduce                 sum of the decoded chunks, in float32 and in rank order
    all-gather             q(sum 0)  q(sum 1)  q(sum 2)     encoded again; all ranks decode the same bytes

Each value is encoded twice, for any number of ranks, and a rank sends 2(P-1)/P of the payload. A ring sends as much,
but encodes in every hop. Both encodings have error feedback. Source: the compressed all-reduce of 1-bit Adam (Tang et
al. 2021); QSGD's and ZeRO++'s differ in the second half.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.compress.checks import describe_scheme
from commlib.compress.codec import Codec, uses_seed
from commlib.compress.feedback import Residual, add_counter, counter, is_finite
from commlib.compress.flags import count_flags, pack_flags
from commlib.compress.gaps import Gaps
from commlib.compress.memory import Memory
from commlib.compress.scheme import BucketPart, CodecRanks, State
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array
from commlib.observe.journal import journal_of

# Payloads start on a cache line.
_ALIGNMENT = 64

# Chunks of at least this many blocks are cut between blocks; below, uneven chunks cost more than one split block.
_WORTH = 8


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The scheme for codecs of fixed length. feedback: keep residuals; None leaves it to the codec."""

    codec: Codec
    feedback: bool | None = None

    @property
    def name(self) -> str:
        return describe_scheme(self.codec.name, self, AllToAll)

    @property
    def divisible(self) -> bool:
        return True

    def reducer(
        self, comm: CodecRanks, parts: Sequence[BucketPart], *, key: str = "", device: Device = HOST
    ) -> AllToAllReducer:
        """Return the reducer of a bucket with these parts."""
        wanted = self.codec.feedback if self.feedback is None else self.feedback
        return AllToAllReducer(comm, parts, self.codec, wanted, key, Memory(device, comm.watch))


class AllToAllReducer:
    """Reduces one bucket in the three steps above. All arrays are allocated once."""

    def __init__(
        self, comm: CodecRanks, parts: Sequence[BucketPart], codec: Codec, feedback: bool, key: str, memory: Memory
    ) -> None:
        self._comm, self._parts, self._codec, self._memory = comm, tuple(parts), codec, memory
        self._journal = journal_of(comm)
        self._count = max((part.stop for part in parts), default=0)
        step = -(-self._count // comm.size)
        if step >= _WORTH * codec.align:
            step += -step % codec.align
        self._bounds = [min(rank * step, self._count) for rank in range(comm.size + 1)]
        self._room = codec.payload_bytes(step)
        self._key = zlib.crc32(key.encode())
        self._draws, self._has_draws = 0, uses_seed(codec)
        self._length = 0  # of each rank's payload with its flags; the arrays are allocated when it is known
        self._rows: Any = None
        self._arrived: Any = None
        self._gathered: Any = None
        own = self._bounds[comm.rank + 1] - self._bounds[comm.rank]
        self._total = memory.empty(own)
        # The losses of this rank's own values, and of the sum of the chunk that it reduces.
        self._worker = Residual(self._count, memory) if feedback else None
        self._server = Residual(own, memory) if feedback else None
        self._gaps = Gaps(parts, 0, self._count), Gaps(parts, self._bounds[comm.rank], self._bounds[comm.rank + 1])

    @property
    def sent_bytes(self) -> int:
        return 2 * (self._comm.size - 1) * self._length

    def reduce(self, values: Any, flags: Any) -> bool:
        """Replace values and flags by their sums over the ranks. See `Reducer`."""
        comm, codec, bounds, room, memory = self._comm, self._codec, self._bounds, self._room, self._memory
        if comm.size == 1:
            return is_finite(values[: self._count])
        rows = self._buffers(len(flags))
        self._draws += 1
        seed = self._key << 24 ^ self._draws << 12 ^ comm.rank
        with self._journal.span("codec", "encode", codec=codec.name, bytes=rows.nbytes):
            worker = self._stage(self._worker, self._gaps[0])
            bits = memory.here(pack_flags(memory.on_host(flags)[0]))
            for rank, row in enumerate(self._split_rows(rows)):
                start, stop = bounds[rank], bounds[rank + 1]
                residual = None if worker is None else (worker[0][start:stop], worker[1][start:stop])
                codec.encode(values[start:stop], row[:room], seed=seed + start, residual=residual)
                row[room : room + len(bits)] = bits
        shape = comm.size, self._length
        comm.all_to_all(rows.reshape(shape), out=self._arrived.reshape(shape))
        with self._journal.span("codec", "add up", codec=codec.name, bytes=rows.nbytes):
            arrived = self._split_rows(self._arrived)
            for rank, row in enumerate(arrived):
                codec.decode(row[:room], self._total, add=rank > 0)
            all_bits = memory.on_host(*(row[room : room + len(bits)] for row in arrived))
            memory.put(flags, count_flags(all_bits, len(flags)))
            own = rows[: self._length]
            server = self._stage(self._server, self._gaps[1])
            codec.encode(self._total, own[:room], seed=~(seed + bounds[comm.rank]), residual=server)
        comm.all_gather(own, out=self._gathered)
        with self._journal.span("codec", "decode", codec=codec.name, bytes=rows.nbytes):
            for rank, summed in enumerate(self._split_rows(self._gathered)):
                codec.decode(summed[:room], values[bounds[rank] : bounds[rank + 1]])
            memory.wait()
        return is_finite(values[: self._count])

    def _stage(self, residual: Residual | None, gaps: Gaps) -> tuple[Any, Any] | None:
        if residual is None:
            return None
        staged = residual.stage()
        gaps.clear(staged[0], self._memory.kernels)
        return staged

    def commit(self) -> None:
        """Accept the last reduction."""
        for residual in (self._worker, self._server):
            if residual is not None:
                residual.commit()

    def rollback(self) -> None:
        """Undo the last reduction."""
        for residual in (self._worker, self._server):
            if residual is not None:
                residual.rollback()

    def state(self) -> State:
        """Return {"residual": own loss, "residual_of_sum": zeros except in the chunk that this rank reduces}.

        With random codecs, also {"draws": the number of draws}.
        """
        state: State = {}
        if self._worker is not None and self._server is not None:
            state = self._worker.state(self._parts, "residual")
            start = self._bounds[self._comm.rank]
            for name, more in self._server.state(self._parts, "residual_of_sum", start).items():
                state[name].update(more)
        return add_counter(self._parts, "draws", self._draws, state) if self._has_draws else state

    def load(self, state: Mapping[str, Mapping[str, Array]]) -> None:
        """Load the state by parameter names."""
        self._draws = counter(self._parts, "draws", state, self._draws)
        if self._worker is None or self._server is None:
            return
        self._worker.load(self._parts, "residual", state)
        self._server.load(self._parts, "residual_of_sum", state, self._bounds[self._comm.rank])

    def _buffers(self, flags: int) -> Any:
        length = self._room + -(-flags // 8)
        length += -length % _ALIGNMENT
        if self._rows is None or self._length != length:
            count, self._length = self._comm.size * length, length
            self._rows, self._arrived, self._gathered = (self._memory.zeros(count, np.uint8) for _ in range(3))
        return self._rows

    def _split_rows(self, rows: Any) -> list[Any]:
        length = self._length
        return [rows[rank * length : (rank + 1) * length] for rank in range(self._comm.size)]
