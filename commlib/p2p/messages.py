"""send, recv and send_recv: messages between two ranks, outside the order of the collectives."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from commlib.buffers.views import contiguous
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import as_view, as_writable, overlap
from commlib.devices.protocol import DeviceEvent
from commlib.errors import CommlibError, MismatchError, ShutdownError, StallError, UsageError
from commlib.group.arguments import integer
from commlib.observe.recorder import MESSAGES
from commlib.p2p.lanes.staging import StagedReceive, StagedSend, await_device
from commlib.p2p.messenger import Messenger, test_all
from commlib.process import forks
from commlib.runtime.work import Work
from commlib.transport.base import ProbedReceive, Request

if TYPE_CHECKING:
    from commlib.group.group import Group

_MOST_TAGS = 32767  # what every MPI allows


@dataclass(frozen=True, slots=True)
class _PendingMessage:
    """One checked send or receive, not yet posted. array: the user's. flat: the memory to send or to fill.

    staged: the owner of `flat` in host memory, if `array` is staged from or to a device.
    """

    peer: int
    tag: int
    array: Any
    flat: Any
    incoming: bool
    staged: StagedReceive | StagedSend | None = None

    def post(self, post: Messenger) -> Request:
        data = self.flat.view(np.uint8)
        memory = data if type(data) is DeviceArray else data.data
        if type(self.staged) is StagedReceive:
            return post.recv(self.peer, self.tag, memory, self.staged.land)
        if type(self.staged) is StagedSend and self.staged.pieces:
            return post.send_in_pieces(self.peer, self.tag, data.data, self.staged.pieces)
        return post.recv(self.peer, self.tag, memory) if self.incoming else post.send(self.peer, self.tag, memory)

    def collect(self, group: Group, request: Request) -> None:
        """Check the received message, and copy it to the user's array if needed."""
        if not self.incoming:
            return
        if request.nbytes != self.flat.nbytes:
            received = "more" if request.nbytes < 0 else str(request.nbytes)
            raise MismatchError(
                f"{group.name}: recv from rank {self.peer}, tag {self.tag}, on rank {group.rank}: "
                f"expected {self.flat.nbytes} bytes, got {received}: send and receive the same count and dtype"
            )
        if type(self.staged) is StagedReceive:
            self.staged.end()
        elif type(self.flat) is not DeviceArray and not np.may_share_memory(self.flat, self.array):
            self.array[...] = self.flat.reshape(self.array.shape)


# Messages whose posting a signal handler interrupted. They may be in flight, so their memory must stay alive.
_LEFT_BEHIND: list[_PendingMessage] = []


class Messages(Work):
    """The work of one call's messages. After posting they progress in waits and on the poller's thread.

    The object exists before it posts the messages, so an exception at any point cannot free their arrays in flight.
    """

    __slots__ = ("_arrived", "_group", "_lock", "_messages", "_peers", "_post", "_requests", "_value")

    def __init__(self, group: Group, post: Messenger, text: str, messages: list[_PendingMessage], value: Any) -> None:
        super().__init__(text)
        self._group, self._post, self._messages, self._value = group, post, messages, value
        self._peers = [message.peer for message in messages]
        self._arrived: list[tuple[Any, DeviceEvent, Any]] = []  # copies to devices: device, event, host memory
        self._lock = threading.Lock()  # MPI allows one thread at a time to test a request
        self._requests: list[Request] = []  # of the posted messages

    def start(self) -> Messages:
        """Post the messages, and let the poller progress them."""
        try:
            self._begin()
            self._group.runtime.poller.watch(self, self._group)
        except CommlibError:
            raise
        except BaseException as error:
            self._interrupt(error)
            raise
        return self

    def complete(self) -> Any:
        """Post and wait like `wait`, with no later wait: an interrupt withdraws the messages or fails the group."""
        try:
            self._begin()
            return self.wait()
        except CommlibError:
            raise
        except BaseException as error:
            self._interrupt(error)
            raise

    def _begin(self) -> None:
        group, text = self._group, self.description
        forks.check(text)
        if group.runtime.closing:
            raise ShutdownError(f"{text}: commlib has been shut down")
        if group.status.failure is not None:
            group.raise_failure(text)
        if (record := group.progress.journal.open(text, self._messages[0].flat)) is not None:
            self.record, record.row = record, MESSAGES
            record.run()
        try:
            for message in self._messages:
                self._requests.append(message.post(self._post))
        except CommlibError as error:
            self._end(error)
            raise
        if record is not None:
            record.spent(record.began)

    def _interrupt(self, error: BaseException) -> None:
        """Withdraw a receive if its message has not begun to arrive, else fail the group: its state is undefined."""
        with self._lock:
            if super().done():
                return
            is_posted = len(self._requests) == len(self._messages)
            if not is_posted:
                _LEFT_BEHIND.extend(self._messages)
            if not (is_posted and self._withdraw()):
                self._group.abandon(self.description, error)
            self._end(ShutdownError(f"{self.description}: interrupted by {type(error).__name__}"))
            self.seen = True

    def done(self) -> bool:
        """Make progress; return whether all messages are complete. Never blocks."""
        if not super().done() and not forks.is_child() and self._lock.acquire(blocking=False):
            try:
                self._advance()
            except CommlibError as error:
                self._end(error)
            finally:
                self._lock.release()
        return super().done()

    def wait(self, timeout: float | None = None) -> Any:
        """Block until all messages are complete, at most `timeout` seconds; see `Work.wait`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        late = StallError(
            f"{self.description}: not done after {timeout} s; it is still running, wait again to collect it"
        )
        if not super().done():
            forks.check(self.description)
            record = self.record
            if record is not None:
                since = record.waits()
            try:
                if timeout is None:
                    with self._lock:  # released if a signal handler raises inside
                        self._wait_for_requests(deadline, late)
                elif self._lock.acquire(timeout=timeout):
                    try:
                        self._wait_for_requests(deadline, late)
                    finally:
                        self._lock.release()
                else:
                    raise late
            finally:
                if record is not None:
                    record.waited(since)
        value = super().wait(0)
        for device, event, _ in self._arrived:
            device.current().wait(event)
        return value

    def _withdraw(self) -> bool:
        """Withdraw a receive if its message has not begun to arrive. A send cannot be withdrawn."""
        requests = zip(self._messages, self._requests, strict=True)
        return len(self._messages) == 1 and all(m.incoming and cast(ProbedReceive, r).withdraw() for m, r in requests)

    def exception(self) -> BaseException | None:
        """Wait until all messages are complete; return the error, or None."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def _advance(self) -> None:
        if not super().done() and test_all(self._requests):
            for message, request in zip(self._messages, self._requests, strict=True):
                message.collect(self._group, request)
                if message.incoming and message.staged is not None:
                    array = message.array
                    self._arrived.append((array.device, array.stream.record(), message.flat))
            self._end()

    def _wait_for_requests(self, deadline: float | None, late: StallError) -> None:
        if super().done():
            return
        watch = self._group.waits.watch(self.description, self._peers)

        def on_wait() -> None:
            watch()
            if deadline is not None and time.monotonic() > deadline:
                raise late

        try:
            self._post.wait(self._requests, on_wait)
            self._advance()
        except CommlibError as error:
            if error is late:
                raise
            self._end(error)

    def _end(self, error: CommlibError | None = None) -> None:
        if error is not None:
            for request in self._requests:
                request.cancel()
        value, self._value = self._value, None
        self._messages = []  # stop keeping the arrays alive
        if self.record is not None:
            self.record.end(error)
        self.finish(value, error)


