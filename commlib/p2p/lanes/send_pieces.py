"""Send pieces: send a message in pieces, each as soon as it is copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commlib.devices.protocol import DeviceEvent
from commlib.errors import TransportError
from commlib.transport.base import Request, Transport


class CopiedPiece(NamedTuple):
    """A piece: the bytes from `start` to `stop`, which are on the host when the event is done."""

    start: int
    stop: int
    event: DeviceEvent


class SendPieces:
    """The request of a message in pieces. `test` sends the pieces, in their order."""

    by_lane = True
    __slots__ = ("_data", "_is_torn", "_peer", "_pieces", "_requests", "_tag", "_transport", "nbytes")

    def __init__(
        self, transport: Transport, peer: int, tag: int, data: memoryview, pieces: Sequence[CopiedPiece]
    ) -> None:
        self._transport, self._peer, self._tag, self._data, self._pieces = transport, peer, tag, data, pieces
        self._requests: list[Request] = []
        self._is_torn = False
        self.nbytes = len(data)

    def test(self) -> bool:
        """Make progress; return True once all pieces have left. Raises TransportError."""
        requests, pieces = self._requests, self._pieces
        while len(requests) < len(pieces):
            start, stop, event = pieces[len(requests)]
            if not event.done():
                return False
            self._send(start, stop)
        return all(request.test() for request in requests)

    def _send(self, start: int, stop: int) -> None:
        if self._is_torn:
            raise TransportError(
                f"a message to rank {self._peer} was interrupted while sending a piece: its state is undefined"
            )
        before = len(self._requests)
        try:
            self._requests.append(self._transport.send(self._peer, self._tag, self._data[start:stop]))
        except BaseException:  # from a signal handler: the piece may have left
            self._is_torn = len(self._requests) == before
            raise

    def cancel(self) -> None:
        for request in self._requests:
            request.cancel()
