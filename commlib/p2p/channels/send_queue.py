"""Send queue: asynchronous sends of a channel that wait for room on the other side.

The poller's thread sends them, where no signal handler can interrupt.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from commlib.dtypes import Array
from commlib.errors import CommlibError
from commlib.p2p.channels.connection import Connection
from commlib.p2p.channels.drain import peek
from commlib.process import forks
from commlib.runtime.work import Work
from commlib.transport.base import WaitHook
from commlib.transport.polling import poll


class SendQueue:
    """The sends of one channel that have not left yet, in order: `Connection.pending`."""

    __slots__ = ("_connection", "_end")

    def __init__(self, connection: Connection) -> None:
        self._connection, self._end = connection, connection.ends.outgoing

    def has_room(self, what: str) -> bool:
        """Return whether a send would leave immediately. what: the caller, for errors. Never blocks."""
        connection = self._connection
        with connection.guard(what, self._end):
            connection.refuse(what)
            is_connected = connection.look()
            connection.refuse_unreachable(what)
            return is_connected and not connection.pending and self._end.has_room()

    def await_room(self, what: str, timeout: float | None = None) -> None:
        """Wait until a send would not block, at most `timeout` seconds (StallError). what: the caller, for errors."""
        connection, end = self._connection, self._end
        ends = connection.ends
        if ends.is_connected and not ends.has_notified and not connection.pending and end.has_room():
            return
        with connection.guard(what, end, timeout) as on_wait:
            connection.await_receiver(what, on_wait)
            poll(lambda: not connection.pending and end.has_room(), on_wait)

    def submit(self, make: Callable[[], Array | None]) -> Work:
        """Start to send the array that `make` returns; None means that it is not ready yet.

        Another thread calls `make` repeatedly once there is room, until it returns an array.
        """
        connection = self._connection
        what = f"send on {connection.text}"
        with connection.guard(what, self._end) as on_wait:
            connection.refuse(what)
            work = QueuedSend(what, make, on_wait, self)
            try:
                self._end.flag.defer(yes=True)
                connection.pending.append(work)
                connection.group.runtime.poller.watch(SendPoll(work), connection.group)
            except BaseException as error:  # from a signal handler: the work may be queued without a poller to send it
                connection.abandon(what, error)
                raise
        return work

    def send(self) -> None:
        """Send pending messages while there is room. Never blocks, never raises."""
        connection, end = self._connection, self._end
        try:
            while (work := peek(connection.pending)) is not None:
                work.watch()
                if not connection.ends.try_connect(connection.group, connection.text):
                    return
                connection.refuse_unreachable(work.description)
                if not end.has_room() or (array := work.make_array()) is None:
                    return
                end.send(array, work.description, _raise_no_room)
                with suppress(ValueError):  # another thread has failed it
                    connection.pending.remove(work)
                    work.finish()
            end.flag.defer(yes=False)
            connection.progress.sent()
        except _NoRoomError:  # another thread was faster
            pass
        except CommlibError as error:
            connection.fail(error)
            connection.end_pending(error)

    def await_end(self, work: QueuedSend, timeout: float | None) -> None:
        """Wait until a pending send has left or failed."""
        with self._connection.guard(work.description, self._end, timeout) as on_wait:
            poll(lambda: work.has_ended, on_wait)


class QueuedSend(Work):
    """A send that the poller will do.

    make: returns the array, or None while it is not ready. watch: raises if the send has become impossible.
    """

    __slots__ = ("_make", "_queue", "array", "watch")

    def __init__(self, description: str, make: Callable[[], Array | None], watch: WaitHook, queue: SendQueue) -> None:
        super().__init__(description)
        self._make, self.watch, self._queue = make, watch, queue
        self.array: Array | None = None

    def make_array(self) -> Array | None:
        """Return the array to send, made only once; None while it is not ready."""
        if self.array is None:
            self.array = self._make()
        return self.array

    @property
    def has_ended(self) -> bool:
        """Whether the send has left or failed."""
        return super().done()

    def poll(self) -> bool:
        """Make progress, on the poller's thread; return whether the send has left or failed."""
        if not self.has_ended and not forks.is_child():
            self._queue.send()
        return self.has_ended

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the send has left, at most `timeout` seconds; see `Work.wait`."""
        if not self.has_ended:
            forks.check(self.description)
            self._queue.await_end(self, timeout)
        return super().wait(0)


class SendPoll:
    """The poller's view of a queued send. Users call the send's own methods."""

    __slots__ = ("description", "done")

    def __init__(self, work: QueuedSend) -> None:
        self.description, self.done = work.description, work.poll


class _NoRoomError(Exception):
    """There is no room for the next message."""


def _raise_no_room() -> None:
    raise _NoRoomError
