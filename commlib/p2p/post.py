"""Post: send messages to each rank of a group, by lanes within this node and through MPI to the others.

A lane is made by the first message that is sent in its direction. Its sender does not wait: it writes, and tells the
receiver by a letter where. So all messages between two ranks of a node go by lanes, from the first message on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from commlib.errors import ShutdownError
from commlib.p2p.lanes.loading import load
from commlib.p2p.lanes.rings import Rings
from commlib.p2p.letters import Letters
from commlib.p2p.mailbox import Address
from commlib.transport.base import ProbedReceive, Request, WaitHook
from commlib.transport.polling import poll

if TYPE_CHECKING:
    from commlib.group.group import Group
    from commlib.p2p.lanes.receive_pieces import Landed
    from commlib.p2p.lanes.receiver import LaneIn
    from commlib.p2p.lanes.send_pieces import Copied
    from commlib.p2p.lanes.sender import LaneOut


def is_by_lane(request: Request) -> bool:
    """Return whether a request is one of a lane's, whose memory MPI does not know."""
    return getattr(request, "by_lane", False)


def have_moved(requests: Sequence[Request]) -> bool:
    """Return whether all are complete. All are asked: one that leaves in pieces makes progress by that alone."""
    complete = True
    for request in requests:
        complete &= request.test()
    return complete


