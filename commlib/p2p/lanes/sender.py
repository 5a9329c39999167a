"""LaneOut: send to another rank of the node over a lane, in the order of the calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from commlib.buffers.peer_memory import Place
from commlib.buffers.views import address_of
from commlib.kernels.host import arrays, lane_put
from commlib.kernels.host import lane as kernels
from commlib.kernels.host.node import entry_point
from commlib.p2p.channels.node_end import waiting_fields
from commlib.p2p.lanes.keep_alive import Kept
from commlib.p2p.lanes.rings import Rings
from commlib.p2p.lanes.send_pieces import Copied, LeavingPieces
from commlib.transport.base import Request, Transport

put, has_moved = entry_point(lane_put.put, 3), entry_point(kernels.has_moved, 2)
_put_bytes, _announce = entry_point(lane_put.put_bytes, 4), entry_point(lane_put.announce, 4)
go_on, halt = entry_point(kernels.go_on, 6), entry_point(kernels.halt, 2)

# Units of the first ring, and of the largest.
_UNITS, _MOST_UNITS = 4096, 1 << 18

# Messages of so many bytes wait in a ring for their receiver, however many they are; longer ones as long as there is
# room; and those that are longer than that go through MPI, with only their heads in the ring.
_ALWAYS_BYTES, LONGEST_BYTES = 4096, 64 << 10


class Sent:
    """The request of a message that is in the lane: its sender has nothing more to do."""

    by_lane = True
    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def test(self) -> bool:
        return True

    def cancel(self) -> None:
        pass


class LaneOut:
    """The sending end. `transport` moves long messages. Raises TransportError if there is no memory."""

    def __init__(self, transport: Transport, peer: int, rings: Rings, spins: int, *, is_named: bool) -> None:
        self._transport, self._peer, self._rings, self._is_named = transport, peer, rings, is_named
        self._end = np.zeros(kernels.END_FIELDS, np.int64)
        self.at: int = self._end.ctypes.data
        self._end[kernels.SPINS : kernels.NAP_MICROSECONDS + 1] = waiting_fields(spins)
        self._end[kernels.DTYPES], self._end[kernels.LONGEST] = arrays.DTYPES_AT, LONGEST_BYTES
        ring = rings.make(1, _UNITS, is_named=is_named)
        self.first: Place = ring.made.place
        self._kept = Kept()
        self._kept.add(1, ring.address, ring)
        go_on(self.at, 0, ring.address, ring.units, 0, 0)

    def send(self, tag: int, data: memoryview) -> Request:
        """Send bytes, which must stay unchanged until the request is complete. Never waits."""
        nbytes = len(data)
        if nbytes <= LONGEST_BYTES:
            source = np.asarray(data)
            while (status := _put_bytes(self.at, tag, address_of(source), nbytes)) == kernels.FULL:
                if nbytes > _ALWAYS_BYTES:
                    break
                self._grow()
            if status == kernels.DONE:
                return Sent(nbytes)
        return self._transport.send(self._peer, self._announced(tag, nbytes, 0), data)

    def send_in_pieces(self, tag: int, data: memoryview, pieces: Sequence[Copied]) -> Request:
        """Send bytes in pieces, of which all but the last one are as long as the first. Never waits."""
        own_tag = self._announced(tag, len(data), pieces[0].stop)
        return LeavingPieces(self._transport, self._peer, own_tag, data, pieces)

    def _announced(self, tag: int, nbytes: int, piece: int) -> int:
        """Announce a message that goes another way, and return the tag that it has there."""
        while (number := _announce(self.at, tag, nbytes, piece)) == kernels.FULL:
            self._grow()
        return int(number % kernels.MOST_TAGS)

    def _grow(self) -> None:
        """Go on in a larger ring, unless another thread has seen to that."""
        number, units = int(self._end[kernels.RING]), int(self._end[kernels.UNITS])
        ring = self._rings.make(number + 1, min(2 * units, _MOST_UNITS), is_named=self._is_named)
        self._kept.add(ring.number, ring.address, ring)
        text = np.frombuffer(json.dumps(ring.made.place).encode() + b"\0", np.uint8)
        assert len(text) <= kernels.LINK_BYTES
        if go_on(self.at, number, ring.address, ring.units, address_of(text), len(text)) != kernels.DONE:
            self._rings.drop(ring)
            self._kept.drop(ring.address)
        self._kept.drop_before(int(self._end[kernels.RING]))

    def drop(self) -> None:
        """Withdraw what was made for it: no rank was told."""
        self._rings.drop(self._kept.numbered(1))

    def halt(self) -> None:
        """Let `put` send nothing any more."""
        halt(self.at, 1)
