"""Messenger: send messages to the ranks of a group, over lanes within the node and through MPI between nodes.

The first message in a direction makes its lane. The sender does not wait: it writes to the lane and notifies the
receiver by a control message. So all messages between two ranks of a node use lanes, from the first message on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from numpy import ndarray

from commlib.errors import ShutdownError
from commlib.p2p.lanes.loading import load
from commlib.p2p.lanes.rings import RingRegistry
from commlib.p2p.rendezvous import Address, RendezvousOwner
from commlib.transport.base import ProbedReceive, Request, Space, WaitHook
from commlib.transport.polling import poll

if TYPE_CHECKING:
    from commlib.group.group import Group
    from commlib.p2p.lanes.receive_pieces import Landed
    from commlib.p2p.lanes.receiver import RingReceiver
    from commlib.p2p.lanes.send_pieces import CopiedPiece
    from commlib.p2p.lanes.sender import RingSender


def is_by_lane(request: Request) -> bool:
    """Return whether a request belongs to a lane. MPI cannot wait for such a request."""
    return getattr(request, "by_lane", False)


def test_all(requests: Sequence[Request]) -> bool:
    """Return whether all requests are complete. Test every one: a send in pieces progresses only in `test`."""
    complete = True
    for request in requests:
        complete &= request.test()
    return complete


class Messenger:
    """The messages of one rank in a group. Costs nothing until the first message."""

    def __init__(self, group: Group, letters: RendezvousOwner) -> None:
        self._group, self._letters, self._transport = group, letters, group.transport.space(Space.MESSAGES)
        self._journal = group.progress.journal
        self._lane_peers = {*group.hierarchy.ranks} - {group.rank} if group.config.node_path else set[int]()
        self._out: dict[int, RingSender] = {}
        self._in: dict[int, RingReceiver] = {}
        # The addresses of the lanes' ends for compiled calls, by peer.
        self._out_addresses: dict[int, int] = {}
        self._in_addresses: dict[int, int] = {}
        self._put: Callable[[int, int, int], int]  # set with the first lane
        self._take: Callable[[int, int, int], int]
        self._has_moved: Callable[[int, int], int]
        self._rings: RingRegistry | None = None
        self._has_left = False

    # Small messages: one compiled call

    def send_now(self, x: Any, peer: int, tag: int) -> bool:
        """Send a plain array if this needs no wait; return False otherwise, without sending."""
        if type(x) is not ndarray or type(peer) is not int or type(tag) is not int:
            return False
        if (address := self._out_addresses.get(peer)) is None or self._journal.recorder is not None:
            return False
        try:
            return not self._put(address, id(x), tag)
        except BaseException as error:
            self._abandon(address, x, f"send to rank {peer}, tag {tag}", error)
            raise

    def recv_now(self, x: Any, peer: int, tag: int) -> bool:
        """Receive into a plain array if the message arrives soon; return False otherwise."""
        if type(x) is not ndarray or type(peer) is not int or type(tag) is not int:
            return False
        if (address := self._in_addresses.get(peer)) is None or self._journal.recorder is not None:
            return False
        try:
            return not self._take(address, id(x), tag)
        except BaseException as error:
            self._abandon(address, x, f"recv from rank {peer}, tag {tag}", error)
            raise

    def can_recv(self, x: Any, peer: int) -> bool:
        """Return whether `recv_now` is possible. `exchange` must check this before it sends."""
        return type(x) is ndarray and type(peer) is int and peer in self._in_addresses and bool(x.flags.carray)

    def _abandon(self, address: int, x: Any, text: str, error: BaseException) -> None:
        """Fail the group if the interrupted call has moved its message, which the caller cannot see."""
        if self._has_moved(address, id(x)):
            self._group.abandon(text, error)

    # All other messages: requests

    def takes(self, peer: int, device: str) -> bool:
        """Return whether `send` and `recv` accept device memory for a peer. Lanes accept only host memory."""
        return self._transport.accepts(device) and not self.has_lane(peer)

    def send(self, peer: int, tag: int, data: Any) -> Request:
        """Post a send of bytes, which must not change until the request is complete.

        data: a memoryview, or a device Buffer if `takes` allows it; no queued work may still write it.
        """
        if not self.has_lane(peer):
            return self._transport.send(peer, tag, data)
        return self._lane_out(peer).send(int(tag), data)

    def send_in_pieces(self, peer: int, tag: int, data: memoryview, pieces: Sequence[CopiedPiece]) -> Request:
        """Post a send of bytes that become ready piece by piece. The peer must have a lane."""
        return self._lane_out(peer).send_in_pieces(int(tag), data, pieces)

    def recv(self, peer: int, tag: int, into: Any, landed: Landed | None = None) -> ProbedReceive:
        """Post a receive. A message longer than `into` is dropped, and the request's `nbytes` is -1.

        landed: called for each piece, if a message of the expected length arrives in pieces.
        """
        if not self.has_lane(peer):
            return self._transport.recv_probed(peer, tag, into)
        from commlib.p2p.lanes.lane_receive import LaneReceive

        return LaneReceive(self._lane_in(peer), int(tag), into, landed)

    def wait(self, requests: Sequence[Request], on_wait: WaitHook) -> None:
        """Block until all requests are complete, calling `on_wait` repeatedly."""
        if not any(is_by_lane(request) for request in requests):
            self._transport.wait(requests, on_wait)
            return
        lanes, progress = list(self._in.values()), self._transport.progress

        def done() -> bool:
            if test_all(requests):
                return True
            progress()  # progresses all MPI messages, including the user's own
            return False

        def look() -> None:
            on_wait()
            for lane in lanes:
                lane.repeat_request()

        poll(done, look)

    def has_lane(self, peer: int) -> bool:
        """Return whether messages with a rank use lanes: it is another rank of this node."""
        return peer in self._lane_peers

    def _lane_out(self, peer: int) -> RingSender:
        self._check_open()
        if (lane := self._out.get(peer)) is None:
            rings, mailbox, group = self._begin(), self._letters.mailbox, self._group
            from commlib.p2p.lanes.receiver import LETTER
            from commlib.p2p.lanes.sender import RingSender, has_moved, put

            self._put, self._has_moved = put, has_moved
            sender = RingSender(self._transport, peer, rings, group.runtime.spins, is_named=group.named_memory)
            lane = self._out.setdefault(peer, sender)
            if lane is sender:
                mailbox.post(Address(peer, "", 0), LETTER, place=sender.first)
                self._out_addresses[int(peer)] = sender.at
            else:  # another thread was faster
                sender.drop()
        return lane

    def _lane_in(self, peer: int) -> RingReceiver:
        self._check_open()
        if (lane := self._in.get(peer)) is None:
            self._begin()
            from commlib.p2p.lanes.receiver import RingReceiver, take
            from commlib.p2p.lanes.sender import has_moved

            self._take, self._has_moved = take, has_moved
            receiver = RingReceiver(self._transport, self._letters.mailbox, peer, self._group.runtime.spins)
            lane = self._in.setdefault(peer, receiver)
            self._in_addresses[int(peer)] = lane.at
        return lane

    def _begin(self) -> RingRegistry:
        load()
        if self._rings is None:
            self._rings = RingRegistry()
            self._group.end_with(self._rings)
        return self._rings

    # The end

    def _check_open(self) -> None:
        if self._has_left:
            raise ShutdownError("this group no longer sends or receives: it was closed, or commlib was shut down")

    def halt(self) -> None:
        """Stop all compiled calls, as in a forked child."""
        for outgoing in list(self._out.values()):
            outgoing.halt()
        for incoming in list(self._in.values()):
            incoming.halt()

    def leave(self, reason: str) -> None:
        """Stop sending. The other ranks can receive earlier messages until all ranks have dropped the group."""
        self._has_left = True
        self.halt()

    def close(self) -> None:
        """Free everything. Call it only when no rank uses the group any more."""
        self.leave("")
        if self._rings is not None:
            self._rings.close()
