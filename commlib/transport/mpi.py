"""Messages over MPI.

Every group has its own duplicated MPI communicator, so commlib's messages never match the user's. Waiting polls
(MPI_Testall) instead of blocking inside MPI, so that a wait can be watched, timed out and given up.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from typing import Any

from mpi4py import MPI

from commlib import forks
from commlib.buffers import shared_memory as segment
from commlib.errors import TransportError
from commlib.protocols import SharedMemory
from commlib.transport.base import (
    Gather,
    PersistentMessage,
    PersistentRound,
    Pieces,
    ProbedReceive,
    Request,
    Space,
    WaitHook,
)
from commlib.transport.polling import EAGER, poll

# MPI counts are C ints before MPI 4: longer messages are cut, on both sides alike. The last piece is shorter than the
# others, empty if need be: so a receiver that does not know the length sees where the message ends.
LONGEST = 1 << 30

# What was given up while MPI may still read or write its memory, which must stay.
_LEFT_BEHIND: list[Any] = []


class _MpiRequest:
    __slots__ = ("_buffer", "_requests", "_statuses", "nbytes")

    def __init__(self, requests: list[Any], buffer: Any) -> None:
        self._requests, self._buffer = requests, buffer
        self.nbytes = 0

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
        """The MPI request of its first piece that is under way."""
        return self._requests[0]

    def take(self, status: Any) -> bool:
        """Note that this piece is complete; return whether it was the last one."""
        self.nbytes += status.Get_count(MPI.BYTE)
        self._requests.pop(0)
        return not self._requests

    def cancel(self) -> None:
        for request in self._requests:
            try:
                request.Cancel()
                ended = request.Test()
            except MPI.Exception:
                ended = False
            if not ended:  # no send can be cancelled, nor a receive whose message is on its way
                _LEFT_BEHIND.append((request, self._buffer))


class _ProbedReceive:
    """A receive that looks at a message's length before it takes it.

    A posted receive that is too short may crash both processes (Open MPI 5.0 overwrites memory when a large message is
    truncated). Receives of one peer and tag take their messages in the order in which they were made.
    """

    __slots__ = ("_buffer", "_key", "_pieces", "_transport", "nbytes")

    def __init__(self, transport: MpiTransport, peer: int, tag: int, buffer: memoryview) -> None:
        self._transport, self._key, self._buffer = transport, (transport.peer(peer), transport.tag(tag)), buffer
        self._pieces: list[tuple[_MpiRequest, int]] = []  # what was taken, and the room that there was for it
        self.nbytes = 0
        transport.unmatched[self._key].append(self)

    def test(self) -> bool:
        with self._transport.matching:  # the progress thread and a waiting thread may both be here
            waiting = self._transport.unmatched[self._key]
            while waiting and self in waiting and waiting[0]._match():
                waiting.popleft()
            matched = self not in waiting
        if not matched or not all(request.test() for request, _ in self._pieces):
            return False
        fits = all(request.nbytes <= room for request, room in self._pieces)
        self.nbytes = sum(request.nbytes for request, _ in self._pieces) if fits else -1
        return True

    def _match(self) -> bool:
        """Take what has come; return whether that was the last piece."""
        longest = self._transport.longest
        try:
            while True:
                status = MPI.Status()
                message = self._transport.comm.Improbe(*self._key, status)
                if message is None:
                    return False
                length = status.Get_count(MPI.BYTE)
                start = len(self._pieces) * longest
                room = self._buffer[start : start + longest]
                into = room if length <= len(room) else memoryview(bytearray(length))
                self._pieces.append((_MpiRequest([message.Irecv([into[:length], MPI.BYTE])], into), len(room)))
                if length < longest:
                    return True
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error

    def withdraw(self) -> bool:
        """Take it back, as if it had never been posted, and return True; False if a part of its message has come."""
        with self._transport.matching:
            waiting = self._transport.unmatched[self._key]
            if self._pieces or self not in waiting:
                return False
            waiting.remove(self)
            return True

    def cancel(self) -> None:
        with self._transport.matching:
            waiting = self._transport.unmatched[self._key]
            if self in waiting:
                waiting.remove(self)
        for request, _ in self._pieces:
            request.cancel()


_start_all, _test_all = MPI.Prequest.Startall, MPI.Request.Testall  # to look them up takes half as long as to call them


class _MpiRound:
    """Persistent requests, the first of which are `receives` receives, and the memory that they are for."""

    __slots__ = ("_memory", "_receives", "_requests")

    def __init__(self, requests: list[Any], receives: int, memory: Any) -> None:
        self._requests: list[Any] | None = requests
        self._receives, self._memory = receives, memory

    def run(self, on_wait: WaitHook) -> None:
        requests = self._requests
        if requests is None:
            raise TransportError("MPI: these messages were given up on their way, and cannot be sent again")
        try:
            _start_all(requests)
            for _ in range(EAGER):
                if _test_all(requests):
                    return
            poll(lambda: _test_all(requests), on_wait)
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error
        except BaseException:
            self._give_up(requests)
            raise

    def _give_up(self, requests: list[Any]) -> None:
        """Let go of messages that are under way: nobody may take what was meant for somebody else."""
        self._requests = None
        _LEFT_BEHIND.append((requests, self._memory))
        for request in requests[: self._receives]:
            if not request.Test():
                request.Cancel()
                request.Test()  # it ends at once, unless its message has begun to come

    def __del__(self) -> None:
        if not MPI.Is_finalized() and not forks.is_child():
            for request in self._requests or ():
                request.Free()


class _MpiPersistent:
    """One persistent request, and the memory that it is for."""

    __slots__ = ("_memory", "_receives", "_request")

    def __init__(self, request: Any, memory: memoryview, *, receives: bool) -> None:
        self._request: Any = request
        self._memory, self._receives = memory, receives

    def start(self) -> None:
        try:
            self._request.Start()
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error

    def test(self) -> bool:
        try:
            return self._request is None or bool(self._request.Test())
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error

    def close(self) -> None:
        request, self._request = self._request, None
        if request is None or forks.is_child() or MPI.Is_finalized():
            return
        try:
            ended = request.Test()
            if not ended and self._receives:
                request.Cancel()
                ended = request.Test()
            if ended:
                request.Free()
                return
        except MPI.Exception:
            pass
        _LEFT_BEHIND.append((request, self._memory))  # a message is on its way

    def __del__(self) -> None:
        self.close()


_FEWEST_TAGS = 1 << 19  # with fewer each space has a communicator of its own


def _shared_out(tags: int) -> dict[Space, tuple[int, int]]:
    """Return which tags of a communicator each space has: (the first, how many)."""
    half = tags // 2
    return {
        Space.MESSAGES: (0, 1 << 15),
        Space.CHECKS: (1 << 15, 1 << 15),
        Space.CHANNELS: (1 << 16, half - (1 << 16)),
        Space.COLLECTIVES: (half, tags - half - 1),  # the last one is never used: see `progress`
    }


class MpiTransport:
    """One rank's end of a group of MPI processes. Owns the communicator that it is given.

    longest: bytes of the longest message; longer ones are cut into pieces. The same on all ranks.
    most_tags: how many tags its MPI has. Where they are too few to share out, each space has a communicator of its own.
    devices: kinds of devices whose memory its MPI reads and writes at its addresses, the same on all ranks. What MPI
    library can do that is not known here: those that wheels bring cannot.
    """

    def __init__(
        self,
        comm: Any,
        longest: int = LONGEST,
        members: Sequence[int] | None = None,
        most_tags: int = 0,
        devices: Collection[str] = (),
    ) -> None:
        self._comm, self.longest, self._devices = comm, longest, frozenset(devices)
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.members = tuple(range(self.size)) if members is None else tuple(members)
        self._most_tags = most_tags or int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) + 1  # it is on this one only
        self._quiet_tag = self._most_tags - 1
        self._ranks: tuple[int, ...] = ()  # those of the communicator, where it has more than this group
        self._apart: dict[Space, Any] = {}
        if self._most_tags < _FEWEST_TAGS:
            self._first_tag, self._tags = 0, self._most_tags - 1
            self._apart = {space: comm.Dup() for space in Space if space != Space.COLLECTIVES}
        else:
            self._first_tag, self._tags = _shared_out(self._most_tags)[Space.COLLECTIVES]
        self._new_queues()

    def _new_queues(self) -> None:
        self.matching = threading.RLock()
        self.unmatched: defaultdict[tuple[int, int], deque[_ProbedReceive]] = defaultdict(deque)

    def space(self, space: Space) -> MpiTransport:
        other = copy.copy(self)
        other._new_queues()
        if space in self._apart:
            other._comm = self._apart[space]
        else:
            other._first_tag, other._tags = _shared_out(self._most_tags)[space]
        other._apart = {}
        return other

    def among(self, ranks: Sequence[int]) -> MpiTransport:
        other = copy.copy(self)
        other._new_queues()
        other._ranks = tuple(self.peer(rank) for rank in ranks)
        other.rank, other.size, other.members = ranks.index(self.rank), len(ranks), tuple(ranks)
        return other

    def peer(self, rank: int) -> int:
        """Return MPI's rank for one of this group."""
        return self._ranks[rank] if self._ranks else rank

    def tag(self, tag: int) -> int:
        """Return MPI's tag for one of this space."""
        return self._first_tag + tag % self._tags

    @property
    def comm(self) -> Any:
        """The communicator that its messages go through."""
        return self._comm

    @property
    def native(self) -> Any:
        return None if self._ranks else self._comm

    @property
    def tags(self) -> int:
        return self._tags

    def _post(self, operation: Any, peer: int, tag: int, buffer: Any) -> _MpiRequest:
        longest = self.longest
        memory = buffer if type(buffer) is memoryview else self._addressed(buffer)
        pieces, to, mpi_tag = range(0, len(memory) + 1, longest), self.peer(peer), self.tag(tag)
        try:
            requests = [operation([memory[i : i + longest], MPI.BYTE], to, mpi_tag) for i in pieces]
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error
        except BaseException:  # a signal handler's: it may have been posted
            _LEFT_BEHIND.append(buffer)
            raise
        return _MpiRequest(requests, buffer)

    def _addressed(self, buffer: Any) -> Any:
        """Return the memory of a device as mpi4py takes it; the buffer must be kept. Raises TransportError."""
        kind = buffer.device.name
        if kind not in self._devices:  # to read there may end the process
            raise TransportError(
                f"MPI: rank {self.rank} was given memory of {kind}, which this transport does not take"
            )
        return MPI.buffer.fromaddress(buffer.address, buffer.nbytes)

    def send(self, peer: int, tag: int, data: Any) -> Request:
        return self._post(self._comm.Isend, peer, tag, data)

    def recv(self, peer: int, tag: int, into: Any) -> Request:
        return self._post(self._comm.Irecv, peer, tag, into)

    def recv_probed(self, peer: int, tag: int, into: memoryview) -> ProbedReceive:
        return _ProbedReceive(self, peer, tag, into)

    def wait(self, requests: Sequence[Request], on_wait: WaitHook) -> None:
        for request in requests:
            if not request.test():
                poll(request.test, on_wait)

    def wait_any(self, requests: Sequence[Request], on_wait: WaitHook) -> list[Request]:
        # One call for all: each makes MPI look for what has arrived, which may be a system call.
        natives = [request.native for request in requests]  # type: ignore[attr-defined]
        statuses: list[Any] = []
        ended: list[Request] = []

        def some() -> bool:
            for status, index in zip(statuses, MPI.Request.Testsome(natives, statuses) or (), strict=False):
                request: Any = requests[index]
                if request.take(status):
                    ended.append(request)
                else:
                    natives[index] = request.native
            return bool(ended)

        try:
            poll(some, on_wait)
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error
        return ended

    def persistent_round(self, sends: Sequence[Pieces], recvs: Sequence[Pieces], tag: int) -> PersistentRound:
        tag = self.tag(tag)
        requests = [self._prepare(self._comm.Recv_init, pieces, peer, tag) for peer, pieces in recvs]
        requests += [self._prepare(self._comm.Send_init, pieces, peer, tag) for peer, pieces in sends]
        return _MpiRound(requests, len(recvs), (sends, recvs))

    def _prepare(self, init: Any, pieces: Sequence[memoryview], peer: int, tag: int) -> Any:
        pieces = [piece for piece in pieces if len(piece)]
        addresses = [MPI.Get_address(piece) for piece in pieces]
        kind = MPI.BYTE.Create_hindexed([len(piece) for piece in pieces], addresses).Commit()
        try:
            return init([MPI.BOTTOM, 1, kind], self.peer(peer), tag)
        finally:
            kind.Free()  # the request keeps it for as long as it needs it

    def persistent_send(self, peer: int, tag: int, data: memoryview) -> PersistentMessage:
        return self._persistent(self._comm.Send_init, peer, tag, data, receives=False)

    def persistent_recv(self, peer: int, tag: int, into: memoryview) -> PersistentMessage:
        return self._persistent(self._comm.Recv_init, peer, tag, into, receives=True)

    def _persistent(self, init: Any, peer: int, tag: int, memory: memoryview, *, receives: bool) -> PersistentMessage:
        try:
            return _MpiPersistent(init([memory, MPI.BYTE], self.peer(peer), self.tag(tag)), memory, receives=receives)
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error

    def progress(self) -> bool:
        # A probe that finds a message at once moves no other one (Open MPI): so first ask for what never comes.
        self._comm.Iprobe(tag=self._quiet_tag)
        return bool(self._comm.Iprobe())

    def split(self, color: int, key: int) -> MpiTransport | None:
        return self._child(self._comm.Split(MPI.UNDEFINED if color < 0 else color, key))

    def split_node(self) -> MpiTransport:
        node = self._child(self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank))
        assert node is not None
        return node

    def _child(self, comm: Any) -> MpiTransport | None:
        if comm == MPI.COMM_NULL:
            return None
        here, there = self._comm.Get_group(), comm.Get_group()
        try:
            members = MPI.Group.Translate_ranks(there, None, here)
        finally:
            here.Free()
            there.Free()
        return MpiTransport(comm, self.longest, members, self._most_tags, self._devices)

    def accepts(self, device: str) -> bool:
        return device in self._devices

    def share(self, nbytes: int, gather: Gather) -> SharedMemory:
        return segment.share(self.rank, nbytes, gather)

    def close(self) -> None:
        if self._ranks:
            return
        for comm in (*self._apart.values(), self._comm):
            comm.Free()
