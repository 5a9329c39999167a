"""DeviceChannel: a channel of device arrays, ordered on the callers' current streams.

Each message has a small header in a host channel. The two streams copy its data from a slot on the sender's device to
memory of the receiver's device. If the devices cannot reach each other, the host message carries the data, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of
from commlib.devices.protocol import Device
from commlib.dtypes import Array
from commlib.errors import PeerError, ShutdownError, TransportError, UsageError
from commlib.group.arguments import integer
from commlib.p2p.channels.channel import Channel
from commlib.p2p.channels.device_staging import StagedMessage, convert_errors, copy_in
from commlib.p2p.channels.ends import ChannelEnds
from commlib.p2p.channels.payload import ChannelSpec, Shape
from commlib.p2p.channels.send_checks import check_sendable
from commlib.p2p.device.edge import DeviceEdge
from commlib.p2p.device.header import Header
from commlib.p2p.device.sender import SlotSender
from commlib.runtime.work import Work

_MOST_TAG = 1 << 40
_COPYING = 10.0  # seconds for the last copies to the host


class Message(NamedTuple):
    """A received message: the array, the tag and the note."""

    array: Any
    tag: int
    note: bytes


class DirectionLock:
    """Runs the calls of one direction one after another; refuses a call within another call of the same thread."""

    def __init__(self) -> None:
        self._lock, self._is_held = threading.RLock(), False

    @contextmanager
    def hold(self, what: str) -> Iterator[None]:
        """Hold it within the block. what: the call, for errors."""
        with self._lock:
            if self._is_held:
                raise UsageError(
                    f"{what}: called during another call of the same channel, in the same thread, perhaps by a signal "
                    "handler: let the handler set a flag, and call after the other call has returned"
                )
            try:
                self._is_held = True
                yield
            finally:
                self._is_held = False


class DeviceChannel:
    """One rank's side of an edge between devices. `Communicator.channel` with `device=` opens it, on both ranks.

    `depth`, timeouts, failures, errors and `close` work as in `Channel`. The differences:

    - Calls are ordered on the caller's current stream. No call waits for the device.
    - `recv` returns a new array. Until `release` it counts as one of the `depth` messages.
    - A message may carry a number and a few host bytes: `tag`, `note`.
    """

    def __init__(self, channel: Channel, edge: DeviceEdge, terms: ChannelSpec) -> None:
        """channel: the host channel, which carries the headers."""
        self._channel, self._edge = channel, edge
        self._connection, self._queue = channel.connection, channel.queue
        self.device: Device = edge.device
        self.peer, self.edge, self.text, self.ends = channel.peer, channel.edge, channel.text, channel.ends
        self.dtype, self.depth = terms.dtype, terms.depth
        self._shape = terms.shape  # of the last message sent
        self._sending, self._receiving = DirectionLock(), DirectionLock()
        self._received = 0
        self._next: Array | None = None  # the host part of a message that arrived while device memory was missing
        self._unreleased: dict[int, tuple[DeviceArray, Array]] = {}  # by address of the array that `recv` returned

    def __repr__(self) -> str:
        return f"<DeviceChannel of {self.device.name} over {self._channel!r}>"

    def __enter__(self) -> DeviceChannel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def purpose(self) -> Callable[[], str]:
        """Returns a text for the end of warnings and errors: the purpose of the wait."""
        return self._channel.purpose

    @purpose.setter
    def purpose(self, purpose: Callable[[], str]) -> None:
        self._channel.purpose = purpose

    @property
    def is_direct(self) -> bool:
        """Whether the devices copy the data, not host messages. Waits until the other side has opened the channel."""
        self._connection.connect(f"is_direct of {self.text}")
        return not self._edge.refusal

    # Public methods

    def send(self, x: Any, timeout: float | None = None, *, tag: int = 0, note: bytes = b"") -> None:
        """Send an array of the channel's device and dtype, of any shape. Work queued afterwards may change it.

        Waits while `depth` messages are unreleased, at most `timeout` seconds; then raises StallError, and nothing was
        sent. An array from `buffer` is sent without a copy.

        Args:
            x: An array of the channel's device and dtype, of any shape.
            timeout: Seconds; None: without a limit.
            tag: A number that arrives with the message.
            note: Bytes that arrive with the message.
        """
        what = f"send on {self.text}{self.purpose()}"
        array = self._check_array(x)
        head = Header(array.shape, self._check_tag(tag), note)
        with self._sending.hold(what):
            self._refuse(what)
            self._connection.connect(what, timeout)
            out = self._out
            if out is None:
                # With room in the channel, `close` waits only for the device.
                self._queue.await_room(what, timeout)
                self._queue.submit(self._stage(array, head))
                return
            self._queue.await_room(what, timeout)
            out.reserve(array.nbytes)
            with self._all_or_fail(what):
                self._channel.send(self._put(out, array, head))

    def send_async(self, x: Any, *, tag: int = 0, note: bytes = b"") -> Work:
        """Start `send` of the array's values at this point of the current stream. Later sends keep the order."""
        what = f"send on {self.text}"
        array = self._check_array(x)
        head = Header(array.shape, self._check_tag(tag), note)
        with self._sending.hold(what):
            self._refuse(what)
            has_room, is_connected = self._queue.has_room(what), self.ends.is_connected
            if is_connected and (out := self._out) is None:
                return self._queue.submit(self._stage(array, head))
            if has_room and out is not None:
                out.reserve(array.nbytes)
                with self._all_or_fail(what):
                    self._channel.send(self._put(out, array, head))
                return Work.ended(what, None)
            return self._queue.submit(_LaterMessage(self, array, head))

    def recv(self, timeout: float | None = None) -> Any:
        """Receive the next message; return an array of the channel's dtype and the message's shape.

        The current stream writes its contents. Waits until the other rank has sent the message, at most `timeout`
        seconds; then raises StallError, and nothing was received.

        Args:
            timeout: Seconds; None: without a limit.

        Raises:
            UsageError: If `depth` messages were received and not released.
            TransportError: If the device has no memory for the array: call `recv` again later.
        """
        return self.recv_message(timeout).array

    def recv_message(self, timeout: float | None = None) -> Message:
        """Receive the next message with its tag and note: see `recv`.

        Args:
            timeout: Seconds; None: without a limit.
        """
        what = f"recv on {self.text}{self.purpose()}"
        with self._receiving.hold(what):
            self._refuse(what)
            if self._next is None:
                self._next = self._channel.recv(timeout)
            message = self._next
            head, payload = Header.read(message)
            array = self.device.empty(head.shape, self.dtype)
            into = self.device.wrap(array, "recv")
            with self._all_or_fail(what):
                self._received += 1
                if self._received != self.ends.incoming.count:
                    group = self._connection.group
                    raise TransportError(
                        f"{group.name}: {what}: rank {group.rank}: message {self._received} was lost when "
                        "a call was interrupted: close the channel and open it again, on both sides"
                    )
                if self._edge.refusal or self._edge.incoming is None:
                    copy_in(into, payload)
                else:
                    if head.news:
                        self._edge.incoming.switch_memory(head.news.decode())
                    self._edge.incoming.take(into)
                    self._watch()
                self._next, self._unreleased[into.address] = None, (into, message)
            return Message(array, head.tag, head.note)

    def release(self, view: Any = None) -> None:
        """Release an array that `recv` returned (or a part of it). Without an argument: release all received messages.

        The array itself stays valid.

        Args:
            view: An array that `recv` returned, or a part of it; None: all received messages.
        """
        if view is None:
            views, self._unreleased = self._unreleased, {}
            for _, message in views.values():
                self._channel.release(message)
            return
        array = self.device.wrap(view, "release", "view") if device_of(view) is self.device else None
        for address, (into, message) in list(self._unreleased.items()):
            if array is not None and address <= array.address < address + max(into.nbytes, 1):
                del self._unreleased[address]
                self._channel.release(message)
                return
        raise UsageError(
            f"release on {self.text}: the array is not a received message of this channel, or was already released: "
            "pass the array that recv returned"
        )

    def buffer(self, shape: int | Shape | None = None, timeout: float | None = None) -> Any:
        """Return an array for the next message (default: of the last shape sent), which `send` does not copy.

        The current stream waits until the other side has read the slot's previous message. Write all of the array, and
        send it before any other message. Waits for room as `send` does.

        Args:
            shape: The lengths of the message; None: the same as the last message sent.
            timeout: Seconds; None: without a limit.
        """
        what = f"buffer of {self.text}{self.purpose()}"
        lengths = self._shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        with self._sending.hold(what):
            self._refuse(what)
            self._queue.await_room(what, timeout)
            if (out := self._out) is None or out.by_host:  # no kernel should compute in host memory
                return self.device.empty(lengths, self.dtype)
            nbytes = math.prod(lengths) * self.dtype.itemsize
            out.reserve(nbytes)
            array = out.lend(nbytes)
            return self.device.at(array.address, lengths, self.dtype, array.owner)

    def ready(self) -> bool:
        """Return whether `recv` would return immediately. Never blocks."""
        self._refuse(f"ready on {self.text}")
        return self._next is not None or self._channel.ready()

    def close(self, reason: str = "has closed this channel") -> None:
        """End this side. Idempotent. The other side can receive earlier messages; later calls there report `reason`.

        The memory is freed once the device has finished with it.

        Args:
            reason: The text of the error of later calls on the other side.
        """
        if self.ends.is_connected and self._out is None:
            self._connection.flush(_COPYING)
        self._channel.close(reason)

    # Between the devices

    @property
    def _out(self) -> SlotSender | None:
        """The sender between devices; None for host messages. Valid once the channel is connected."""
        return None if self._edge.refusal else self._edge.outgoing

    def _put(self, out: SlotSender, array: DeviceArray, head: Header) -> Array:
        """Queue the copy of the next message's data, and return its host message."""
        whole = head._replace(news=out.put(array).encode())
        self._watch()
        self._shape = array.shape
        return whole.write(np.empty(whole.nbytes, np.uint8))

    def _watch(self) -> None:
        """Let the poller check the streams, which may wait for a lost peer."""
        if not self._edge.is_watched:
            self._edge.is_watched = True
            group = self._connection.group
            group.runtime.poller.watch(_EdgeCheck(self.text, self.ends, self._edge), group, awaited=False)

    def _stage(self, array: DeviceArray, head: Header) -> StagedMessage:
        """Queue the copy of the next message's data to host memory."""
        self._shape = array.shape
        return StagedMessage(array, head)

    # Checks

    def _check_array(self, x: Any) -> DeviceArray:
        if device_of(x) is not self.device:
            raise UsageError(
                f"send on {self.text}: x is on {device_of(x).name}, but the channel was opened for device "
                f"{self.device.name}: copy x to that device, or open a channel without device="
            )
        array = self.device.wrap(x, "send") if type(x) is not DeviceArray else x
        check_sendable(array, self.dtype, self.text)
        return array

    def _check_tag(self, tag: int) -> int:
        if not 0 <= integer("send", "tag", tag) <= _MOST_TAG:
            raise UsageError(f"send on {self.text}: tag is {tag}, expected 0 to 2**40")
        return tag

    def _refuse(self, what: str) -> None:
        """Raise an error if the channel has ended, or if streams were released, so that received data is invalid."""
        group = self._connection.group
        if self.ends.has_notified and not self._edge.lost:
            self._connection.connect(what)  # raises the reason, if known
            raise ShutdownError(f"{group.name}: {what}: rank {group.rank}: the channel has ended")
        if self._edge.lost:
            error = PeerError(f"{group.name}: {what}: rank {group.rank}: lost rank {self.peer}: {self._edge.lost}")
            error.missing = {self.peer: self._edge.lost}
            self._connection.give_up(what, error)
            raise error

    @contextmanager
    def _all_or_fail(self, what: str) -> Iterator[None]:
        """Fail the channel if a call ends after it has queued device work and before it has sent the host message."""
        try:
            yield
        except BaseException as error:
            self._connection.give_up(what, error)
            raise


