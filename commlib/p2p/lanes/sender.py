"""Ring sender: the sending end of a lane to another rank of the node, in the order of the calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from commlib.buffers.peer_memory import MemoryPlace
from commlib.buffers.views import address_of
from commlib.kernels.fields import arrays
from commlib.kernels.fields import shm_ring as kernels
from commlib.kernels.machine_code import entry_point
from commlib.p2p.channels.node_end import waiting_fields
from commlib.p2p.lanes.keep_alive import KeepAlive
from commlib.p2p.lanes.rings import RingRegistry
from commlib.p2p.lanes.send_pieces import CopiedPiece, SendPieces
from commlib.transport.base import Request, Transport

put, has_moved = entry_point("ring_put.put", 3), entry_point("shm_ring.has_moved", 2)
_put_bytes, _announce = entry_point("ring_put.put_bytes", 4), entry_point("ring_put.announce", 4)
go_on, halt = entry_point("shm_ring.follow_ring", 6), entry_point("shm_ring.halt", 2)

# Units of the first ring and of the largest ring.
_UNITS, _MOST_UNITS = 4096, 1 << 18

# Messages up to _ALWAYS_BYTES always go into the ring, which grows for them. Messages up to LONGEST_BYTES go into the
# ring while there is room. All other messages go through MPI, with only a header in the ring.
_ALWAYS_BYTES, LONGEST_BYTES = 4096, 64 << 10


class CompletedSend:
    """The completed request of a message that is in the ring."""

    by_lane = True
    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def test(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


class RingSender:
    """The sending end of a lane. `transport` moves long messages. Raises TransportError if there is no memory."""

    def __init__(self, transport: Transport, peer: int, rings: RingRegistry, spins: int, *, is_named: bool) -> None:
        self._transport, self._peer, self._rings, self._is_named = transport, peer, rings, is_named
        self._end = np.zeros(kernels.END_FIELDS, np.int64)
        self.at: int = self._end.ctypes.data
        self._end[kernels.SPINS : kernels.NAP_MICROSECONDS + 1] = waiting_fields(spins)
        self._end[kernels.DTYPES], self._end[kernels.LONGEST] = arrays.DTYPES_AT, LONGEST_BYTES
        ring = rings.make(1, _UNITS, is_named=is_named)
        self.first: MemoryPlace = ring.peer_memory.place
        self._keep_alive = KeepAlive()
        self._keep_alive.add(1, ring.address, ring)
        go_on(self.at, 0, ring.address, ring.units, 0, 0)

    def send(self, tag: int, data: memoryview) -> Request:
        """Send bytes, which must not change until the request is complete. Never waits."""
        nbytes = len(data)
        if nbytes <= LONGEST_BYTES:
            source = np.asarray(data)
            while (status := _put_bytes(self.at, tag, address_of(source), nbytes)) == kernels.FULL:
                if nbytes > _ALWAYS_BYTES:
                    break
                self._grow()
            if status == kernels.DONE:
                return CompletedSend(nbytes)
        return self._transport.send(self._peer, self._announced(tag, nbytes, 0), data)

    def send_in_pieces(self, tag: int, data: memoryview, pieces: Sequence[CopiedPiece]) -> Request:
        """Send bytes in pieces; all pieces but the last have the length of the first. Never waits."""
        own_tag = self._announced(tag, len(data), pieces[0].stop)
        return SendPieces(self._transport, self._peer, own_tag, data, pieces)

    def _announced(self, tag: int, nbytes: int, piece: int) -> int:
        """Announce a message that goes through MPI; return its MPI tag."""
        while (number := _announce(self.at, tag, nbytes, piece)) == kernels.FULL:
            self._grow()
        return int(number % kernels.MOST_TAGS)

    def _grow(self) -> None:
        """Continue in a larger ring, unless another thread has done it already."""
        number, units = int(self._end[kernels.RING]), int(self._end[kernels.UNITS])
        ring = self._rings.make(number + 1, min(2 * units, _MOST_UNITS), is_named=self._is_named)
        self._keep_alive.add(ring.number, ring.address, ring)
        text = np.frombuffer(json.dumps(ring.peer_memory.place).encode() + b"\0", np.uint8)
        assert len(text) <= kernels.LINK_BYTES
        if go_on(self.at, number, ring.address, ring.units, address_of(text), len(text)) != kernels.DONE:
            self._rings.drop(ring)
            self._keep_alive.drop(ring.address)
        self._keep_alive.drop_before(int(self._end[kernels.RING]))

    def drop(self) -> None:
        """Withdraw the first ring. The receiver has not been notified of it."""
        self._rings.drop(self._keep_alive.numbered(1))

    def halt(self) -> None:
        """Stop `put` for good."""
        halt(self.at, 1)
