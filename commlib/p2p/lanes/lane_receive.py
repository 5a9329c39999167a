"""LaneReceive: post a receive to a lane."""

from __future__ import annotations

import numpy as np

from commlib.kernels.host.lane import MOST_TAGS
from commlib.kernels.host.lane_posts import COMES_ELSEWHERE, POSTED_HERE
from commlib.p2p.lanes.receive_pieces import ArrivingPieces, Landed
from commlib.p2p.lanes.receiver import LaneIn
from commlib.transport.base import Request


class LaneReceive:
    """Post one receive of a message of unknown length: a `ProbedReceive`.

    landed: told of what has come of a message that comes in pieces, if it has the length of `into`.
    """

    by_lane = True
    __slots__ = ("_array", "_has_ended", "_into", "_landed", "_lane", "_number", "_other_way", "nbytes")

    def __init__(self, lane: LaneIn, tag: int, into: memoryview, landed: Landed | None = None) -> None:
        self._lane, self._into, self._array = lane, into, np.asarray(into)
        self._other_way: Request | None = None
        self._landed = landed
        self._has_ended = False
        self.nbytes = 0
        lane.posted.add(self)
        lane.expect()
        self._number = lane.post(tag, self._array, len(into))

    def test(self) -> bool:
        """Make progress; True once the message is there. Raises TransportError."""
        if not self._has_ended and (self._has_come() if self._other_way is None else self._other_way.test()):
            self._end()
        return self._has_ended

    def _has_come(self) -> bool:
        lane = self._lane
        if lane.state(self._number) == POSTED_HERE:
            lane.look()
        state = lane.state(self._number)
        if state == POSTED_HERE:
            return False
        nbytes, number = lane.came(self._number)
        self.nbytes = nbytes if nbytes <= len(self._into) else -1
        if state != COMES_ELSEWHERE:
            return True
        into = memoryview(bytearray(nbytes)) if self.nbytes < 0 else self._into[:nbytes]
        piece, tag = divmod(number, MOST_TAGS)
        if piece == 0:
            self._other_way = lane.transport.recv(lane.peer, tag, into)
        else:
            landed = self._landed if nbytes == len(self._into) else None
            self._other_way = ArrivingPieces(lane.transport, lane.peer, tag, into, piece, landed)
        return self._other_way.test()

    def _end(self) -> None:
        self._has_ended = True
        self._lane.forget(self._number)
        self._lane.posted.discard(self)

    def withdraw(self) -> bool:
        """Take it back, as if it had never been posted, and return True; False if its message has begun to come."""
        if self._has_ended or not self._lane.withdraw(self._number):
            return False
        self._has_ended = True
        self._lane.posted.discard(self)
        return True

    def cancel(self) -> None:
        """Give it up. What comes another way may still come to its memory, which stays."""
        if self._has_ended or self.withdraw():
            return
        if self._other_way is not None:
            self._other_way.cancel()
        self._end()
