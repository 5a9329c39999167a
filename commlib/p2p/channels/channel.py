"""Channel: send arrays between two ranks, in both directions, in order, without any collective."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from numpy import ndarray

from commlib.buffers.views import as_host, contiguous
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import viewed
from commlib.dtypes import Array
from commlib.errors import CommlibError, PeerError, ShutdownError, StallError, TransportError, UsageError
from commlib.p2p.channels.ends import Ends
from commlib.p2p.channels.payload import Shape
from commlib.p2p.channels.progress import Pumps
from commlib.p2p.channels.queued import Queued, Sending
from commlib.p2p.channels.sendable import check_sendable
from commlib.p2p.channels.taken import first, taken
from commlib.p2p.lanes.staging import fetched
from commlib.process import forks
from commlib.runtime.work import Work
from commlib.transport.base import WaitHook
from commlib.transport.polling import poll

if TYPE_CHECKING:
    from commlib.group.group import Group


class Owner(Protocol):
    """Keep a group's channels."""

    def look(self, peer: int) -> None:
        """Ask for what another rank has told, and give back what is used no more. Never blocks."""
        ...

    def end(self, ends: Ends, reason: str) -> None:
        """Tell the other side that this one takes part no more, and give back what it has. Idempotent."""
        ...


class Channel:
    """One rank's side of an edge. `Communicator.channel` makes it, on both ranks of the edge.

    Up to `depth` messages are on their way in each direction: `send` waits while the other side has as many that it has
    not handed back. `recv` gives a view of the memory into which the other rank has written: of the dtype, and of the
    shape that was sent. It may be read and written until it is handed back by `release`; what it shows afterwards is a
    later message. The shape may be another one in each message. Different threads may send and receive at once.

    Raises as collectives do: MismatchError if the two sides were opened differently, PeerError if the other rank is
    gone or has given up the channel, StallError after COMMLIB_TIMEOUT, ShutdownError after `shutdown`. After any but
    UsageError the channel fails in both directions, on both ranks; the group and its other channels do not.
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

    def __init__(self, group: Group, channels: Owner, ends: Ends, text: str) -> None:
        self._group, self._channels, self.ends, self.text = group, channels, ends, text
        self.peer, self.edge = ends.address.peer, ends.address.edge
        self.dtype, self.depth = ends.dtype, ends.terms.depth
        self._put, self._out = ends.outgoing.put, ends.outgoing.at
        self._take, self._in, self._views = ends.incoming.take, ends.incoming.at, ends.incoming.views
        self._free_slot, self._lent = ends.outgoing.free_slot, ends.outgoing.lent
        self._hand_back = ends.incoming.hand_back
        self._failure: CommlibError | None = None
        self._is_closed = False
        self.purpose: Callable[[], str] = str
        """Says at the end of warnings and errors what a wait is for."""
        self._queue: deque[Queued] = deque()
        self._pumps = Pumps(group, ends, text)
        self._pumps.received()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "failed" if self._failure else f"{self.ends.terms}"
        return f"<Channel {self.edge!r} of {self._group.name}, rank {self._group.rank} with rank {self.peer}: {state}>"

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # What users call; first what a message mostly needs: one compiled call

    def send(self, x: Any, timeout: float | None = None) -> None:
        """Send an array of the channel's dtype, of any shape. Returns when it may be changed.

        Waits while all slots of the other side are taken, at most `timeout` seconds: StallError, and nothing was sent.
        What `buffer` gave is sent without a copy, an array of a device by way of one on the host, where `recv` has it.
        """
        try:
            if type(x) is ndarray and (status := self._put(self._out, id(x))) >= 0:
                if status:  # it has not left yet
                    self._pumps.sent(lags=True)
                return
        except BaseException as error:
            self._abandon(f"send on {self.text}", error)
            raise
        self._send(x, timeout)

    def recv(self, timeout: float | None = None) -> Array:
        """Receive the next message, and return a view of it, which `release` hands back.

        Waits for it, at most `timeout` seconds: StallError, and nothing was received. Raises UsageError if `depth`
        messages have been received and not handed back.
        """
        try:
            slot = self._take(self._in)
            if slot >= 0:
                if slot < self.depth:
                    return self._views[slot]
                self._pumps.received()  # a large one
                return self._views[slot - self.depth]
        except BaseException as error:
            self._abandon(f"recv on {self.text}", error)
            raise
        return self._recv(timeout)

    def release(self, view: Array | None = None) -> None:
        """Hand back what `recv` returned (or a view of it): its memory is then free for a later message.

        Without a view: hand back everything that has been received.
        """
        if view is None:
            if not self._hand_back(self._in, 0):
                return
        elif type(view) is ndarray and not self._hand_back(self._in, id(view)):
            return
        self._release(view)

    def send_async(self, x: Any) -> Work:
        """Start `send`. The array must not be changed until the work is done; later sends go after it."""
        what, end = f"send on {self.text}", self.ends.outgoing
        array = self._checked(x)
        if self.has_room(what):
            with self._guarded(what, end) as watch:
                end.send(array, what, watch())
            self._pumps.sent()
            return Work.ended(what, None)
        return self.send_later(lambda: array)

    def send_later(self, make: Callable[[], Array | None]) -> Work:
        """Start to send what `make` returns: an array as `send` takes it, or None while that is not there yet.

        It is asked on another thread, once there is room, until it has returned an array.
        """
        what, end = f"send on {self.text}", self.ends.outgoing
        with self._guarded(what, end) as watch:
            self._refuse(what)
            work = Queued(what, make, watch(), self._move, self._await)
            try:
                end.defer(yes=True)
                self._queue.append(work)
                self._group.runtime.poller.watch(Sending(work), self._group)
            except BaseException as error:  # a signal handler's: perhaps it is in the queue, and nobody would send it
                self._abandon(what, error)
                raise
        return work

    def has_room(self, what: str) -> bool:
        """Return whether `send` would return at once. what: why it is asked. Never blocks."""
        end = self.ends.outgoing
        with self._guarded(what, end):
            self._refuse(what)
            self._channels.look(self.peer)
            is_connected = self.ends.try_connect(self._group, self.text)
            self._refuse_unreachable(what)
            return is_connected and not self._queue and end.has_room()

    def await_room(self, what: str, timeout: float | None = None) -> None:
        """Wait until `send` would return at once, at most `timeout` seconds: StallError. what: it is waited for."""
        end = self.ends.outgoing
        if self.ends.is_connected and not self.ends.has_told and not self._queue and end.has_room():
            return
        with self._guarded(what, end) as watch:
            on_wait = watch(timeout)
            self._connect(what, on_wait)
            self._refuse_unreachable(what)
            poll(lambda: not self._queue and end.has_room(), on_wait)

    def flush(self, timeout: float) -> None:
        """Wait until what `send_later` has queued is sent, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self._queue and self._failure is None and time.monotonic() < deadline:
            time.sleep(1e-4)

    def connect(self, what: str, timeout: float | None = None) -> None:
        """Wait until the other side has opened the channel, too, at most `timeout` seconds: StallError."""
        if self.ends.is_connected and not self.ends.has_told:
            return
        with self._guarded(what, self.ends.outgoing) as watch:
            self._connect(what, watch(timeout))

    def give_up(self, what: str, error: BaseException) -> None:
        """Let the channel fail because `error` came out of a call half-way."""
        if isinstance(error, CommlibError):
            self._fail(error)
        else:
            self._abandon(what, error)

    def buffer(self, shape: int | Shape | None = None) -> Array:
        """Return an array to write the next message to (default: of the last shape sent). `send` does not copy it.

        It is memory of the other side, once that is free: write all of it, and send it before anything else. A shape
        that is larger than all before gives ordinary memory, which `send` copies.
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
        """Return whether `recv` would return at once. Never blocks."""
        what = f"ready on {self.text}"
        with self._guarded(what, self.ends.incoming):
            self._refuse(what)
            self._channels.look(self.peer)
            return self.ends.try_connect(self._group, self.text) and self.ends.incoming.has_come()

    def close(self, reason: str = "has closed this channel") -> None:
        """End this side. Idempotent. The other side can still receive what was sent; then it is told `reason`."""
        if self._is_closed or forks.is_child():
            return
        self._is_closed = True
        error = ShutdownError(f"{self._group.name}: {self.text}: closed before it was sent")
        self._end_queue(error)
        self._channels.end(self.ends, reason)

    # The rest: what is checked, waits and failures

    def _checked(self, x: Any) -> Array:
        array = viewed(x, "send")
        check_sendable(array, self.dtype, self.text)
        if type(array) is DeviceArray:
            return fetched(self._group, array, f"send on {self.text}")
        return contiguous(array, "send")

    def _send(self, x: Any, timeout: float | None) -> None:
        what, end = f"send on {self.text}{self.purpose()}", self.ends.outgoing
        array = self._checked(x)
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
                f"{what}: the array is no message that was received here, or was handed back before: "
                "pass what recv returned"
            )
        self._pumps.received()

    def _connect(self, what: str, on_wait: WaitHook) -> None:
        """Wait until the other side has opened the channel, too. Raises MismatchError if differently."""
        self._refuse(what)

        if not self.ends.is_connected:
            self.ends.mailbox.expect(self.ends.address)
            poll(lambda: self.ends.try_connect(self._group, self.text), on_wait)

    def _refuse(self, what: str) -> None:
        """Raise what the channel, or all of commlib here, has failed with before."""
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
        """Raise an error if nothing that is sent can be received any more."""
        if (bye := self.ends.bye()) is not None:
            self._raise_gone(what, bye)
        if self.ends.unreachable:
            raise TransportError(f"{self._group.name}: {what}: {self.ends.unreachable}")

    def _raise_failure(self, what: str) -> NoReturn:
        assert self._failure is not None
        error = type(self._failure)(str(self._failure))  # a new one: each would add its traceback to the same
        error.missing = self._failure.missing
        error.add_note(f"commlib: {what}: not run on rank {self._group.rank}: an earlier call failed")
        raise error

    def _raise_gone(self, what: str, bye: Any) -> NoReturn:
        self.ends.outgoing.halt(yes=True)
        error = PeerError(
            f"{self._group.name}: {what}: rank {self._group.rank}: waited for a rank that will not come: rank "
            f"{self.peer} {bye['why']}"
        )
        error.missing = {self.peer: bye["why"]}
        raise error

    def _watch(self, what: str, end: Any, timeout: float | None, mild: list[BaseException]) -> WaitHook:
        """Return what looks around in a wait. It appends to `mild` what it raises without harm to the channel."""
        watch = self._group.watch(what, [self.peer])
        deadline = None if timeout is None else time.monotonic() + timeout

        def on_wait() -> None:
            self._refuse(what)
            self._channels.look(self.peer)
            self.ends.try_connect(self._group, self.text)  # if they disagree, that comes first
            bye = self.ends.bye()
            # What was sent before is still to be received.
            if bye is not None and (end is self.ends.outgoing or end.count >= bye["sent"]) and not _has_come(end):
                try:
                    self._raise_gone(what, bye)
                except PeerError as error:
                    mild.append(error)
                    raise
            watch()
            if deadline is not None and time.monotonic() > deadline:
                late = StallError(f"{self._group.name}: {what}: not done after {timeout} s; it can be called again")
                mild.append(late)
                raise late

        return on_wait

    @contextmanager
    def _guarded(self, what: str, end: Any) -> Iterator[Callable[..., WaitHook]]:
        """Let the channel fail with what a call raises, unless it is known to have left everything as it was.

        Yields what makes the `on_wait` of the call.
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
        """Let the channel fail because an exception that is none of ours came out of a call, perhaps half-way."""
        if isinstance(error, CommlibError):
            return
        # Out of a `with` that has been interrupted itself comes another exception than the one that interrupted it.
        name = "an exception" if isinstance(error, GeneratorExit) else type(error).__name__
        text = f"{self._group.name}: {what}: rank {self._group.rank}: ended half-way by {name}"
        self._fail(ShutdownError(f"{text}; {self.text} runs no more calls"))
        error.add_note(f"commlib: {text}; the other rank is told: close the channel and open it again, on both sides")

    def _fail(self, error: CommlibError) -> None:
        """Let no call run any more, on either side."""
        if self._failure is None:
            self._failure = error
            self.ends.halt()
            self.ends.tell(f"has given up this channel ({type(error).__name__}: {error})", failed=True)
            self._end_queue(error)

    # Sends that wait for room: the poller's thread sends them, so no signal handler can come in between

    def _move(self) -> bool:
        """Send what is queued as far as there is room; return whether nothing is left. Never blocks, never raises."""
        end, queue = self.ends.outgoing, self._queue
        try:
            while (work := first(queue)) is not None:
                work.watch()
                if not self.ends.try_connect(self._group, self.text):
                    return False
                self._refuse_unreachable(work.description)
                if not end.has_room() or (array := work.made()) is None:
                    return False
                end.send(array, work.description, _give_way)
                with suppress(ValueError):  # another thread has let it fail
                    queue.remove(work)
                    work.finish()
            end.defer(yes=False)
            self._pumps.sent()
        except _NoRoomError:  # another thread was faster
            return False
        except CommlibError as error:
            self._fail(error)
            self._end_queue(error)
        return True

    def _end_queue(self, error: CommlibError) -> None:
        for work in taken(self._queue):
            work.finish(error=error)

    def _await(self, work: Queued, timeout: float | None) -> None:
        """Wait until a queued send has been sent, or has failed."""
        with self._guarded(work.description, self.ends.outgoing) as watch:
            poll(lambda: work.has_ended, watch(timeout))


class _NoRoomError(Exception):
    """The next message would have to wait."""


def _give_way() -> None:
    raise _NoRoomError


def _has_come(end: Any) -> bool:
    return hasattr(end, "has_come") and end.has_come()
