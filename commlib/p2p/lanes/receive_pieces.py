"""Receive pieces: receive a message that was sent in pieces, with a callback for each piece."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from commlib.transport.base import Request, Transport

Landed = Callable[[int, int], None]
"""Called when the bytes from start to stop of a message have arrived, in order; for some bytes perhaps twice."""


class ReceivePieces:
    """The request of a message in pieces. All its receives are posted immediately. landed: the callback, if any."""

    def __init__(
        self, transport: Transport, peer: int, tag: int, into: memoryview, piece: int, landed: Landed | None
    ) -> None:
        self._landed = landed
        self._pieces: deque[tuple[int, int, Request]] = deque()
        self.nbytes = len(into)
        for start in range(0, len(into), piece):
            stop = min(start + piece, len(into))
            self._pieces.append((start, stop, transport.recv(peer, tag, into[start:stop])))

    def test(self) -> bool:
        """Make progress; return True once all pieces have arrived. Raises TransportError."""
        while self._pieces:
            start, stop, request = self._pieces[0]
            if not request.test():
                return False
            if self._landed is not None:
                self._landed(start, stop)
            self._pieces.popleft()  # last, because a signal handler may raise before
        return True

    def cancel(self) -> None:
        for _, _, request in self._pieces:
            request.cancel()