def _message(
    group: Group, post: Messenger, verb: str, x: Any, peer: int, tag: int, *, incoming: bool, what: str = "x"
) -> _PendingMessage:
    array = as_writable(x, verb, what) if incoming else as_view(x, verb, what)
    if not 0 <= integer(verb, "peer", peer) < group.size:
        raise UsageError(f"{verb}: peer is {peer}, but {group.name} has the ranks 0 to {group.size - 1}")
    if not 0 <= integer(verb, "tag", tag) <= _MOST_TAGS:
        raise UsageError(f"{verb}: tag is {tag}, expected 0 to {_MOST_TAGS}")
    if type(array) is DeviceArray:
        whole = array.reshape(-1)
        if post.takes(peer, whole.device.name):
            await_device(group.waits, whole, verb)
            return _PendingMessage(peer, tag, whole, whole, incoming)
        if incoming:  # posted immediately: receives of one peer and tag must keep their order
            staged: StagedReceive | StagedSend = StagedReceive(whole)
        else:
            piece = group.config.staging_kib * 1024 if post.has_lane(peer) else 0
            staged = StagedSend(group.waits, whole, verb, piece)
        return _PendingMessage(peer, tag, whole, staged.memory, incoming, staged)
    return _PendingMessage(peer, tag, array, contiguous(array, verb).reshape(-1), incoming)


def send(group: Group, post: Messenger, x: Any, peer: int, tag: int) -> Messages:
    message = _message(group, post, "send", x, peer, tag, incoming=False)
    return Messages(group, post, f"send to rank {peer}, tag {tag}", [message], None)


def recv(group: Group, post: Messenger, x: Any, peer: int, tag: int) -> Messages:
    message = _message(group, post, "recv", x, peer, tag, incoming=True)
    return Messages(group, post, f"recv from rank {peer}, tag {tag}", [message], x)


def send_recv(group: Group, post: Messenger, x: Any, peer: int, out: Any, source: int, tag: int) -> Messages:
    arriving = _message(group, post, "send_recv", out, source, tag, incoming=True, what="out")
    leaving = _message(group, post, "send_recv", x, peer, tag, incoming=False)
    on_device = type(arriving.array) is DeviceArray and overlap(arriving.array, leaving.array)
    if on_device or overlap(arriving.flat, leaving.flat):
        raise UsageError("send_recv: x and out overlap: receive into another array")
    return Messages(group, post, _pair_text(peer, source, tag), [arriving, leaving], out)


def exchange(group: Group, post: Messenger, x: Any, peer: int, out: Any, source: int, tag: int) -> Any:
    """Run a blocking `send_recv`: as two compiled calls if the send does not have to wait."""
    try:
        alike = type(x) is np.ndarray and post.can_recv(out, source) and out.dtype is x.dtype and not overlap(out, x)
        if alike and post.send_now(x, peer, tag):
            if post.recv_now(out, source, tag):
                return out
            arriving = _message(group, post, "send_recv", out, source, tag, incoming=True, what="out")
            return Messages(group, post, _pair_text(peer, source, tag), [arriving], out).complete()
    except CommlibError:
        raise
    except BaseException as error:
        group.abandon(_pair_text(peer, source, tag), error)  # the caller cannot see whether the send has started
        raise
    return send_recv(group, post, x, peer, out, source, tag).complete()


def _pair_text(peer: int, source: int, tag: int) -> str:
    return f"send_recv to rank {peer} and from rank {source}, tag {tag}"
