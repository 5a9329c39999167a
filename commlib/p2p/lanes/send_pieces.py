"""LeavingPieces: send a message in pieces, each once it has been copied to where it is sent from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commlib.devices.protocol import Event
from commlib.errors import TransportError
from commlib.transport.base import Request, Transport


class Copied(NamedTuple):
    """A piece: the bytes from `start` to `stop`, which are there when an event is done."""

    start: int
    stop: int
    event: Event


class LeavingPieces:
    """The request of such a message. Its pieces leave in their order, when it is asked whether it is complete."""

    by_lane = True
    __slots__ = ("_data", "_is_torn", "_peer", "_pieces", "_sent", "_tag", "_transport", "nbytes")

    def __init__(self, transport: Transport, peer: int, tag: int, data: memoryview, pieces: Sequence[Copied]) -> None:
        self._transport, self._peer, self._tag, self._data, self._pieces = transport, peer, tag, data, pieces
        self._sent: list[Request] = []
        self._is_torn = False
        self.nbytes = len(data)

    def test(self) -> bool:
        """Make progress; True once all have left. Raises TransportError."""
        sent, pieces = self._sent, self._pieces
        while len(sent) < len(pieces):
            start, stop, event = pieces[len(sent)]
            if not event.done():
                return False
            self._send(start, stop)
        return all(request.test() for request in sent)

    def _send(self, start: int, stop: int) -> None:
        if self._is_torn:
            raise TransportError(
                f"a message to rank {self._peer} was interrupted as a piece of it left: nobody knows what has been sent"
            )
        before = len(self._sent)
        try:
            self._sent.append(self._transport.send(self._peer, self._tag, self._data[start:stop]))
        except BaseException:  # a signal handler's: it may have left
            self._is_torn = len(self._sent) == before
            raise

    def cancel(self) -> None:
        for request in self._sent:
            request.cancel()
