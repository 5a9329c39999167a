"""The seam between the collectives and whatever moves bytes.

A `Transport` is one rank's end of one group. It knows nothing of dtypes, verbs or schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from commlib.dtypes import Array
from commlib.errors import CommlibError
from commlib.protocols import SharedMemory

WaitHook = Callable[[], None]
"""Called now and then while a wait lasts; whatever it raises ends the wait."""


class Space(IntEnum):
    """Keep kinds of messages apart. Those of different spaces never match each other, whatever their tags."""

    COLLECTIVES, MESSAGES, CHECKS, CHANNELS = range(4)


Gather = Callable[[Any], list[Any]]

Pieces = tuple[int, Sequence[memoryview]]
"""A peer, and the pieces of memory that one message to or from it is gathered from, or scattered to."""


class Request(Protocol):
    """One posted send or receive."""

    def test(self) -> bool:
        """Make progress; True once complete. Raises TransportError."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes that arrived (receives) or left (sends), valid once `test` said True; -1 if too many came."""
        ...

    def cancel(self) -> None:
        """Give the operation up, as far as the transport can. Never blocks."""
        ...


class ProbedReceive(Request, Protocol):
    """A posted receive of a message whose length is not known."""

    def withdraw(self) -> bool:
        """Take it back, as if it had never been posted, and return True; False if a part of its message has come."""
        ...


class MessageFunctions(NamedTuple):
    """Hold C functions that start persistent messages and test them, so that compiled code can do it, too.

    They are MPI's Startall and Testall: `int start(int count, void *handles)` and `int test(int count, void *handles,
    int *done, void *statuses)`, where 0 is success. They may be called by any thread, without the GIL. `failure` is in
    Python, and makes an error of what they return otherwise.
    """

    start: int
    test: int
    handle_bytes: int
    status_bytes: int
    failure: Callable[[int], CommlibError]


class PersistentRound(Protocol):
    """Messages that are sent and received again and again, from and into the same memory.

    handles: those that `Transport.functions` take, as bytes.
    """

    handles: Array

    def run(self, on_wait: WaitHook) -> None:
        """Post them all and wait until all are complete, as `Transport.wait` does."""
        ...

    def give_up(self) -> None:
        """Let go of messages that are under way: nobody may take what was meant for somebody else. Idempotent."""
        ...


class PersistentMessage(Protocol):
    """One message that is sent, or received, again and again from or into the same memory. At most 1 GiB."""

    @property
    def handle_at(self) -> int:
        """Where the handle is that `Transport.functions` take."""
        ...

    def start(self) -> None:
        """Post it. Only while it is not under way."""
        ...

    def test(self) -> bool:
        """Make progress; True unless it is under way. Raises TransportError."""
        ...

    def close(self) -> None:
        """Give it up, as far as the transport can, with its resources. Never blocks. Idempotent."""
        ...


class Transport(Protocol):
    """Nonblocking point-to-point messages between the ranks of one group, plus what a node shares."""

    rank: int
    size: int

    @property
    def members(self) -> Sequence[int]:
        """The ranks that its ranks had in the group that this one was split from."""
        ...

    @property
    def tags(self) -> int:
        """How many tags of its own it has: greater ones are the same as smaller ones."""
        ...

    def accepts(self, device: str) -> bool:
        """Return whether `send` and `recv` take memory of this kind of device beside the host's. Alike on all ranks."""
        ...

    def send(self, peer: int, tag: int, data: Any) -> Request:
        """Post a send of `data` (bytes, contiguous), which must stay unchanged until the request is complete.

        It is a memoryview, or a Buffer of a device that this transport accepts; nothing queued may still write it.
        """
        ...

    def recv(self, peer: int, tag: int, into: Any) -> Request:
        """Post a receive into `into` (bytes, contiguous, writable) of a message that is no longer than that."""
        ...

    def recv_probed(self, peer: int, tag: int, into: Any) -> ProbedReceive:
        """Like `recv`, for a message that may be longer: it is then dropped, and `nbytes` is -1."""
        ...

    def wait(self, requests: Sequence[Request], on_wait: WaitHook) -> None:
        """Block until all are complete, with the GIL released, calling `on_wait` at least every 20 ms or so."""
        ...

    def wait_any(self, requests: Sequence[Request], on_wait: WaitHook) -> list[Request]:
        """Block like `wait` until at least one of these, which `send` or `recv` made, is complete; return those."""
        ...

    def persistent_round(self, sends: Sequence[Pieces], recvs: Sequence[Pieces], tag: int) -> PersistentRound:
        """Set up messages that all carry `tag`. Those received must be as long as is said here."""
        ...

    @property
    def functions(self) -> MessageFunctions | None:
        """What starts and tests persistent messages from compiled code; None where only Python can."""
        ...

    def persistent_send(self, peer: int, tag: int, data: memoryview) -> PersistentMessage:
        """Set up one message that is sent again and again. It matches `recv` and `persistent_recv`."""
        ...

    def persistent_recv(self, peer: int, tag: int, into: memoryview) -> PersistentMessage:
        """Set up the receive of messages that are no longer than `into`, which are taken in the order of `start`."""
        ...

    def progress(self) -> bool:
        """Let messages that are under way move on; return whether one is there that nobody receives yet.

        Never blocks.
        """
        ...

    def discard(self) -> None:
        """Take what has come in this space and nobody receives any more, as this rank leaves. Never blocks."""
        ...

    def space(self, space: Space) -> Transport:
        """Return the same group for messages of another space. Not collective; it is closed with this one."""
        ...

    def split(self, color: int, key: int) -> Transport | None:
        """Collective: the group of the ranks that gave the same `color`, ordered by `key`; None if color < 0."""
        ...

    def split_node(self) -> Transport:
        """Collective: the group of the ranks that can share memory with this one."""
        ...

    def among(self, ranks: Sequence[int]) -> Transport:
        """Return the group of some of the ranks, of which this one is one. Not collective; it is closed with this one.

        They must not send each other messages of both groups at the same time.
        """
        ...

    def share(self, nbytes: int, gather: Gather) -> SharedMemory:
        """Collective over a group that lies on one node: `nbytes` of zeroed shared memory for each rank.

        `gather` tells every rank's picklable value to all; it may raise to give up.
        """
        ...

    def close(self, *, met: bool = True) -> None:
        """Release the group. Collective. met: all ranks are here, so what was never received can be taken first."""
        ...

    @property
    def native(self) -> Any:
        """The mpi4py communicator underneath, or None where there is no MPI."""
        ...
