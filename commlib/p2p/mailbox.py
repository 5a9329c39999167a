"""Mailbox: exchange letters between two ranks about their channels and lanes, at the opening and at the end.

Letters have a tag of their own, above those of users' messages. There is no wait for a letter to be read: its reader
may look at it much later, or never.
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
from typing import Any

from commlib.errors import CommlibError
from commlib.runtime.poller import MessagePoller
from commlib.transport.base import ProbedReceive, Request, Transport

log = logging.getLogger("commlib")

TAG = 0
"""The first tag that no user's message has."""

_MOST_BYTES = 8192
_LOST = 0.1  # seconds after which a round is no more counted on
_PARTING = 0.2  # seconds for letters that are still on their way when a group ends

_left_behind: deque[list[tuple[Request, bytes]]] = deque()
"""What mailboxes had posted that nobody has any more: a finalizer, which may run anywhere, must not call MPI."""


@dataclass(frozen=True, slots=True)
class Address:
    """A channel: its edge between this rank and `peer`, and how often that was opened before. A lane's edge is ""."""

    peer: int
    edge: int | str
    instance: int


class Mailbox:
    """Keep all letters of one rank in one group. Nothing here blocks, except `close`, briefly.

    Only the poller's thread takes letters in. A signal handler that raised meanwhile would lose a letter, or the place
    where the next letter is awaited. Other threads ask for it, and look at what has come.

    key: of the group, unlike any other's. MPICH gives letters that were not taken before their group was closed to a
    later group. That group must read none of them.
    """

    def __init__(self, transport: Transport, poller: MessagePoller, owner: object, key: int = 0) -> None:
        self.transport, self._poller, self._owner, self._key = transport, poller, weakref.ref(owner), key
        self._awaited: dict[int, tuple[ProbedReceive, bytearray]] = {}  # by peer
        self._posted: list[tuple[Request, bytes]] = []
        _look_after_left()
        weakref.finalize(self, _left_behind.append, self._posted).atexit = False
        self._posting = threading.RLock()  # users' threads and the poller's write letters
        self._come: dict[tuple[Address, str], dict[str, Any]] = {}
        self._expected: dict[tuple[Address, str], None] = {}
        self._asked: dict[int, None] = {}
        self._is_watched = self._is_closed = False
        self._taken_in = 0.0

    def post(self, to: Address, kind: str, **content: Any) -> None:
        """Send a letter of some kind ("hello", "device", "bye") to the peer's end of a channel."""
        data = json.dumps([self._key, to.edge, to.instance, kind, content]).encode()
        assert len(data) <= _MOST_BYTES
        with self._posting:
            _look_after_left()
            self._posted[:] = [pair for pair in self._posted if not pair[0].test()]
            self._posted.append((self.transport.send(to.peer, TAG, memoryview(data)), data))

    def letter(self, of: Address, kind: str) -> dict[str, Any] | None:
        """Return what has come of this kind, or None. Never looks whether more has."""
        return self._come.get((of, kind))

    def expect(self, address: Address, kind: str = "hello") -> None:
        """Let a letter of this kind be taken in as soon as it comes."""
        if (address, kind) not in self._come:
            self._expected[address, kind] = None
            self._watch(anew=True)

    def ask(self, peer: int) -> None:
        """Let what has come from a peer be taken in soon."""
        self._asked[peer] = None
        self._watch()

    def _watch(self, *, anew: bool = False) -> None:
        # An interrupted call may have said that there is a round, and started none.
        is_lost = time.monotonic() - self._taken_in > _LOST
        if (anew or is_lost or not self._is_watched) and not self._is_closed:
            self._is_watched, self._taken_in = True, time.monotonic()
            self._poller.watch(_Round(self.take_in), self._owner(), awaited=False)

    def take_in(self) -> bool:
        """Take in what has come, on the poller's thread; return whether this need not be called again."""
        self._taken_in = time.monotonic()
        self._is_watched = False  # from here on who asks starts another round
        asked, self._asked = self._asked, {}
        try:
            for peer in {*asked, *(address.peer for address, _ in list(self._expected))}:
                self._look(peer)
        except CommlibError as error:  # whoever waits finds out that nothing comes
            log.debug("letters: %s", error)
        for awaited in [known for known in list(self._expected) if known in self._come]:
            self._expected.pop(awaited, None)
        if not self._expected or self._is_closed or self._is_watched:
            return True
        self._is_watched = True
        return False

    def _look(self, peer: int) -> None:
        while not self._is_closed:
            if peer not in self._awaited:
                memory = bytearray(_MOST_BYTES)
                self._awaited[peer] = self.transport.recv_probed(peer, TAG, memoryview(memory)), memory
            request, memory = self._awaited[peer]
            if not request.test():
                return
            key, edge, instance, kind, content = json.loads(bytes(memory[: request.nbytes]))
            if key == self._key:
                self._come[Address(peer, edge, instance), kind] = content
            del self._awaited[peer]

    def forget(self, address: Address) -> None:
        """Drop the letters to a channel that has ended."""
        for kind in ("hello", "device", "bye"):
            self._expected.pop((address, kind), None)
            self._come.pop((address, kind), None)

    def close(self) -> None:
        """Read nothing more; wait briefly until what was sent has left."""
        self._is_closed = True
        deadline = time.monotonic() + _PARTING
        for request, _ in self._posted:
            try:
                while not request.test() and time.monotonic() < deadline:
                    time.sleep(1e-4)
                if not request.test():
                    request.cancel()
            except CommlibError:  # what cannot be sent any more
                pass
        self._posted.clear()
        for awaited, _ in self._awaited.values():
            awaited.cancel()
        self._awaited = {}


def _look_after_left() -> None:
    """Look whether letters have left whose mailbox is gone: until somebody has seen that, MPI and we keep them."""
    for _ in range(len(_left_behind)):
        try:
            posted = _left_behind.popleft()
        except IndexError:  # another thread looks after them
            return
        try:
            left = [pair for pair in posted if not pair[0].test()]
        except CommlibError:  # what cannot be sent any more
            continue
        if left:
            _left_behind.append(left)


class _Round:
    """What the poller asks: one for each time, so that none ends another."""

    __slots__ = ("description", "done")

    def __init__(self, done: Callable[[], bool]) -> None:
        self.description, self.done = "letters", done
