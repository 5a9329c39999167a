"""Transport: the interface between collectives and the library that moves bytes.

A `Transport` is one rank's endpoint in one group. It is independent of dtypes, verbs and schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from commlib.dtypes import Array
from commlib.errors import CommlibError
from commlib.protocols import SharedMemory

WaitHook = Callable[[], None]
"""Called repeatedly during a wait; an exception from it ends the wait."""


class Space(IntEnum):
    """Separate matching spaces for kinds of messages: messages of different spaces never match, for any tags."""

    COLLECTIVES, MESSAGES, CHECKS, CHANNELS = range(4)


Gather = Callable[[Any], list[Any]]

Pieces = tuple[int, Sequence[memoryview]]
"""A peer, and the pieces of memory from which one message is gathered, or to which it is scattered."""


class Request(Protocol):
    """One posted send or receive."""

    def test(self) -> bool:
        """Make progress; return True once complete. Raises TransportError."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes received or sent, valid once `test` has returned True; -1 if the message was too long."""
        ...

    def cancel(self) -> None:
        """Cancel the operation, as far as the transport can. Never blocks."""
        ...


class ProbedReceive(Request, Protocol):
    """A posted receive of a message of unknown length."""

    def withdraw(self) -> bool:
        """Retract the receive as if never posted, and return True; False if its message has begun to arrive."""
        ...


class MessageFunctions(NamedTuple):
    """C functions that start and test persistent messages, for compiled code.

    They are MPI's Startall and Testall: `int start(int count, void *handles)` and `int test(int count, void *handles,
    int *done, void *statuses)`, which return 0 on success. Any thread may call them, without the GIL. The Python
    function `failure` converts another return value to an error.
    """

    start: int
    test: int
    handle_bytes: int
    status_bytes: int
    failure: Callable[[int], CommlibError]


class PersistentRound(Protocol):
    """Messages that are sent and received repeatedly, from and into the same memory.

    handles: the handles for `Transport.functions`, as bytes.
    """

    handles: Array

    def run(self, on_wait: WaitHook) -> None:
        """Post all messages and wait until they are complete, as `Transport.wait` does."""
        ...

    def give_up(self) -> None:
        """Cancel messages in flight: later receives must not match them. Idempotent."""
        ...


class PersistentMessage(Protocol):
    """One message that is sent or received repeatedly, from or into the same memory. At most 1 GiB."""

    @property
    def handle_at(self) -> int:
        """The address of the handle for `Transport.functions`."""
        ...

    def start(self) -> None:
        """Post the message. Only while it is not in flight."""
        ...

    def test(self) -> bool:
        """Make progress; return True unless the message is in flight. Raises TransportError."""
        ...

    def close(self) -> None:
        """Cancel the message as far as the transport can, and release its resources. Never blocks. Idempotent."""
        ...


class Transport(Protocol):
    """Nonblocking point-to-point messages between the ranks of one group, and shared memory within a node."""

    rank: int
    size: int

    @property
    def members(self) -> Sequence[int]:
        """For each rank of this group, its rank in the group from which this one was split."""
        ...

    @property
    def tags(self) -> int:
        """The number of different tags; tags are equal modulo this number."""
        ...

    def accepts(self, device: str) -> bool:
        """Return whether `send` and `recv` accept memory of this kind of device. The same on all ranks."""
        ...

    def send(self, peer: int, tag: int, data: Any) -> Request:
        """Post a send of `data` (bytes, contiguous), which must stay unchanged until the request is complete.

        `data` is a memoryview, or a Buffer of a device that this transport accepts; no queued work may still write it.
        """
        ...

    def recv(self, peer: int, tag: int, into: Any) -> Request:
        """Post a receive into `into` (bytes, contiguous, writable); the message may not be longer than `into`."""
        ...

    def recv_probed(self, peer: int, tag: int, into: Any) -> ProbedReceive:
        """Like `recv`, but the message may be longer: it is then dropped, and `nbytes` is -1."""
        ...

    def wait(self, requests: Sequence[Request], on_wait: WaitHook) -> None:
        """Block until all requests are complete, with the GIL released, calling `on_wait` about every 20 ms."""
        ...

    def wait_any(self, requests: Sequence[Request], on_wait: WaitHook) -> list[Request]:
        """Block like `wait` until one of these requests of `send` or `recv` is complete; return all complete ones."""
        ...

    def persistent_round(self, sends: Sequence[Pieces], recvs: Sequence[Pieces], tag: int) -> PersistentRound:
        """Prepare messages that all carry `tag`. Received messages must have exactly the lengths given here."""
        ...

    @property
    def functions(self) -> MessageFunctions | None:
        """The functions for persistent messages in compiled code; None if only Python can start and test them."""
        ...

    def persistent_send(self, peer: int, tag: int, data: memoryview) -> PersistentMessage:
        """Prepare one message that is sent repeatedly. It matches `recv` and `persistent_recv`."""
        ...

    def persistent_recv(self, peer: int, tag: int, into: memoryview) -> PersistentMessage:
        """Prepare a receive of messages not longer than `into`. Messages match in the order of `start`."""
        ...

    def progress(self) -> bool:
        """Make progress on messages in flight; return whether a message has arrived without a posted receive.

        Never blocks.
        """
        ...

    def discard(self) -> None:
        """Receive and drop messages of this space that no receive will match, as this rank leaves. Never blocks."""
        ...

    def space(self, space: Space) -> Transport:
        """Return a transport of the same group for another space. Not collective; it is closed with this transport."""
        ...

    def split(self, color: int, key: int) -> Transport | None:
        """Collective: return the group of the ranks with the same `color`, ordered by `key`; None if color < 0."""
        ...

    def split_node(self) -> Transport:
        """Collective: return the group of the ranks that can share memory with this rank."""
        ...

    def among(self, ranks: Sequence[int]) -> Transport:
        """Return the group of some of the ranks, including this one. Not collective; it is closed with this transport.

        These ranks must not have messages of both groups in flight at the same time.
        """
        ...

    def share(self, nbytes: int, gather: Gather) -> SharedMemory:
        """Collective over a group on one node: return `nbytes` of zeroed shared memory per rank.

        `gather` all-gathers a picklable value of each rank; it may raise to cancel the call.
        """
        ...

    def close(self, *, synchronized: bool = True) -> None:
        """Release the group. Collective. synchronized: all ranks take part, and first receive unmatched messages."""
        ...

    @property
    def native(self) -> Any:
        """The underlying mpi4py communicator, or None without MPI."""
        ...
