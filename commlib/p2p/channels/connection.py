"""Connection: one rank's side of a channel, connected to the other rank, or failed, or closed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from commlib.errors import CommlibError, PeerError, ShutdownError, StallError, TransportError, UsageError
from commlib.p2p.channels.drain import drain
from commlib.p2p.channels.ends import ChannelEnds
from commlib.p2p.channels.progress import ChannelProgress
from commlib.process import forks
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


class Connection:
    """The state of a channel on this rank. Everything that still uses the channel holds its connection.

    After any error but UsageError, and a wait that changed nothing, it fails in both directions, on both ranks.
    """

    __slots__ = (
        "__weakref__", "_channels", "ends", "failure", "group", "is_closed", "peer", "pending", "progress", "text",
    )  # fmt: skip

    def __init__(self, group: Group, channels: Owner, ends: ChannelEnds, text: str) -> None:
        self.group, self._channels, self.ends, self.text = group, channels, ends, text
        self.peer = ends.address.peer
        self.failure: CommlibError | None = None
        self.is_closed = False
        self.pending: deque[Any] = deque()
        """The sends that wait for room: see `SendQueue`. They end with the connection."""
        self.progress = ChannelProgress(group, ends, text)
        self.progress.received()

    @contextmanager
    def guard(self, what: str, end: Any, timeout: float | None = None) -> Iterator[ChannelWait]:
        """Fail the connection with the error of a call, unless the call has changed nothing.

        what: the call, for errors. end: the end that it uses. Yields the hook of its waits.
        """
        before, on_wait = end.count, ChannelWait(self, what, end, timeout)
        try:
            yield on_wait
        except UsageError:
            raise
        except CommlibError as error:
            if error is not on_wait.mild_error:
                self.fail(error)
            raise
        except BaseException as error:
            if end.count != before or end.is_half_way:
                self.abandon(what, error)
            raise

    def look(self) -> bool:
        """Poll for the control messages of the other side; return whether the sides are connected. Never blocks.

        Raises MismatchError if the other side opened the channel differently.
        """
        self._channels.look(self.peer)
        return self.ends.try_connect(self.group, self.text)

    def connect(self, what: str, timeout: float | None = None) -> None:
        """Wait until the other side has opened the channel, at most `timeout` seconds (StallError)."""
        if self.ends.is_connected and not self.ends.has_notified:
            return
        with self.guard(what, self.ends.outgoing, timeout) as on_wait:
            self.await_peer(what, on_wait)

    def await_peer(self, what: str, on_wait: WaitHook) -> None:
        """Wait within a guard until the other side has opened the channel."""
        self.refuse(what)
        if not self.ends.is_connected:
            self.ends.mailbox.expect(self.ends.address)
            poll(lambda: self.ends.try_connect(self.group, self.text), on_wait)

    def await_receiver(self, what: str, on_wait: WaitHook) -> None:
        """Wait within a guard until the other side can receive messages. Raises an error if it never can."""
        self.await_peer(what, on_wait)
        self.refuse_unreachable(what)

    # Errors

    def refuse(self, what: str) -> None:
        """Raise the earlier failure of the channel or the group, if there is one."""
        forks.check(what)
        group = self.group
        if self.failure is not None:
            error = type(self.failure)(str(self.failure))  # a new error: the old one would collect tracebacks
            error.missing = self.failure.missing
            error.add_note(f"commlib: {what}: not run on rank {group.rank}: an earlier call failed")
            raise error
        if group.status.failure is not None:
            group.raise_failure(what)
        if self.is_closed:
            raise UsageError(f"{what}: it was closed on rank {group.rank}: open it again, on both sides")
        if group.runtime.closing:
            raise ShutdownError(f"{group.name}: {what}: commlib has been shut down")

    def refuse_unreachable(self, what: str) -> None:
        """Raise an error if the other side can no longer receive messages."""
        if (bye := self.ends.bye()) is not None:
            self.raise_closed(what, bye)
        if self.ends.unreachable:
            raise TransportError(f"{self.group.name}: {what}: {self.ends.unreachable}")

    def raise_closed(self, what: str, bye: Any) -> NoReturn:
        """Raise the error for the other side's bye message."""
        self.ends.outgoing.flag.halt(yes=True)
        error = PeerError(
            f"{self.group.name}: {what}: rank {self.group.rank}: waited for a rank that will never arrive: rank "
            f"{self.peer} {bye['why']}"
        )
        error.missing = {self.peer: bye["why"]}
        raise error

    # The end

    def give_up(self, what: str, error: BaseException) -> None:
        """Fail, because `error` ended a call half-way."""
        if isinstance(error, CommlibError):
            self.fail(error)
        else:
            self.abandon(what, error)

    def abandon(self, what: str, error: BaseException) -> None:
        """Fail, because a foreign exception ended a call, perhaps half-way."""
        if isinstance(error, CommlibError):
            return
        # An interrupted `with` raises GeneratorExit instead of the exception that interrupted it.
        name = "an exception" if isinstance(error, GeneratorExit) else type(error).__name__
        text = f"{self.group.name}: {what}: rank {self.group.rank}: ended half-way by {name}"
        self.fail(ShutdownError(f"{text}; {self.text} runs no more calls"))
        error.add_note(f"commlib: {text}; the other rank is notified: close and reopen the channel on both sides")

    def fail(self, error: CommlibError) -> None:
        """Fail all later calls, on both sides. Idempotent."""
        if self.failure is None:
            self.failure = error
            self.ends.halt()
            self.ends.notify(f"has given up this channel ({type(error).__name__}: {error})", failed=True)
            self.end_pending(error)

    def end_pending(self, error: CommlibError) -> None:
        """End all pending sends with an error."""
        for work in drain(self.pending):
            work.finish(error=error)

    def flush(self, timeout: float) -> None:
        """Wait until all pending sends have left, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while self.pending and self.failure is None and time.monotonic() < deadline:
            time.sleep(1e-4)

    def close(self, reason: str) -> None:
        """End this side: see `Channel.close`."""
        if self.is_closed or forks.is_child():
            return
        self.is_closed = True
        self.end_pending(ShutdownError(f"{self.group.name}: {self.text}: closed before it was sent"))
        self._channels.end(self.ends, reason)


class ChannelWait:
    """The hook of the waits of one call. It raises an error once the call cannot end.

    mild_error: the error that it has raised, if that does not damage the channel.
    """

    __slots__ = ("_connection", "_deadline", "_end", "_timeout", "_watch", "_what", "mild_error")

    def __init__(self, connection: Connection, what: str, end: Any, timeout: float | None) -> None:
        self._connection, self._what, self._end, self._timeout = connection, what, end, timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._watch: WaitHook | None = None
        self.mild_error: CommlibError | None = None

    def __call__(self) -> None:
        connection, what, end = self._connection, self._what, self._end
        if self._watch is None:
            self._watch = connection.group.waits.watch(what, [connection.peer])
        connection.refuse(what)
        connection.look()  # a mismatch takes precedence
        bye = connection.ends.bye()
        # Messages that were sent before the end can still be received.
        if bye is not None and (
            end is connection.ends.outgoing or (end.count >= bye["sent"] and not end.has_arrived())
        ):
            try:
                connection.raise_closed(what, bye)
            except PeerError as error:
                self.mild_error = error
                raise
        self._watch()
        if self._deadline is not None and time.monotonic() > self._deadline:
            name = connection.group.name
            self.mild_error = StallError(f"{name}: {what}: not done after {self._timeout} s; the call can be repeated")
            raise self.mild_error