class Post:
    """The messages of one rank in a group. Costs nothing until the first."""

    def __init__(self, group: Group, letters: Letters) -> None:
        self._group, self._letters, self._transport = weakref.ref(group), letters, group.p2p
        self._journal = group.journal
        self._out: dict[int, LaneOut] = {}
        self._in: dict[int, LaneIn] = {}
        # Of those, what compiled calls need: the addresses of their ends, by peer.
        self._ways_out: dict[int, int] = {}
        self._ways_in: dict[int, int] = {}
        self._put: Callable[[int, int, int], int]  # there when there is a lane
        self._take: Callable[[int, int, int], int]
        self._has_moved: Callable[[int, int], int]
        self._rings: Rings | None = None
        self._has_left = False

    # What a small message mostly needs: one compiled call

    def send_now(self, x: Any, peer: int, tag: int) -> bool:
        """Send an array if that is done at once; False if not, or if there is anything unusual about it."""
        if type(x) is not ndarray or type(peer) is not int or type(tag) is not int:
            return False
        if (way := self._ways_out.get(peer)) is None or self._journal.recorder is not None:
            return False
        try:
            return not self._put(way, id(x), tag)
        except BaseException as error:
            self._abandon(way, x, f"send to rank {peer}, tag {tag}", error)
            raise

    def recv_now(self, x: Any, peer: int, tag: int) -> bool:
        """Receive into an array if the message is there soon; False if not, or if anything is unusual."""
        if type(x) is not ndarray or type(peer) is not int or type(tag) is not int:
            return False
        if (way := self._ways_in.get(peer)) is None or self._journal.recorder is not None:
            return False
        try:
            return not self._take(way, id(x), tag)
        except BaseException as error:
            self._abandon(way, x, f"recv from rank {peer}, tag {tag}", error)
            raise

    def can_recv(self, x: Any, peer: int) -> bool:
        """Return whether `recv_now` may be tried: a call that sends before must know."""
        return type(x) is ndarray and type(peer) is int and peer in self._ways_in and bool(x.flags.carray)

    def _abandon(self, way: int, x: Any, text: str, error: BaseException) -> None:
        """Let the group fail if a message has moved: its caller does not know that it has."""
        group = self._group()
        if self._has_moved(way, id(x)) and group is not None:
            group.abandon(text, error)

    # What every message can have: requests

    def takes(self, peer: int, device: str) -> bool:
        """Return whether `send` and `recv` take a device's memory as it is: not where lanes go, through the host's."""
        return self._transport.accepts(device) and not self.has_lane(peer)

    def send(self, peer: int, tag: int, data: Any) -> Request:
        """Post a send of bytes, which must stay unchanged until the request is complete.

        data: a memoryview, or a Buffer of a device that `takes` allows; nothing queued may still write it.
        """
        if not self.has_lane(peer):
            return self._transport.send(peer, tag, data)
        return self._lane_out(peer).send(int(tag), data)

    def send_in_pieces(self, peer: int, tag: int, data: memoryview, pieces: Sequence[Copied]) -> Request:
        """Post a send of bytes that come to be piece by piece, to a rank to which there is a lane."""
        return self._lane_out(peer).send_in_pieces(int(tag), data, pieces)

    def recv(self, peer: int, tag: int, into: Any, landed: Landed | None = None) -> ProbedReceive:
        """Post a receive of a message that may be longer: it is then dropped, and `nbytes` is -1.

        landed: told of what has come of a message of the right length, where it comes in pieces.
        """
        if not self.has_lane(peer):
            return self._transport.recv_probed(peer, tag, into)
        from commlib.p2p.lanes.lane_receive import LaneReceive

        return LaneReceive(self._lane_in(peer), int(tag), into, landed)

    def wait(self, requests: Sequence[Request], on_wait: WaitHook) -> None:
        """Block until all are complete, calling `on_wait` now and then."""
        if not any(is_by_lane(request) for request in requests):
            self._transport.wait(requests, on_wait)
            return
        lanes, progress = list(self._in.values()), self._transport.progress

        def done() -> bool:
            if have_moved(requests):
                return True
            progress()  # of what goes through MPI, of the user's own too
            return False

        def look() -> None:
            on_wait()
            for lane in lanes:
                lane.ask()

        poll(done, look)

    def has_lane(self, peer: int) -> bool:
        """Return whether messages to and from a rank go by lanes: it is another one of this node."""
        group = self._group()
        assert group is not None
        return group.config.node_path and peer != group.rank and peer in group.hierarchy.ranks

    def _lane_out(self, peer: int) -> LaneOut:
        self._refuse_the_end()
        if (lane := self._out.get(peer)) is None:
            group, mailbox = self._begin()
            from commlib.p2p.lanes.receiver import LETTER
            from commlib.p2p.lanes.sender import LaneOut, has_moved, put

            self._put, self._has_moved = put, has_moved
            assert self._rings is not None
            made = LaneOut(self._transport, peer, self._rings, group.runtime.spins, is_named=group.named_memory)
            lane = self._out.setdefault(peer, made)
            if lane is made:
                mailbox.post(Address(peer, "", 0), LETTER, place=made.first)
                self._ways_out[int(peer)] = made.at
            else:  # another thread was faster
                made.drop()
        return lane

    def _lane_in(self, peer: int) -> LaneIn:
        self._refuse_the_end()
        if (lane := self._in.get(peer)) is None:
            group, mailbox = self._begin()
            from commlib.p2p.lanes.receiver import LaneIn, take
            from commlib.p2p.lanes.sender import has_moved

            self._take, self._has_moved = take, has_moved
            lane = self._in.setdefault(peer, LaneIn(self._transport, mailbox, peer, group.runtime.spins))
            self._ways_in[int(peer)] = lane.at
        return lane

    def _begin(self) -> tuple[Group, Any]:
        group = self._group()
        assert group is not None
        load()
        if self._rings is None:
            rings = Rings()
            group.end_with(rings)
            self._rings = rings
        return group, self._letters.mailbox

    # The end

    def _refuse_the_end(self) -> None:
        if self._has_left:
            raise ShutdownError("this group sends and receives nothing more: it was closed, or commlib was shut down")

    def halt(self) -> None:
        """Let no compiled call move anything, as in a forked child."""
        for outgoing in list(self._out.values()):
            outgoing.halt()
        for incoming in list(self._in.values()):
            incoming.halt()

    def leave(self, reason: str) -> None:
        """Send nothing more. What was sent can still be received, until all ranks have dropped the group."""
        self._has_left = True
        self.halt()

    def close(self) -> None:
        """Give everything back. Only when no rank uses it any more."""
        self.leave("")
        if self._rings is not None:
            self._rings.close()
