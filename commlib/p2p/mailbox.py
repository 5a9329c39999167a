"""Letters between two ranks of a group about their channels: how one was opened, and that it has ended.

They have a tag of their own, above those of users' messages. Nobody waits for a letter to be read: its reader may look
at it much later, or never.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

from commlib.errors import CommlibError
from commlib.transport.base import ProbedReceive, Request, Transport

TAG = 32768
"""The first tag that no user's message has."""

_MOST_BYTES = 8192
_PARTING = 0.2  # seconds for letters that are still on their way when a group ends


@dataclass(frozen=True, slots=True)
class Address:
    """A channel: its edge between this rank and `peer`, and how often that was opened before."""

    peer: int
    edge: int | str
    instance: int


class Mailbox:
    """All letters of one rank in one group. Any thread may call it; nothing here blocks, except `close`, briefly."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._awaited: dict[int, tuple[ProbedReceive, bytearray]] = {}  # by peer
        self._posted: list[tuple[Request, bytes]] = []
        self._come: dict[tuple[Address, str], dict[str, Any]] = {}
        self._looking = threading.Lock()

    def post(self, to: Address, kind: str, **content: Any) -> None:
        """Send a letter of some kind ("hello", "bye") to the peer's end of a channel."""
        data = json.dumps([to.edge, to.instance, kind, content]).encode()
        assert len(data) <= _MOST_BYTES
        self._posted = [pair for pair in self._posted if not pair[0].test()]
        self._posted.append((self._transport.send(to.peer, TAG, memoryview(data)), data))

    def letter(self, of: Address, kind: str) -> dict[str, Any] | None:
        """Return what has come of this kind, or None. Never looks whether more has."""
        return self._come.get((of, kind))

    def look(self, peer: int) -> None:
        """Take in what has come from a peer."""
        if not self._looking.acquire(blocking=False):
            return  # another thread does, or the call that this signal handler has interrupted
        try:
            while True:
                if peer not in self._awaited:
                    memory = bytearray(_MOST_BYTES)
                    self._awaited[peer] = self._transport.recv_probed(peer, TAG, memoryview(memory)), memory
                request, memory = self._awaited[peer]
                if not request.test():
                    return
                edge, instance, kind, content = json.loads(bytes(memory[: request.nbytes]))
                self._come[Address(peer, edge, instance), kind] = content
                del self._awaited[peer]  # last: what interrupts this finds it again
        finally:
            self._looking.release()

    def forget(self, address: Address) -> None:
        """Drop the letters to a channel that has ended."""
        for kind in ("hello", "bye"):
            self._come.pop((address, kind), None)

    def close(self) -> None:
        """Read nothing more; wait briefly until what was sent has left."""
        deadline = time.monotonic() + _PARTING
        for request, _ in self._posted:
            try:
                while not request.test() and time.monotonic() < deadline:
                    time.sleep(1e-4)
                if not request.test():
                    request.cancel()
            except CommlibError:  # what cannot be sent any more
                pass
        self._posted = []
        for awaited, _ in self._awaited.values():
            awaited.cancel()
        self._awaited = {}
