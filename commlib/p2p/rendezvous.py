"""Rendezvous: exchange control messages between two ranks about their channels and lanes, at their start and end.

These control messages use a separate tag, above the tags of users' messages. The sender does not wait: the receiver may
read one much later, or never. A group makes its rendezvous on first use.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from commlib.errors import CommlibError
from commlib.node.signature import signature
from commlib.runtime.poller import MessagePoller
from commlib.transport.base import ProbedReceive, Request, Space, Transport

if TYPE_CHECKING:
    from commlib.group.group import Group

log = logging.getLogger("commlib")

TAG = 0
"""The first tag above the tags of users' messages."""

_MOST_BYTES = 8192
_LOST = 0.1  # seconds after which a round is assumed lost
_PARTING = 0.2  # seconds for messages in flight when a group ends

_left_behind: deque[list[tuple[Request, bytes]]] = deque()
"""Sends of dropped rendezvous. A finalizer adds them, because it may run in any thread and must not call MPI."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a channel: peer, edge, and the number of earlier channels on that edge. A lane's edge is ""."""

    peer: int
    edge: int | str
    instance: int


class Rendezvous:
    """All control messages of one rank in one group. Only `close` blocks, briefly.

    Only the poller's thread receives, because an exception of a signal handler could lose a message or its posted
    receive. Other threads request this (`expect`, `poll`) and read the received messages.

    key: unique for each group. With MPICH, messages left over from a closed group can arrive in a later group, which
    must ignore them.
    """

    def __init__(self, transport: Transport, poller: MessagePoller, owner: object, key: int = 0) -> None:
        self.transport, self._poller, self._owner, self._key = transport, poller, owner, key
        self._probes: dict[int, tuple[ProbedReceive, bytearray]] = {}  # by peer
        self._posted: list[tuple[Request, bytes]] = []
        _test_dropped_sends()
        weakref.finalize(self, _left_behind.append, self._posted).atexit = False
        self._posting = threading.RLock()  # users' threads and the poller's thread send
        self._arrived: dict[tuple[Address, str], dict[str, Any]] = {}
        self._expected: dict[tuple[Address, str], None] = {}
        self._requested_peers: dict[int, None] = {}
        self._is_watched = self._is_closed = False
        self._received_at = 0.0

    def post(self, to: Address, kind: str, **content: Any) -> None:
        """Send a message of a kind ("hello", "device", "bye") to the peer's end of a channel."""
        data = json.dumps([self._key, to.edge, to.instance, kind, content]).encode()
        assert len(data) <= _MOST_BYTES
        with self._posting:
            _test_dropped_sends()
            self._posted[:] = [pair for pair in self._posted if not pair[0].test()]
            self._posted.append((self.transport.send(to.peer, TAG, memoryview(data)), data))

    def letter(self, of: Address, kind: str) -> dict[str, Any] | None:
        """Return the received message of this kind, or None. Does not poll."""
        return self._arrived.get((of, kind))

    def expect(self, address: Address, kind: str = "hello") -> None:
        """Poll until a message of this kind arrives."""
        if (address, kind) not in self._arrived:
            self._expected[address, kind] = None
            self._watch(restart=True)

    def poll(self, peer: int) -> None:
        """Poll once, soon, for messages from a peer."""
        self._requested_peers[peer] = None
        self._watch()

    def _watch(self, *, restart: bool = False) -> None:
        # An interrupted call may have set `_is_watched` without starting a round.
        is_lost = time.monotonic() - self._received_at > _LOST
        if (restart or is_lost or not self._is_watched) and not self._is_closed:
            self._is_watched, self._received_at = True, time.monotonic()
            self._poller.watch(_Round(self.receive_letters), self._owner, awaited=False)

    def receive_letters(self) -> bool:
        """Receive messages, on the poller's thread; return whether this round is done."""
        self._received_at = time.monotonic()
        self._is_watched = False  # from here on a request starts another round
        peers, self._requested_peers = self._requested_peers, {}
        try:
            for peer in {*peers, *(address.peer for address, _ in list(self._expected))}:
                self._look(peer)
        except CommlibError as error:  # waiting threads notice the missing message
            log.debug("rendezvous: %s", error)
        for key in [one for one in list(self._expected) if one in self._arrived]:
            self._expected.pop(key, None)
        if not self._expected or self._is_closed or self._is_watched:
            return True
        self._is_watched = True
        return False

    def _look(self, peer: int) -> None:
        while not self._is_closed:
            if peer not in self._probes:
                memory = bytearray(_MOST_BYTES)
                self._probes[peer] = self.transport.recv_probed(peer, TAG, memoryview(memory)), memory
            request, memory = self._probes[peer]
            if not request.test():
                return
            key, edge, instance, kind, content = json.loads(bytes(memory[: request.nbytes]))
            if key == self._key:
                self._arrived[Address(peer, edge, instance), kind] = content
            del self._probes[peer]

    def forget(self, address: Address) -> None:
        """Drop the messages of a channel that has ended."""
        for kind in ("hello", "device", "bye"):
            self._expected.pop((address, kind), None)
            self._arrived.pop((address, kind), None)

    def close(self) -> None:
        """Stop receiving; wait briefly for sends in flight."""
        self._is_closed = True
        deadline = time.monotonic() + _PARTING
        for request, _ in self._posted:
            try:
                while not request.test() and time.monotonic() < deadline:
                    time.sleep(1e-4)
                if not request.test():
                    request.cancel()
            except CommlibError:  # the message cannot be sent any more
                pass
        self._posted.clear()
        for probe, _ in self._probes.values():
            probe.cancel()
        self._probes = {}


def _test_dropped_sends() -> None:
    """Test the sends of dropped rendezvous. MPI and this list keep each message until its send is complete."""
    for _ in range(len(_left_behind)):
        try:
            posted = _left_behind.popleft()
        except IndexError:  # another thread handles the rest
            return
        try:
            pending = [pair for pair in posted if not pair[0].test()]
        except CommlibError:  # the messages cannot be sent any more
            continue
        if pending:
            _left_behind.append(pending)


class _Round:
    """One round of polling. Each request makes a new one, so that no round ends another."""

    __slots__ = ("description", "done")

    def __init__(self, done: Callable[[], bool]) -> None:
        self.description, self.done = "rendezvous", done


class RendezvousOwner:
    """The owner of a group's rendezvous. It makes the rendezvous on first use and closes it with the group."""

    def __init__(self, group: Group) -> None:
        self._group = group

    @cached_property
    def mailbox(self) -> Rendezvous:
        group = self._group
        key = signature(f"{group.runtime.token}.{group.key}")
        return Rendezvous(group.transport.space(Space.CHANNELS), group.runtime.poller, group, key)

    def leave(self, reason: str) -> None:
        """Close the rendezvous, unless the group has failed: then the other ranks must still be notified."""
        if not reason:
            self.close()

    def close(self) -> None:
        """Close the rendezvous. Idempotent."""
        if "mailbox" in vars(self):
            self.mailbox.close()

    def halt(self) -> None:
        """Do nothing: the rendezvous moves nothing by itself."""
