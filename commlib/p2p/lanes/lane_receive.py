"""LaneReceive: the request of a receive from a lane."""

from __future__ import annotations

import numpy as np

from commlib.kernels.fields.ring_posts import (
    ARRIVES_ELSEWHERE,
    POSTED_HERE,
)
from commlib.kernels.fields.shm_ring import (
    MOST_TAGS,
)
from commlib.p2p.lanes.receive_pieces import Landed, ReceivePieces
from commlib.p2p.lanes.receiver import RingReceiver
from commlib.transport.base import Request


class LaneReceive:
    """One posted receive of a message of unknown length: a `ProbedReceive`.

    landed: called for each piece of a message in pieces, if the message has the length of `into`.
    """

    by_lane = True
    __slots__ = ("_array", "_has_ended", "_into", "_landed", "_lane", "_number", "_other_way", "nbytes")

    def __init__(self, lane: RingReceiver, tag: int, into: memoryview, landed: Landed | None = None) -> None:
        self._lane, self._into, self._array = lane, into, np.asarray(into)
        self._other_way: Request | None = None
        self._landed = landed
        self._has_ended = False
        self.nbytes = 0
        lane.posted.add(self)
        lane.expect()
        self._number = lane.post(tag, self._array, len(into))

    def test(self) -> bool:
        """Make progress; return True once the message has arrived. Raises TransportError."""
        if not self._has_ended and (self._has_arrived() if self._other_way is None else self._other_way.test()):
            self._end()
        return self._has_ended

    def _has_arrived(self) -> bool:
        lane = self._lane
        if lane.state(self._number) == POSTED_HERE:
            lane.look()
        state = lane.state(self._number)
        if state == POSTED_HERE:
            return False
        nbytes, number = lane.arrival(self._number)
        self.nbytes = nbytes if nbytes <= len(self._into) else -1
        if state != ARRIVES_ELSEWHERE:
            return True
        into = memoryview(bytearray(nbytes)) if self.nbytes < 0 else self._into[:nbytes]
        piece, tag = divmod(number, MOST_TAGS)
        if piece == 0:
            self._other_way = lane.transport.recv(lane.peer, tag, into)
        else:
            landed = self._landed if nbytes == len(self._into) else None
            self._other_way = ReceivePieces(lane.transport, lane.peer, tag, into, piece, landed)
        return self._other_way.test()

    def _end(self) -> None:
        self._has_ended = True
        self._lane.forget(self._number)
        self._lane.posted.discard(self)

    def withdraw(self) -> bool:
        """Withdraw the receive and return True; return False if its message has begun to arrive."""
        if self._has_ended or not self._lane.withdraw(self._number):
            return False
        self._has_ended = True
        self._lane.posted.discard(self)
        return True

    def cancel(self) -> None:
        """Cancel the receive. A message through MPI may still write to its memory, which stays alive."""
        if self._has_ended or self.withdraw():
            return
        if self._other_way is not None:
            self._other_way.cancel()
        self._end()
