"""ArrivingPieces: receive a message that was sent in pieces, and tell of each as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from commlib.transport.base import Request, Transport

Landed = Callable[[int, int], None]
"""Told that the bytes from one to another of a message have come, in their order; of some twice, perhaps."""


class ArrivingPieces:
    """The request of such a message, whose pieces are received at once. landed: see above, if anybody asks."""

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
        """Make progress; True once all have come. Raises TransportError."""
        while self._pieces:
            start, stop, request = self._pieces[0]
            if not request.test():
                return False
            if self._landed is not None:
                self._landed(start, stop)
            self._pieces.popleft()  # only now: a signal handler may have raised before
        return True

    def cancel(self) -> None:
        for _, _, request in self._pieces:
            request.cancel()
