"""MPI transport: messages over MPI.

Every group has a duplicated MPI communicator, so commlib's messages never match the user's. Waits poll (MPI_Testall)
instead of blocking inside MPI, so commlib can watch them, time them out and cancel them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from mpi4py import MPI

from commlib.buffers import shared_memory as segment
from commlib.errors import TransportError
from commlib.protocols import SharedMemory
from commlib.transport.base import (
    Gather,
    MessageFunctions,
    PersistentMessage,
    PersistentRound,
    Pieces,
    ProbedReceive,
    Request,
    Space,
    WaitHook,
)
from commlib.transport.mpi_persistent import MpiPersistentMessage, MpiRound, functions
from commlib.transport.mpi_requests import MpiProbedReceive, MpiRequest, UnmatchedReceives
from commlib.transport.polling import poll

# MPI counts are C ints before MPI 4: both sides cut longer messages into pieces. The last piece is shorter than the
# others, possibly empty, so a receiver without the length recognises the end of the message.
LONGEST = 1 << 30

_FEWEST_TAGS = 1 << 19  # with fewer tags each space gets a separate communicator


def _share_tags(tags: int) -> dict[Space, tuple[int, int]]:
    """Return the tags of a communicator for each space: (the first, the number)."""
    half = tags // 2
    return {
        Space.MESSAGES: (0, 1 << 15),
        Space.CHECKS: (1 << 15, 1 << 15),
        Space.CHANNELS: (1 << 16, half - (1 << 16)),
        Space.COLLECTIVES: (half, tags - half - 1),  # the last tag is never used: see `progress`
    }


class MpiTransport:
    """One rank's endpoint in a group of MPI processes. It takes ownership of its communicator.

    longest: bytes of the longest message; longer ones are cut into pieces. The same on all ranks.
    most_tags: the number of tags of its MPI. If they are too few to share, each space gets a separate communicator.
    devices: kinds of devices whose memory its MPI reads and writes directly, the same on all ranks.
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
        self._most_tags = most_tags or int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) + 1  # only COMM_WORLD has it
        self._quiet_tag = self._most_tags - 1
        self._ranks: tuple[int, ...] = ()  # MPI's ranks of the group, if it is a part of the communicator
        self._separate_comms: dict[Space, Any] = {}
        if self._most_tags < _FEWEST_TAGS:
            self._first_tag, self._tags = 0, self._most_tags - 1
            self._separate_comms = {space: comm.Dup() for space in Space if space != Space.COLLECTIVES}
        else:
            self._first_tag, self._tags = _share_tags(self._most_tags)[Space.COLLECTIVES]
        self._new_queue()

    def _new_queue(self) -> None:
        self._unmatched = UnmatchedReceives(self._comm, self.longest)

    def space(self, space: Space) -> MpiTransport:
        other = copy.copy(self)
        if space in self._separate_comms:
            other._comm = self._separate_comms[space]
        else:
            other._first_tag, other._tags = _share_tags(self._most_tags)[space]
        other._separate_comms = {}
        other._new_queue()
        return other

    def among(self, ranks: Sequence[int]) -> MpiTransport:
        other = copy.copy(self)
        other._new_queue()
        other._ranks = tuple(self.peer(rank) for rank in ranks)
        other.rank, other.size, other.members = ranks.index(self.rank), len(ranks), tuple(ranks)
        return other

    def peer(self, rank: int) -> int:
        """Return MPI's rank of a rank of this group."""
        return self._ranks[rank] if self._ranks else rank

    def tag(self, tag: int) -> int:
        """Return MPI's tag of a tag of this space."""
        return self._first_tag + tag % self._tags

    @property
    def comm(self) -> Any:
        """The communicator of its messages."""
        return self._comm

    @property
    def native(self) -> Any:
        return None if self._ranks else self._comm

    @property
    def tags(self) -> int:
        return self._tags

    def _post(self, operation: Any, peer: int, tag: int, buffer: Any) -> MpiRequest:
        longest = self.longest
        memory = buffer if type(buffer) is memoryview else self.addressed(buffer)
        pieces, to, mpi_tag = range(0, len(memory) + 1, longest), self.peer(peer), self.tag(tag)
        request = MpiRequest(buffer)
        try:
            for i in pieces:
                request.add(operation([memory[i : i + longest], MPI.BYTE], to, mpi_tag))
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error
        return request

    def addressed(self, buffer: Any) -> Any:
        """Return the memory of a device for mpi4py; the caller must keep the buffer. Raises TransportError."""
        kind = buffer.device.name
        if kind not in self._devices:  # reading it may crash the process
            raise TransportError(f"MPI: rank {self.rank} got memory of {kind}, which this transport does not accept")
        return MPI.buffer.fromaddress(buffer.address, buffer.nbytes)

    def send(self, peer: int, tag: int, data: Any) -> Request:
        return self._post(self._comm.Isend, peer, tag, data)

    def recv(self, peer: int, tag: int, into: Any) -> Request:
        return self._post(self._comm.Irecv, peer, tag, into)

    def recv_probed(self, peer: int, tag: int, into: Any) -> ProbedReceive:
        memory = into if type(into) is memoryview else self.addressed(into)
        return MpiProbedReceive(self._unmatched, self.peer(peer), self.tag(tag), memory, into)

    def wait(self, requests: Sequence[Request], on_wait: WaitHook) -> None:
        for request in requests:
            if not request.test():
                poll(request.test, on_wait)

    def wait_any(self, requests: Sequence[Request], on_wait: WaitHook) -> list[Request]:
        # One call for all requests: each call makes MPI poll the network, which may be a system call.
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
        return MpiRound(requests, len(recvs), (sends, recvs))

    def _prepare(self, init: Any, pieces: Sequence[memoryview], peer: int, tag: int) -> Any:
        pieces = [piece for piece in pieces if len(piece)]
        addresses = [MPI.Get_address(piece) for piece in pieces]
        kind = MPI.BYTE.Create_hindexed([len(piece) for piece in pieces], addresses).Commit()
        try:
            return init([MPI.BOTTOM, 1, kind], self.peer(peer), tag)
        finally:
            kind.Free()  # the request keeps a reference

    @property
    def functions(self) -> MessageFunctions | None:
        return functions()

    def persistent_send(self, peer: int, tag: int, data: memoryview) -> PersistentMessage:
        return self._persistent(self._comm.Send_init, peer, tag, data, receives=False)

    def persistent_recv(self, peer: int, tag: int, into: memoryview) -> PersistentMessage:
        return self._persistent(self._comm.Recv_init, peer, tag, into, receives=True)

    def _persistent(self, init: Any, peer: int, tag: int, memory: memoryview, *, receives: bool) -> PersistentMessage:
        try:
            return MpiPersistentMessage(
                init([memory, MPI.BYTE], self.peer(peer), self.tag(tag)), memory, receives=receives
            )
        except MPI.Exception as error:
            raise TransportError(f"MPI: {error}") from error

    def progress(self) -> bool:
        # In Open MPI a probe that finds a message makes no progress, so first probe for a tag that never arrives.
        self._comm.Iprobe(tag=self._quiet_tag)
        return bool(self._comm.Iprobe())

    def discard(self) -> None:
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            if not self._first_tag <= status.Get_tag() < self._first_tag + self._tags:
                return  # of another space, where a receive may still match it
            message = self._comm.Improbe(status.Get_source(), status.Get_tag(), status)
            if message is not None:
                message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])

    def split(self, color: int, key: int) -> MpiTransport | None:
        return self._child(self._comm.Split(MPI.UNDEFINED if color < 0 else color, key))

    def split_node(self) -> MpiTransport:
        node = self._child(self._comm.Split_type(MPI.COMM_TYPE_SHARED, self.rank))
        assert node is not None
        return node

    def _child(self, comm: Any) -> MpiTransport | None:
        if comm == MPI.COMM_NULL:
            return None
        parent_group, child_group = self._comm.Get_group(), comm.Get_group()
        try:
            members = MPI.Group.Translate_ranks(child_group, None, parent_group)
        finally:
            parent_group.Free()
            child_group.Free()
        return MpiTransport(comm, self.longest, members, self._most_tags, self._devices)

    def accepts(self, device: str) -> bool:
        return device in self._devices

    def take(self, device: str) -> None:
        """Accept memory of a kind of device from now on: on all ranks, before this transport is split."""
        self._devices |= {device}

    def share(self, nbytes: int, gather: Gather) -> SharedMemory:
        return segment.share(self.rank, nbytes, gather)

    def close(self, *, synchronized: bool = True) -> None:
        if self._ranks:
            return
        for comm in (*self._separate_comms.values(), self._comm):
            if synchronized:
                _empty(comm)
            comm.Free()


_LOOKS = 3  # probes after each barrier


def _empty(comm: Any) -> None:
    """Receive all unmatched messages of a communicator: MPICH would deliver them in a later one. Collective.

    Messages that were sent before the first barrier have arrived after it, or arrive before the second one completes.
    """
    status = MPI.Status()
    for _ in range(2):
        comm.Barrier()
        for _ in range(_LOOKS):
            while (message := comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                message.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
