"""Channel: ordered messages of arrays between two ranks, in both directions, without any collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy import ndarray

from commlib.buffers.views import as_host, contiguous
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import as_view
from commlib.dtypes import Array
from commlib.errors import ShutdownError, UsageError
from commlib.p2p.channels.connection import Connection
from commlib.p2p.channels.payload import Shape
from commlib.p2p.channels.send_checks import check_sendable
from commlib.p2p.channels.send_queue import SendQueue
from commlib.p2p.lanes.staging import stage_to_host
from commlib.runtime.work import Work
from commlib.transport.polling import poll


class Channel:
    """One rank's side of an edge. `Communicator.channel` opens it, on both ranks of the edge.

    Each direction has `depth` slots: `send` waits while the other side holds that many unreleased messages. `recv`
    returns a view of the slot that the other rank has written, with the channel's dtype and the message's shape. The
    caller may read and write the view until `release`; after that a later message may overwrite it. Each message may
    have a different shape. Different threads may send and receive at the same time.

    Errors are as for collectives: MismatchError if the two sides opened the channel differently, PeerError if the
    other rank has ended or has abandoned the channel, StallError after COMMLIB_TIMEOUT, ShutdownError after `shutdown`.
    After any error but UsageError the channel fails in both directions, on both ranks. The group and its other channels
    stay usable.
    """

    __slots__ = (
        "_free_slot", "_hand_back", "_in", "_lent", "_out", "_progress", "_put", "_take", "_views",
        "connection", "depth", "dtype", "edge", "ends", "peer", "purpose", "queue", "text",
    )  # fmt: skip

    def __init__(self, connection: Connection) -> None:
        self.connection, self.queue = connection, SendQueue(connection)
        self.ends = ends = connection.ends
        self.text, self.peer, self.edge = connection.text, connection.peer, ends.address.edge
        self.dtype, self.depth = ends.dtype, ends.terms.depth
        self._put, self._out = ends.outgoing.put, ends.outgoing.at
        self._take, self._in, self._views = ends.incoming.take, ends.incoming.at, ends.incoming.views
        self._free_slot, self._lent = ends.outgoing.free_slot, ends.outgoing.buffers
        self._hand_back, self._progress = ends.incoming.hand_back, connection.progress
        self.purpose: Callable[[], str] = str
        """Returns a text for the end of warnings and errors: the purpose of the wait."""

    def __repr__(self) -> str:
        connection, group = self.connection, self.connection.group
        state = "closed" if connection.is_closed else "failed" if connection.failure else f"{self.ends.terms}"
        return f"<Channel {self.edge!r} of {group.name}, rank {group.rank} with rank {self.peer}: {state}>"

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Public methods. Most messages need only the first, compiled call

    def send(self, x: Any, timeout: float | None = None) -> None:
        """Send an array of the channel's dtype, of any shape. The caller may change the array when `send` returns.

        Waits while all slots of the other side are in use. An array from `buffer` is sent without a copy. A device
        array is copied to the host first, and `recv` returns a host array.

        Args:
            x: An array of the channel's dtype, of any shape.
            timeout: Seconds; None: without a limit.

        Raises:
            StallError: After the timeout; nothing was sent.

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "send", 2)
            >>> edge.send(np.ones(2, np.float32))
            >>> edge.recv()
            array([1., 1.], dtype=float32)
        """
        try:
            if type(x) is ndarray and (status := self._put(self._out, id(x))) >= 0:
                if status:  # the message has not left yet
                    self._progress.sent(lags=True)
                return
        except BaseException as error:
            self.connection.abandon(f"send on {self.text}", error)
            raise
        self._send(x, timeout)

    def recv(self, timeout: float | None = None) -> Array:
        """Receive the next message and return a view of it, valid until `release`.

        Args:
            timeout: Seconds; None: without a limit.

        Raises:
            StallError: After the timeout; nothing was received.
            UsageError: If `depth` messages were received and not released.

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "recv", 1)
            >>> edge.send(np.array([7], np.float32))
            >>> float(edge.recv()[0])
            7.0
        """
        try:
            slot = self._take(self._in)
            if slot >= 0:
                if slot < self.depth:
                    return self._views[slot]
                self._progress.received()  # a large message
                return self._views[slot - self.depth]
        except BaseException as error:
            self.connection.abandon(f"recv on {self.text}", error)
            raise
        return self._recv(timeout)

    def release(self, view: Array | None = None) -> None:
        """Release an array that `recv` returned (or a view of it), so that a later message can use its slot.

        Args:
            view: An array that `recv` returned, or a view of it; None: all received messages.

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "release", 1)
            >>> edge.send(np.zeros(1, np.float32))
            >>> edge.release(edge.recv())
        """
        if view is None:
            if not self._hand_back(self._in, 0):
                return
        elif type(view) is ndarray and not self._hand_back(self._in, id(view)):
            return
        self._release(view)

    def send_async(self, x: Any) -> Work:
        """Start `send`. Do not change the array until the work is done. Later sends keep the order."""
        what, end = f"send on {self.text}", self.ends.outgoing
        array = self._check_array(x)
        if not self.queue.has_room(what):
            return self.queue.submit(lambda: array)
        with self.connection.guard(what, end) as on_wait:
            end.send(array, what, on_wait)
        self._progress.sent()
        return Work.ended(what, None)

    def buffer(self, shape: int | Shape | None = None) -> Array:
        """Return an array for the next message (default: of the last shape sent), which `send` does not copy.

        The array is the next free slot of the other side. Write all of it, and send it before any other message. If the
        shape is larger than all before, the array is ordinary memory, which `send` copies.

        Args:
            shape: The lengths of the message; None: the same as the last message sent.

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "buffer", 3)
            >>> message = edge.buffer()
            >>> message[:] = 2
            >>> edge.send(message)  # without a copy
            >>> edge.recv()
            array([2., 2., 2.], dtype=float32)
        """
        if shape is None and (slot := self._free_slot(self._out)) >= 0:
            return self._lent[slot]
        what, end = f"buffer of {self.text}{self.purpose()}", self.ends.outgoing
        lengths = end.shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        connection = self.connection
        with connection.guard(what, end) as on_wait:
            connection.await_receiver(what, on_wait)
            poll(lambda: not connection.pending, on_wait)
            return end.buffer(lengths, on_wait)

    def ready(self) -> bool:
        """Return whether `recv` would return immediately. Never blocks.

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "ready", 1)
            >>> isinstance(edge.ready(), bool)
            True
        """
        what = f"ready on {self.text}"
        with self.connection.guard(what, self.ends.incoming):
            self.connection.refuse(what)
            return self.connection.look() and self.ends.incoming.has_arrived()

    def close(self, reason: str = "has closed this channel") -> None:
        """End this side. Idempotent. The other side can receive earlier messages; later calls there report `reason`.

        Args:
            reason: The text of the error of later calls on the other side.

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "close", 1)
            >>> comm.barrier()
            >>> edge.close()
        """
        self.connection.close(reason)

    # Messages that need Python

    def _check_array(self, x: Any) -> Array:
        array = as_view(x, "send")
        check_sendable(array, self.dtype, self.text)
        if type(array) is DeviceArray:
            return stage_to_host(self.connection.group.waits, array, f"send on {self.text}")
        return contiguous(array, "send")

    def _send(self, x: Any, timeout: float | None) -> None:
        what, end, connection = f"send on {self.text}{self.purpose()}", self.ends.outgoing, self.connection
        array = self._check_array(x)
        with connection.guard(what, end, timeout) as on_wait:
            connection.await_receiver(what, on_wait)
            if connection.pending:
                poll(lambda: not connection.pending, on_wait)
            end.send(array, what, on_wait)
        self._progress.sent()

    def _recv(self, timeout: float | None) -> Array:
        what, end, connection = f"recv on {self.text}{self.purpose()}", self.ends.incoming, self.connection
        with connection.guard(what, end, timeout) as on_wait:
            connection.await_peer(what, on_wait)
            view = end.recv(what, on_wait)
            if view is None:
                connection.refuse(what)
                raise ShutdownError(f"{connection.group.name}: {what}: the channel has ended")
        self._progress.received()
        return view

    def _release(self, view: Any) -> None:
        if view is not None:
            view = as_host(view, "release", "view")
        what, end = f"release on {self.text}", self.ends.incoming
        with self.connection.guard(what, end):
            was_received = end.release(view)
        if not was_received:
            raise UsageError(
                f"{what}: the array is not a received message of this channel, or was already released: "
                "pass the array that recv returned"
            )
        self._progress.received()
