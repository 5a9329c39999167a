"""LaneIn: receive what another rank of the node sends over a lane, by tag, in the order it was sent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from commlib.buffers.peer_memory import Mapped
from commlib.buffers.views import address_of
from commlib.errors import TransportError
from commlib.kernels.host import arrays, lane_aside, lane_posts, lane_take
from commlib.kernels.host import lane as ring
from commlib.kernels.host.node import entry_point
from commlib.p2p.channels.node_end import waiting_fields
from commlib.p2p.lanes.keep_alive import Kept
from commlib.p2p.lanes.sender import LONGEST_BYTES, go_on, halt
from commlib.p2p.mailbox import Address, Mailbox
from commlib.transport.base import Transport

take, look_into = entry_point(lane_take.take, 3), entry_point(lane_take.look)
_post, _ask, _withdraw, _forget = (
    entry_point(lane_posts.post, 4),
    entry_point(lane_posts.ask, 3),
    entry_point(lane_posts.withdraw, 2),
    entry_point(lane_posts.forget, 2),
)
_move_posts, _renew_aside, _aside_units = (
    entry_point(lane_posts.move_posts, 3),
    entry_point(lane_aside.renew_aside, 4),
    entry_point(lane_aside.aside_units),
)

LETTER = "lane"
_POSTS = 16  # for how many there is room at first


class LaneIn:
    """The receiving end. `transport` moves long messages."""

    def __init__(self, transport: Transport, mailbox: Mailbox, peer: int, spins: int) -> None:
        self.transport, self._mailbox, self.peer = transport, mailbox, peer
        self._address = Address(peer, "", 0)  # no channel has an edge of this name
        self._end = np.zeros(ring.END_FIELDS, np.int64)
        self.at: int = self._end.ctypes.data
        self._end[ring.SPINS : ring.NAP_MICROSECONDS + 1] = waiting_fields(spins)
        self._end[ring.DTYPES] = arrays.DTYPES_AT
        self._rings, self._posts, self._aside = Kept(), Kept(), Kept()
        self.posted: set[Any] = set()
        """Receives with memory that messages may come into: perhaps nothing else keeps it alive."""

    @property
    def is_connected(self) -> bool:
        """Whether anything that was sent has been found."""
        return bool(self._end[ring.RING])

    def expect(self) -> None:
        """Let the sender's letter be taken in."""
        if not self.is_connected:
            self._mailbox.expect(self._address, LETTER)

    def ask(self) -> None:
        """Say that the sender's letter is still awaited, in a long wait."""
        if not self.is_connected:
            self._mailbox.ask(self.peer)

    def look(self) -> None:
        """Give what has come to those who have posted. Never blocks. Raises TransportError."""
        while True:
            number = int(self._end[ring.RING])  # first: what is seen then is seen of this ring, or of a later one
            status = look_into(self.at)
            if status == ring.FULL:
                self._make_room_aside()
            elif status == lane_take.DRAINED or (status == ring.WAITING and number == 0):
                if not self._follow(number):
                    return
            else:
                return

    def post(self, tag: int, into: Any, nbytes: int) -> int:
        """Post a receive into an array, and return its number. The caller is in `posted`."""
        while (number := _post(self.at, tag, address_of(into), nbytes)) == ring.FULL:
            self._make_room_for_posts()
        return number

    def state(self, number: int) -> int:
        return _ask(self.at, number, lane_posts.STATE)

    def came(self, number: int) -> tuple[int, int]:
        """Return how many bytes have come to a post, and of a message that comes another way how: see `announce`."""
        return _ask(self.at, number, lane_posts.CAME), _ask(self.at, number, lane_posts.NUMBER)

    def withdraw(self, number: int) -> bool:
        """Take back a post; False if its message has come."""
        return bool(_withdraw(self.at, number))

    def forget(self, number: int) -> None:
        """End a post whose message has come."""
        _forget(self.at, number)

    def _follow(self, number: int) -> bool:
        """Find the ring after that of a number, which is empty for good; return whether it is there."""
        if number == 0:
            letter = self._mailbox.letter(self._address, LETTER)
            if letter is None:
                return False
            place = letter["place"]
        else:
            here = self._rings.numbered(number)
            if here is None or number != self._end[ring.RING]:  # another thread was here first
                return True
            place = json.loads(bytes(here.array(ring.LINK_AT, ring.LINK_BYTES)).partition(b"\0")[0])
        path, name, nbytes = place
        try:
            mapped = Mapped((path, name, nbytes))
        except OSError as error:
            if number != self._end[ring.RING]:  # another thread has found it, and so its sender lets nobody else
                return True
            raise TransportError(
                f"cannot map the memory with the messages of rank {self.peer} ({error}): its process has ended, its "
                "group was closed, or it is in a container of its own (COMMLIB_NODE_PATH=0 sends through MPI)"
            ) from None
        self._rings.add(number + 1, mapped.address, mapped)
        if go_on(self.at, number, mapped.address, (nbytes - ring.RING_AT) // ring.UNIT, 0, 0) == ring.DONE:
            mapped.array(ring.FOUND_AT, 8).view(np.int64)[0] = 1
        else:
            self._rings.drop(mapped.address)
        self._rings.drop_before(int(self._end[ring.RING]))
        return True

    def _make_room_for_posts(self) -> None:
        room = max(_POSTS, 2 * int(self._end[ring.POSTS_ROOM]))
        table = np.zeros((room, lane_posts.POST_FIELDS), np.int64)
        self._posts.add(room, address_of(table), table)
        if _move_posts(self.at, address_of(table), room) != ring.DONE:
            self._posts.drop(address_of(table))
        self._posts.drop_before(int(self._end[ring.POSTS_ROOM]))

    def _make_room_aside(self) -> None:
        """Have room for twice of what is aside, and for the next message."""
        number = int(self._end[ring.ASIDE_NUMBER])
        units = 2 * _aside_units(self.at) + ring.units_of.py_func(LONGEST_BYTES)
        memory = np.zeros((units, ring.UNIT), np.uint8)
        self._aside.add(number + 1, address_of(memory), memory)
        if _renew_aside(self.at, number, address_of(memory), units) != ring.DONE:
            self._aside.drop(address_of(memory))
        self._aside.drop_before(int(self._end[ring.ASIDE_NUMBER]))

    def halt(self) -> None:
        """Let `take` receive nothing any more."""
        halt(self.at, 1)
