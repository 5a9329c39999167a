"""DeviceChannel: a channel whose arrays are on a device, ordered with the current streams of those who call.

Each message is told by a few bytes in a channel of the host. Its data goes from a slot on the sender's device to memory
of the receiver's, by what the two streams do; or where devices cannot reach each other in the host's message, behind
those few bytes.
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
from commlib.errors import CommlibError, PeerError, ShutdownError, TransportError, UsageError
from commlib.group.arguments import integer
from commlib.group.group import Group
from commlib.p2p.channels.channel import Channel
from commlib.p2p.channels.ends import Ends
from commlib.p2p.channels.payload import Shape
from commlib.p2p.channels.sendable import check_sendable
from commlib.p2p.channels.spec import Terms
from commlib.p2p.device.edge import DeviceEdge
from commlib.p2p.device.header import DeviceHead
from commlib.p2p.device.sender import DeviceOut
from commlib.runtime.work import Work

_MOST_TAG = 1 << 40
_COPYING = 10.0  # seconds for the last copy to the host


class Message(NamedTuple):
    """What came: the array, and what was sent along with it."""

    array: Any
    tag: int
    note: bytes


class DeviceChannel:
    """One rank's side of an edge between devices. `Communicator.channel` with `device=` makes it, on both ranks.

    As `Channel`: `depth`, timeouts, failures and the end are the same, and so is what is raised. What differs:

    - Calls are ordered on the current stream of whoever calls. No call waits for the device.
    - `recv` returns an array in memory of its own. Until `release` it counts as one of the `depth` messages.
    - A message may carry a number and a few bytes of the host: `tag`, `note`.
    """

    def __init__(self, channel: Channel, group: Group, edge: DeviceEdge, terms: Terms) -> None:
        """channel: of the host, which tells the messages."""
        self._channel, self._group, self._edge = channel, group, edge
        self.device: Device = edge.device
        self.peer, self.edge, self.text, self.ends = channel.peer, channel.edge, channel.text, channel.ends
        self.dtype, self.depth = terms.dtype, terms.depth
        self._shape = terms.shape  # of the last message sent
        self._sending, self._receiving = threading.RLock(), threading.RLock()
        self._is_sending = self._is_receiving = False
        self._received = 0
        self._next: Array | None = None  # the host's part of a message that is there, while memory for it was missing
        self._held: dict[int, tuple[DeviceArray, Array]] = {}  # by the address of what `recv` returned

    def __repr__(self) -> str:
        return f"<DeviceChannel of {self.device.name} over {self._channel!r}>"

    def __enter__(self) -> DeviceChannel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def purpose(self) -> Callable[[], str]:
        """Says at the end of warnings and errors what a wait is for."""
        return self._channel.purpose

    @purpose.setter
    def purpose(self, purpose: Callable[[], str]) -> None:
        self._channel.purpose = purpose

    @property
    def is_direct(self) -> bool:
        """Whether data goes by what the devices do alone. Waits until the other side has opened the channel, too."""
        self._channel.connect(f"is_direct of {self.text}")
        return not self._edge.refusal

    # What users call

    def send(self, x: Any, timeout: float | None = None, *, tag: int = 0, note: bytes = b"") -> None:
        """Send an array of the channel's device and dtype, of any shape. What is queued afterwards may change it.

        Waits while `depth` messages are not handed back, at most `timeout` seconds: StallError, and nothing was sent.
        What `buffer` gave is sent without a copy. tag: a number from 0 to 2**40. note: bytes of the host, the fewer the
        better.
        """
        what = f"send on {self.text}{self.purpose()}"
        array = self._checked(x)
        head = DeviceHead(array.shape, self._checked_tag(tag), note)
        with self._in_turn(what, self._sending, "_is_sending"):
            self._refuse(what)
            self._channel.connect(what, timeout)
            out = self._out
            if out is None:
                # Room is there then, so a close waits for the device alone.
                self._channel.await_room(what, timeout)
                self._channel.send_later(self._by_host(array, head))
                return
            self._channel.await_room(what, timeout)
            out.reserve(array.nbytes)
            with self._whole(what):
                self._channel.send(self._put(out, array, head))

    def send_async(self, x: Any, *, tag: int = 0, note: bytes = b"") -> Work:
        """Start `send`, of the values that the array has on the current stream now; later sends go after it."""
        what = f"send on {self.text}"
        array = self._checked(x)
        head = DeviceHead(array.shape, self._checked_tag(tag), note)
        with self._in_turn(what, self._sending, "_is_sending"):
            self._refuse(what)
            has_room, is_connected = self._channel.has_room(what), self.ends.is_connected
            if is_connected and (out := self._out) is None:
                return self._channel.send_later(self._by_host(array, head))
            if has_room and out is not None:
                out.reserve(array.nbytes)
                with self._whole(what):
                    self._channel.send(self._put(out, array, head))
                return Work.ended(what, None)
            # What is sent later is a copy, on a stream of its own. It may not be known yet which way it goes.
            copy, event, stream = array.copy(), self.device.current().record(), self.device.stream()
            by_host: list[Callable[[], Array | None]] = []

            def make() -> Array | None:
                with _told(), self.device.using(stream):
                    if (out := self._out) is not None:
                        out.reserve(copy.nbytes)
                        stream.wait(event)
                        message = self._put(out, copy, head)
                        out.under_way.add(stream.record(), copy)
                        return message
                    if not by_host:
                        stream.wait(event)
                        by_host.append(self._by_host(copy, head))
                    return by_host[0]()

            return self._channel.send_later(make)

    def recv(self, timeout: float | None = None) -> Any:
        """Receive the next message; return an array of the channel's dtype and of the shape that was sent.

        Its contents come to be on the current stream. Waits until the other rank has sent it, at most `timeout`
        seconds: StallError, and nothing was received. Raises UsageError if `depth` messages have been received and not
        handed back, TransportError if the device has no memory for it: it can be called again.
        """
        return self.recv_message(timeout).array

    def recv_message(self, timeout: float | None = None) -> Message:
        """Receive the next message, with what was sent along with it: see `recv`."""
        what = f"recv on {self.text}{self.purpose()}"
        with self._in_turn(what, self._receiving, "_is_receiving"):
            self._refuse(what)
            if self._next is None:
                self._next = self._channel.recv(timeout)
            message = self._next
            head, payload = DeviceHead.read(message)
            made = self.device.empty(head.shape, self.dtype)
            into = self.device.wrap(made, "recv")
            with self._whole(what):
                self._received += 1
                if self._received != self.ends.incoming.count:
                    raise TransportError(
                        f"{self._group.name}: {what}: rank {self._group.rank}: message {self._received} was lost when "
                        "a call was interrupted: close the channel and open it again, on both sides"
                    )
                if self._edge.refusal or self._edge.incoming is None:
                    self._copy_in(into, payload)
                else:
                    if head.news:
                        self._edge.incoming.turn_to(head.news.decode())
                    self._edge.incoming.take(into)
                    self._watch()
                self._next, self._held[into.address] = None, (into, message)
            return Message(made, head.tag, head.note)

    def release(self, view: Any = None) -> None:
        """Hand back what `recv` returned (or a part of it). Without it: everything that has been received.

        The array itself stays what it is for as long as it is used.
        """
        if view is None:
            held, self._held = self._held, {}
            for _, message in held.values():
                self._channel.release(message)
            return
        array = self.device.wrap(view, "release", "view") if device_of(view) is self.device else None
        for address, (into, message) in list(self._held.items()):
            if array is not None and address <= array.address < address + max(into.nbytes, 1):
                del self._held[address]
                self._channel.release(message)
                return
        raise UsageError(
            f"release on {self.text}: the array is no message that was received here, or was handed back before: pass "
            "what recv returned"
        )

    def buffer(self, shape: int | Shape | None = None, timeout: float | None = None) -> Any:
        """Return an array to write the next message to (default: of the last shape sent). `send` does not copy it.

        The current stream waits until the other side has read what was there before. Write all of it, and send it
        before anything else. Waits for room as `send` does.
        """
        what = f"buffer of {self.text}{self.purpose()}"
        lengths = self._shape if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        with self._in_turn(what, self._sending, "_is_sending"):
            self._refuse(what)
            self._channel.await_room(what, timeout)
            if (out := self._out) is None or out.by_host:  # nobody computes in memory of the host
                return self.device.empty(lengths, self.dtype)
            nbytes = math.prod(lengths) * self.dtype.itemsize
            out.reserve(nbytes)
            lent = out.lend(nbytes)
            return self.device.at(lent.address, lengths, self.dtype, lent.owner)

    def ready(self) -> bool:
        """Return whether `recv` would return at once. Never blocks."""
        self._refuse(f"ready on {self.text}")
        return self._next is not None or self._channel.ready()

    def close(self, reason: str = "has closed this channel") -> None:
        """End this side. Idempotent. The other side can still receive what was sent; then it is told `reason`.

        Memory is given back once the device is done with it.
        """
        if self.ends.is_connected and self._out is None:
            self._channel.flush(_COPYING)
        self._channel.close(reason)

    # Between the devices

    @property
    def _out(self) -> DeviceOut | None:
        """What sends between the devices; None where the host does. It is known once the channel is connected."""
        return None if self._edge.refusal else self._edge.outgoing

    def _put(self, out: DeviceOut, array: DeviceArray, head: DeviceHead) -> Array:
        """Queue the next message's data, and return what the host sends of it."""
        whole = head._replace(news=out.put(array).encode())
        self._watch()
        self._shape = array.shape
        return whole.write(np.empty(whole.nbytes, np.uint8))

    def _watch(self) -> None:
        """Let somebody look at streams that may wait in vain."""
        if not self._edge.is_watched:
            self._edge.is_watched = True
            self._group.runtime.poller.watch(_Look(self.text, self.ends, self._edge), self._group, awaited=False)

    # By way of the host

    def _by_host(self, array: DeviceArray, head: DeviceHead) -> Callable[[], Array | None]:
        """Queue a copy to the host's memory; return what returns the message once the copy is done."""
        message = self.device.staging(head.nbytes + array.nbytes)
        head.write(message)
        if array.nbytes:
            self.device.copy(message[head.nbytes :], array.reshape(-1).view("uint8"))
        event = self.device.current().record()
        self._shape = array.shape

        def make() -> Array | None:
            with _told(), self.device.using(self.device.current()):  # on its GPU: see `DeviceEdge.is_over`
                return message if event.done() else None

        return make

    def _copy_in(self, into: DeviceArray, payload: Array) -> None:
        """Queue a copy from the host's memory."""
        if into.nbytes:
            block = self.device.staging(into.nbytes)
            block[:] = payload
            self.device.copy(into.reshape(-1).view("uint8"), block)

    # What is checked

    def _checked(self, x: Any) -> DeviceArray:
        if device_of(x) is not self.device:
            raise UsageError(
                f"send on {self.text}: x is on {device_of(x).name}, but the channel was opened for device "
                f"{self.device.name}: copy it there, or open a channel without device="
            )
        array = self.device.wrap(x, "send") if type(x) is not DeviceArray else x
        check_sendable(array, self.dtype, self.text)
        return array

    def _checked_tag(self, tag: int) -> int:
        if not 0 <= integer("send", "tag", tag) <= _MOST_TAG:
            raise UsageError(f"send on {self.text}: tag is {tag}, expected 0 to 2**40")
        return tag

    def _refuse(self, what: str) -> None:
        """Raise an error if the channel has ended, or streams had to be let go: what they read is worth nothing."""
        group = self._group
        if self.ends.has_told and not self._edge.lost:
            self._channel.connect(what)  # says why, if it knows
            raise ShutdownError(f"{group.name}: {what}: rank {group.rank}: the channel has ended")
        if self._edge.lost:
            error = PeerError(f"{group.name}: {what}: rank {group.rank}: lost rank {self.peer}: {self._edge.lost}")
            error.missing = {self.peer: self._edge.lost}
            self._channel.give_up(what, error)
            raise error

    @contextmanager
    def _in_turn(self, what: str, lock: Any, flag: str) -> Iterator[None]:
        """Let one thread after another make a call of one direction."""
        with lock:
            if getattr(self, flag):
                raise UsageError(
                    f"{what}: called in the middle of another call of the same channel, in the same thread: by a "
                    "signal handler? Let the handler set a flag, and call after the other call has ended"
                )
            try:
                setattr(self, flag, True)
                yield
            finally:
                setattr(self, flag, False)

    @contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """Let the channel fail if a call ends between what its stream was told and what the other rank was told."""
        try:
            yield
        except BaseException as error:
            self._channel.give_up(what, error)
            raise


class _Look:
    """What the poller asks."""

    __slots__ = ("_edge", "_ends", "description")

    def __init__(self, text: str, ends: Ends, edge: DeviceEdge) -> None:
        self.description, self._ends, self._edge = f"streams of {text}", ends, edge

    def done(self) -> bool:
        if not self._edge.is_due:
            return False
        self._ends.mailbox.ask(self._ends.address.peer)
        if (bye := self._ends.bye()) is not None and bye["failed"]:
            self._edge.fail()
        return self._edge.look()


@contextmanager
def _told() -> Iterator[None]:
    """Make an error of commlib of what a library of devices raises, for whoever waits for the work."""
    try:
        yield
    except CommlibError:
        raise
    except Exception as error:
        raise TransportError(f"a device failed: {type(error).__name__}: {error}") from error