class _LaterMessage:
    """A message that is sent once there is room: a copy of the array, and a private stream.

    Calling it returns the host message; None while it is not ready. Only then it is known whether the devices can reach
    each other.
    """

    def __init__(self, channel: DeviceChannel, array: DeviceArray, head: Header) -> None:
        self._channel, self._copy, self._head = channel, array.copy(), head
        self._copied, self._stream = channel.device.current().record(), channel.device.stream()
        self._staged: StagedMessage | None = None

    def __call__(self) -> Array | None:
        channel, copy, stream = self._channel, self._copy, self._stream
        with convert_errors(), channel.device.using(stream):
            if (out := channel._out) is not None:
                out.reserve(copy.nbytes)
                stream.wait(self._copied)
                message = channel._put(out, copy, self._head)
                out.under_way.add(stream.record(), copy)
                return message
            if self._staged is None:
                stream.wait(self._copied)
                self._staged = channel._stage(copy, self._head)
            return self._staged()


class _EdgeCheck:
    """The poller's check of a device edge."""

    __slots__ = ("_edge", "_ends", "description")

    def __init__(self, text: str, ends: ChannelEnds, edge: DeviceEdge) -> None:
        self.description, self._ends, self._edge = f"streams of {text}", ends, edge

    def done(self) -> bool:
        if not self._edge.is_due:
            return False
        self._ends.mailbox.poll(self._ends.address.peer)
        if (bye := self._ends.bye()) is not None and bye["failed"]:
            self._edge.fail()
        return self._edge.look()
