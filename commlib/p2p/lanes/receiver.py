"""Ring receiver: the receiving end of a lane from another rank of the node. Messages match by tag, in send order."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from commlib.buffers.peer_memory import PeerMapping
from commlib.buffers.views import address_of
from commlib.errors import TransportError
from commlib.kernels.fields import arrays, ring_posts
from commlib.kernels.fields import shm_ring as ring
from commlib.kernels.machine_code import entry_point
from commlib.p2p.channels.node_end import waiting_fields
from commlib.p2p.lanes.keep_alive import KeepAlive
from commlib.p2p.lanes.sender import LONGEST_BYTES, go_on, halt
from commlib.p2p.rendezvous import Address, Rendezvous
from commlib.transport.base import Transport

take, look_into = entry_point("ring_take.take", 3), entry_point("ring_take.look")
_post, _query, _withdraw, _forget = (
    entry_point("ring_posts.post", 4),
    entry_point("ring_posts.read_field", 3),
    entry_point("ring_posts.withdraw", 2),
    entry_point("ring_posts.forget", 2),
)
_move_posts, _renew_aside, _aside_units = (
    entry_point("ring_posts.move_posts", 3),
    entry_point("ring_unexpected.move_unexpected", 4),
    entry_point("ring_unexpected.unexpected_units"),
)

LETTER = "lane"
_POSTS = 16  # initial capacity for posted receives


class RingReceiver:
    """The receiving end of a lane. `transport` moves long messages."""

    def __init__(self, transport: Transport, mailbox: Rendezvous, peer: int, spins: int) -> None:
        self.transport, self._mailbox, self.peer = transport, mailbox, peer
        self._address = Address(peer, "", 0)  # no channel has an edge of this name
        self._end = np.zeros(ring.END_FIELDS, np.int64)
        self.at: int = self._end.ctypes.data
        self._end[ring.SPINS : ring.NAP_MICROSECONDS + 1] = waiting_fields(spins)
        self._end[ring.DTYPES] = arrays.DTYPES_AT
        self._rings, self._posts, self._aside = KeepAlive(), KeepAlive(), KeepAlive()
        self.posted: set[Any] = set()
        """Posted receives. Messages may be written to their memory, so they are kept alive here."""

    @property
    def is_connected(self) -> bool:
        """Whether the first ring of the sender is mapped."""
        return bool(self._end[ring.RING])

    def expect(self) -> None:
        """Request the rendezvous to receive the sender's message about its first ring."""
        if not self.is_connected:
            self._mailbox.expect(self._address, LETTER)

    def repeat_request(self) -> None:
        """Repeat the request for the sender's message, during a long wait."""
        if not self.is_connected:
            self._mailbox.poll(self.peer)

    def look(self) -> None:
        """Deliver arrived messages to the posted receives. Never blocks. Raises TransportError."""
        while True:
            number = int(self._end[ring.RING])  # read before looking: the look then concerns this ring or a later one
            status = look_into(self.at)
            if status == ring.FULL:
                self._make_room_aside()
            elif status == ring.DRAINED or (status == ring.WAITING and number == 0):
                if not self._follow(number):
                    return
            else:
                return

    def post(self, tag: int, into: Any, nbytes: int) -> int:
        """Post a receive into an array; return its number. The caller must be in `posted`."""
        while (number := _post(self.at, tag, address_of(into), nbytes)) == ring.FULL:
            self._make_room_for_posts()
        return number

    def state(self, number: int) -> int:
        return _query(self.at, number, ring_posts.STATE)

    def arrival(self, number: int) -> tuple[int, int]:
        """Return the bytes received for a post, and the number of a message that arrives by MPI: see `announce`."""
        return _query(self.at, number, ring_posts.MESSAGE_BYTES), _query(self.at, number, ring_posts.NUMBER)

    def withdraw(self, number: int) -> bool:
        """Withdraw a post; return False if its message has arrived."""
        return bool(_withdraw(self.at, number))

    def forget(self, number: int) -> None:
        """End a post whose message has arrived."""
        _forget(self.at, number)

    def _follow(self, number: int) -> bool:
        """Map the ring after the given one, which is drained; return whether it exists."""
        if number == 0:
            letter = self._mailbox.letter(self._address, LETTER)
            if letter is None:
                return False
            place = letter["place"]
        else:
            here = self._rings.numbered(number)
            if here is None or number != self._end[ring.RING]:  # another thread has moved on already
                return True
            place = json.loads(bytes(here.array(ring.LINK_AT, ring.LINK_BYTES)).partition(b"\0")[0])
        path, name, nbytes = place
        try:
            mapped = PeerMapping((path, name, nbytes))
        except OSError as error:
            if number != self._end[ring.RING]:  # another thread has mapped it, so its sender has withdrawn its name
                return True
            raise TransportError(
                f"cannot map the memory with the messages of rank {self.peer} ({error}): its process has ended, its "
                "group was closed, or it runs in another container (COMMLIB_NODE_PATH=0 sends through MPI)"
            ) from None
        self._rings.add(number + 1, mapped.address, mapped)
        if go_on(self.at, number, mapped.address, (nbytes - ring.RING_AT) // ring.UNIT, 0, 0) == ring.DONE:
            mapped.array(ring.OPENED_AT, 8).view(np.int64)[0] = 1
        else:
            self._rings.drop(mapped.address)
        self._rings.drop_before(int(self._end[ring.RING]))
        return True

    def _make_room_for_posts(self) -> None:
        room = max(_POSTS, 2 * int(self._end[ring.POSTS_ROOM]))
        table = np.zeros((room, ring_posts.POST_FIELDS), np.int64)
        self._posts.add(room, address_of(table), table)
        if _move_posts(self.at, address_of(table), room) != ring.DONE:
            self._posts.drop(address_of(table))
        self._posts.drop_before(int(self._end[ring.POSTS_ROOM]))

    def _make_room_aside(self) -> None:
        """Enlarge the memory for unexpected messages: twice the stored ones, and room for the next."""
        number = int(self._end[ring.ASIDE_NUMBER])
        units = 2 * _aside_units(self.at) + ring.units_of_bytes(LONGEST_BYTES)
        memory = np.zeros((units, ring.UNIT), np.uint8)
        self._aside.add(number + 1, address_of(memory), memory)
        if _renew_aside(self.at, number, address_of(memory), units) != ring.DONE:
            self._aside.drop(address_of(memory))
        self._aside.drop_before(int(self._end[ring.ASIDE_NUMBER]))

    def halt(self) -> None:
        """Stop `take` for good."""
        halt(self.at, 1)
