"""MPI requests: a posted send or receive of one message, cut into pieces if it is long."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from typing import Any

from mpi4py import MPI

from commlib.errors import TransportError

# Requests in flight, which keep their memory alive. A signal handler's exception may interrupt a call between the post
# of a message and the assignment of its request.
_UNDER_WAY: set[MpiRequest] = set()


def count_in_flight() -> int:
    """Return the number of messages not known to be complete."""
    return len(_UNDER_WAY)


class MpiRequest:
    __slots__ = ("_buffer", "_requests", "nbytes")

    def __init__(self, buffer: Any) -> None:
        """Create it before its pieces are posted; then pass each piece's request to `add`."""
        self._requests: list[Any] = []
        self._buffer = buffer
        self.nbytes = 0
        _UNDER_WAY.add(self)

    def add(self, native: Any) -> None:
        """Add the MPI request of the next piece."""
        self._requests.append(native)

    def test(self) -> bool:
        try:
            while self._requests:
                status = MPI.Status()
                if not self._requests[0].Test(status):
                    return False
                self.take(status)
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error
        return True

    @property
    def native(self) -> Any:
        """The MPI request of its first piece in flight."""
        return self._requests[0]

    def take(self, status: Any) -> bool:
        """Mark the first piece in flight as complete; return whether it was the last piece."""
        self.nbytes += status.Get_count(MPI.BYTE)
        self._requests.pop(0)
        if self._requests:
            return False
        _UNDER_WAY.discard(self)
        return True

    def cancel(self) -> None:
        ended = [_is_cancelled(request) for request in self._requests]
        if all(ended):  # else keep it: sends, and receives with a message in flight, cannot be cancelled
            _UNDER_WAY.discard(self)


def _is_cancelled(request: Any) -> bool:
    try:
        request.Cancel()
        return bool(request.Test())
    except MPI.Exception:
        return False


class UnmatchedReceives:
    """Receives of messages of unknown length, by MPI's rank and tag, in the order of their creation."""

    def __init__(self, comm: Any, longest: int) -> None:
        self.comm, self.longest = comm, longest
        self.lock = threading.RLock()  # the progress thread and a waiting thread may match at the same time
        self.receives: defaultdict[tuple[int, int], deque[MpiProbedReceive]] = defaultdict(deque)


class MpiProbedReceive:
    """A receive that probes a message's length before it receives it.

    A posted receive that is too short may crash both processes (Open MPI 5.0 overwrites memory when a large message is
    truncated). Receives of one peer and tag match messages in the order of their creation.
    """

    __slots__ = ("_buffer", "_key", "_owner", "_pieces", "_unmatched", "nbytes")

    def __init__(self, unmatched: UnmatchedReceives, peer: int, tag: int, buffer: Any, owner: Any) -> None:
        """buffer: sliceable memory for mpi4py; owner: the owner of the memory."""
        self._unmatched, self._key, self._buffer, self._owner = unmatched, (peer, tag), buffer, owner
        self._pieces: list[tuple[MpiRequest, int]] = []  # each received piece, and the room for it
        self.nbytes = 0
        unmatched.receives[self._key].append(self)

    def test(self) -> bool:
        with self._unmatched.lock:
            waiting = self._unmatched.receives[self._key]
            while waiting and self in waiting and waiting[0]._match():
                waiting.popleft()
            matched = self not in waiting
        if not matched or not all(request.test() for request, _ in self._pieces):
            return False
        fits = all(request.nbytes <= room for request, room in self._pieces)
        self.nbytes = sum(request.nbytes for request, _ in self._pieces) if fits else -1
        return True

    def _match(self) -> bool:
        """Receive the pieces that have arrived; return whether the last piece is among them."""
        longest = self._unmatched.longest
        try:
            while True:
                status = MPI.Status()
                message = self._unmatched.comm.Improbe(*self._key, status)
                if message is None:
                    return False
                length = status.Get_count(MPI.BYTE)
                start = len(self._pieces) * longest
                room = self._buffer[start : start + longest]
                into = room if length <= len(room) else memoryview(bytearray(length))
                request = MpiRequest((into, self._owner))
                request.add(message.Irecv([into[:length], MPI.BYTE]))
                self._pieces.append((request, len(room)))
                if length < longest:
                    return True
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error

    def withdraw(self) -> bool:
        """Retract the receive as if never posted, and return True; False if its message has begun to arrive."""
        with self._unmatched.lock:
            waiting = self._unmatched.receives[self._key]
            if self._pieces or self not in waiting:
                return False
            waiting.remove(self)
            return True

    def cancel(self) -> None:
        with self._unmatched.lock:
            waiting = self._unmatched.receives[self._key]
            if self in waiting:
                waiting.remove(self)
        for request, _ in self._pieces:
            request.cancel()
