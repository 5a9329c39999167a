"""Channel: ordered messages of arrays between two ranks, in both directions, without any collective."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from numpy import ndarray

from commlib.buffers.views import as_host, contiguous
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import as_view
from commlib.dtypes import Array
from commlib.errors import CommlibError, PeerError, ShutdownError, StallError, TransportError, UsageError
from commlib.p2p.channels.drain import drain, peek
from commlib.p2p.channels.ends import ChannelEnds
from commlib.p2p.channels.payload import Shape
from commlib.p2p.channels.progress import ChannelProgress
from commlib.p2p.channels.queued_send import QueuedSend, SendPoll
from commlib.p2p.channels.send_checks import check_sendable
from commlib.p2p.lanes.staging import stage_to_host
from commlib.process import forks
from commlib.runtime.work import Work
from commlib.transport.base import WaitHook
from commlib.transport.polling import poll

if TYPE_CHECKING:
    from commlib.group.group import Group


class Owner(Protocol):
    """The owner of a group's channels."""

    def look(self, peer: int) -> None:
        """Poll for the control messages of another rank, and free unused channels. Never blocks."""
        ...

    def end(self, ends: ChannelEnds, reason: str) -> None:
        """Notify the other side that this side has ended, and free its memory. Idempotent."""
        ...


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
        "__weakref__",
        "_channels",
        "_failure",
        "_free_slot",
        "_group",
        "_hand_back",
        "_in",
        "_is_closed",
        "_lent",
        "_out",
        "_pumps",
        "_put",
        "_queue",
        "_take",
        "_views",
        "depth",
        "dtype",
        "edge",
        "ends",
        "peer",
        "purpose",
        "text",
    )

    def __init__(self, group: Group, channels: Owner, ends: ChannelEnds, text: str) -> None:
        self._group, self._channels, self.ends, self.text = group, channels, ends, text
        self.peer, self.edge = ends.address.peer, ends.address.edge
        self.dtype, self.depth = ends.dtype, ends.terms.depth
        self._put, self._out = ends.outgoing.put, ends.outgoing.at
        self._take, self._in, self._views = ends.incoming.take, ends.incoming.at, ends.incoming.views
        self._free_slot, self._lent = ends.outgoing.free_slot, ends.outgoing.buffers
        self._hand_back = ends.incoming.hand_back
        self._failure: CommlibError | None = None
        self._is_closed = False
        self.purpose: Callable[[], str] = str
        """Returns a text for the end of warnings and errors: the purpose of the wait."""
        self._queue: deque[QueuedSend] = deque()
        self._pumps = ChannelProgress(group, ends, text)
        self._pumps.received()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "failed" if self._failure else f"{self.ends.terms}"
        return f"<Channel {self.edge!r} of {self._group.name}, rank {self._group.rank} with rank {self.peer}: {state}>"

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
                    self._pumps.sent(lags=True)
                return
        except BaseException as error:
            self._abandon(f"send on {self.text}", error)
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
                self._pumps.received()  # a large message
                return self._views[slot - self.depth]
        except BaseException as error:
            self._abandon(f"recv on {self.text}", error)
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
        if self.has_room(what):
            with self._guarded(what, end) as watch:
                end.send(array, what, watch())
            self._pumps.sent()
            return Work.ended(what, None)
        return self.send_later(lambda: array)

    def send_later(self, make: Callable[[], Array | None]) -> Work:
        """Start to send the array that `make` returns; None means that it is not ready yet.

        Another thread calls `make` repeatedly once there is room, until it returns an array.
        """
        what, end = f"send on {self.text}", self.ends.outgoing
        with self._guarded(what, end) as watch:
            self._refuse(what)
            work = QueuedSend(what, make, watch(), self._move, self._await)
            try:
                end.flag.defer(yes=True)
                self._queue.append(work)
                self._group.runtime.poller.watch(SendPoll(work), self._group)
            except BaseException as error:  # from a signal handler: the work may be queued without a poller to send it
                self._abandon(what, error)
                raise
        return work

    def has_room(self, what: str) -> bool:
        """Return whether `send` would return immediately. what: the caller, for errors. Never blocks."""
        end = self.ends.outgoing
        with self._guarded(what, end):
            self._refuse(what)
            self._channels.look(self.peer)
            is_connected = self.ends.try_connect(self._group, self.text)
            self._refuse_unreachable(what)
            return is_connected and not self._queue and end.has_room()

    def await_room(self, what: str, timeout: float | None = None) -> None:
        """Wait until `send` would not block, at most `timeout` seconds (StallError). what: the caller, for errors."""
        end = self.ends.outgoing
        if self.ends.is_connected and not self.ends.has_notified and not self._queue and end.has_room():
            return
        with self._guarded(what, end) as watch:
            on_wait = watch(timeout)
            self._connect(what, on_wait)
            self._refuse_unreachable(what)
            poll(lambda: not self._queue and end.has_room(), on_wait)

    def flush(self, timeout: float) -> None:
        """Wait until all sends of `send_later` have left, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._queue and self._failure is None and time.monotonic() < deadline:
            time.sleep(1e-4)

    def connect(self, what: str, timeout: float | None = None) -> None:
        """Wait until the other side has opened the channel, at most `timeout` seconds (StallError)."""
        if self.ends.is_connected and not self.ends.has_notified:
            return
        with self._guarded(what, self.ends.outgoing) as watch:
            self._connect(what, watch(timeout))

    def give_up(self, what: str, error: BaseException) -> None:
        """Fail the channel, because `error` ended a call half-way."""
        if isinstance(error, CommlibError):
            self._fail(error)
        else:
            self._abandon(what, error)

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
        with self._guarded(what, end) as watch:
            on_wait = watch()
            self._connect(what, on_wait)
            self._refuse_unreachable(what)
            poll(lambda: not self._queue, on_wait)
            return end.buffer(lengths, on_wait)

    def ready(self) -> bool:
        """Return whether `recv` would return immediately. Never blocks.

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "ready", 1)
            >>> isinstance(edge.ready(), bool)
            True
        """
        what = f"ready on {self.text}"
        with self._guarded(what, self.ends.incoming):
            self._refuse(what)
            self._channels.look(self.peer)
            return self.ends.try_connect(self._group, self.text) and self.ends.incoming.has_arrived()

    def close(self, reason: str = "has closed this channel") -> None:
        """End this side. Idempotent. The other side can receive earlier messages; later calls there report `reason`.

        Args:
            reason: The text of the error of later calls on the other side.

        Examples:
            >>> edge = comm.channel(1 - comm.rank, "close", 1)
            >>> comm.barrier()
            >>> edge.close()
        """
        if self._is_closed or forks.is_child():
            return
        self._is_closed = True
        error = ShutdownError(f"{self._group.name}: {self.text}: closed before it was sent")
        self._end_queue(error)
        self._channels.end(self.ends, reason)

    # Checks, waits and failures

    def _check_array(self, x: Any) -> Array:
        array = as_view(x, "send")
        check_sendable(array, self.dtype, self.text)
        if type(array) is DeviceArray:
            return stage_to_host(self._group.waits, array, f"send on {self.text}")
        return contiguous(array, "send")

    def _send(self, x: Any, timeout: float | None) -> None:
        what, end = f"send on {self.text}{self.purpose()}", self.ends.outgoing
        array = self._check_array(x)
        with self._guarded(what, end) as watch:
            on_wait = watch(timeout)
            self._connect(what, on_wait)
            self._refuse_unreachable(what)
            if self._queue:
                poll(lambda: not self._queue, on_wait)
            end.send(array, what, on_wait)
        self._pumps.sent()

    def _recv(self, timeout: float | None) -> Array:
        what, end = f"recv on {self.text}{self.purpose()}", self.ends.incoming
        with self._guarded(what, end) as watch:
            on_wait = watch(timeout)
            self._connect(what, on_wait)
            view = end.recv(what, on_wait)
            if view is None:
                self._refuse(what)
                raise ShutdownError(f"{self._group.name}: {what}: the channel has ended")
        self._pumps.received()
        return view

    def _release(self, view: Any) -> None:
        if view is not None:
            view = as_host(view, "release", "view")
        what, end = f"release on {self.text}", self.ends.incoming
        with self._guarded(what, end):
            was_received = end.release(view)
        if not was_received:
            raise UsageError(
                f"{what}: the array is not a received message of this channel, or was already released: "
                "pass the array that recv returned"
            )
        self._pumps.received()

    def _connect(self, what: str, on_wait: WaitHook) -> None:
        """Wait until the other side has opened the channel. Raises MismatchError if it did so differently."""
        self._refuse(what)

        if not self.ends.is_connected:
            self.ends.mailbox.expect(self.ends.address)
            poll(lambda: self.ends.try_connect(self._group, self.text), on_wait)

    def _refuse(self, what: str) -> None:
        """Raise the earlier failure of the channel or the group, if there is one."""
        forks.check(what)
        if self._failure is not None:
            self._raise_failure(what)
        if self._group.failure is not None:
            self._group.raise_failure(what)
        if self._is_closed:
            raise UsageError(f"{what}: it was closed on rank {self._group.rank}: open it again, on both sides")
        if self._group.runtime.closing:
            raise ShutdownError(f"{self._group.name}: {what}: commlib has been shut down")

    def _refuse_unreachable(self, what: str) -> None:
        """Raise an error if the other side can no longer receive messages."""
        if (bye := self.ends.bye()) is not None:
            self._raise_closed(what, bye)
        if self.ends.unreachable:
            raise TransportError(f"{self._group.name}: {what}: {self.ends.unreachable}")

    def _raise_failure(self, what: str) -> NoReturn:
        assert self._failure is not None
        error = type(self._failure)(str(self._failure))  # a new error: the old one would collect tracebacks
        error.missing = self._failure.missing
        error.add_note(f"commlib: {what}: not run on rank {self._group.rank}: an earlier call failed")
        raise error

    def _raise_closed(self, what: str, bye: Any) -> NoReturn:
        self.ends.outgoing.flag.halt(yes=True)
        error = PeerError(
            f"{self._group.name}: {what}: rank {self._group.rank}: waited for a rank that will never arrive: rank "
            f"{self.peer} {bye['why']}"
        )
        error.missing = {self.peer: bye["why"]}
        raise error

    def _watch(self, what: str, end: Any, timeout: float | None, mild: list[BaseException]) -> WaitHook:
        """Return the wait hook of a call. It appends its errors to `mild` if they do not damage the channel."""
        watch = self._group.waits.watch(what, [self.peer])
        deadline = None if timeout is None else time.monotonic() + timeout

        def on_wait() -> None:
            self._refuse(what)
            self._channels.look(self.peer)
            self.ends.try_connect(self._group, self.text)  # a mismatch takes precedence
            bye = self.ends.bye()
            # Messages that were sent before the end can still be received.
            if bye is not None and (end is self.ends.outgoing or end.count >= bye["sent"]) and not _has_arrived(end):
                try:
                    self._raise_closed(what, bye)
                except PeerError as error:
                    mild.append(error)
                    raise
            watch()
            if deadline is not None and time.monotonic() > deadline:
                late = StallError(f"{self._group.name}: {what}: not done after {timeout} s; the call can be repeated")
                mild.append(late)
                raise late

        return on_wait

    @contextmanager
    def _guarded(self, what: str, end: Any) -> Iterator[Callable[..., WaitHook]]:
        """Fail the channel with the error of a call, unless the call has changed nothing.

        Yields a function that makes the call's wait hook.
        """
        before, mild = end.count, list[BaseException]()
        try:
            yield lambda timeout=None: self._watch(what, end, timeout, mild)
        except UsageError:
            raise
        except CommlibError as error:
            if error not in mild:
                self._fail(error)
            raise
        except BaseException as error:
            if end.count != before or end.is_half_way:
                self._abandon(what, error)
            raise

    def _abandon(self, what: str, error: BaseException) -> None:
        """Fail the channel, because a foreign exception ended a call, perhaps half-way."""
        if isinstance(error, CommlibError):
            return
        # An interrupted `with` raises GeneratorExit instead of the exception that interrupted it.
        name = "an exception" if isinstance(error, GeneratorExit) else type(error).__name__
        text = f"{self._group.name}: {what}: rank {self._group.rank}: ended half-way by {name}"
        self._fail(ShutdownError(f"{text}; {self.text} runs no more calls"))
        error.add_note(f"commlib: {text}; the other rank is notified: close and reopen the channel on both sides")

    def _fail(self, error: CommlibError) -> None:
        """Fail all later calls, on both sides."""
        if self._failure is None:
            self._failure = error
            self.ends.halt()
            self.ends.notify(f"has given up this channel ({type(error).__name__}: {error})", failed=True)
            self._end_queue(error)

    # Queued sends. The poller's thread sends them, where no signal handler can interrupt

    def _move(self) -> bool:
        """Send queued messages while there is room; return whether the queue is done. Never blocks, never raises."""
        end, queue = self.ends.outgoing, self._queue
        try:
            while (work := peek(queue)) is not None:
                work.watch()
                if not self.ends.try_connect(self._group, self.text):
                    return False
                self._refuse_unreachable(work.description)
                if not end.has_room() or (array := work.make_array()) is None:
                    return False
                end.send(array, work.description, _raise_no_room)
                with suppress(ValueError):  # another thread has failed it
                    queue.remove(work)
                    work.finish()
            end.flag.defer(yes=False)
            self._pumps.sent()
        except _NoRoomError:  # another thread was faster
            return False
        except CommlibError as error:
            self._fail(error)
            self._end_queue(error)
        return True

    def _end_queue(self, error: CommlibError) -> None:
        for work in drain(self._queue):
            work.finish(error=error)

    def _await(self, work: QueuedSend, timeout: float | None) -> None:
        """Wait until a queued send has left or failed."""
        with self._guarded(work.description, self.ends.outgoing) as watch:
            poll(lambda: work.has_ended, watch(timeout))


class _NoRoomError(Exception):
    """There is no room for the next message."""


def _raise_no_room() -> None:
    raise _NoRoomError


def _has_arrived(end: Any) -> bool:
    return hasattr(end, "has_arrived") and end.has_arrived()
