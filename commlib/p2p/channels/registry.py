"""Channels: open and close the channels of one group. They all end with the group.

The two ranks of a channel open it independently, without waiting. Each rank makes its receive memory and sends a
control message about it. It reads the other side's message when it first uses the channel.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.devices.protocol import Device
from commlib.dtypes import numpy_dtype
from commlib.errors import CommlibError, ShutdownError, TransportError, UsageError
from commlib.group.arguments import integer
from commlib.node.rank_table import LEFT
from commlib.p2p.channels.drain import drain
from commlib.p2p.channels.payload import ChannelCodec, ChannelSpec, CodedFormat, PayloadFormat, PlainFormat
from commlib.p2p.channels.posted_end import MOST_DIMENSIONS, TAGS
from commlib.p2p.rendezvous import TAG, Address, Rendezvous, RendezvousOwner
from commlib.process import forks

if TYPE_CHECKING:
    from commlib.group.group import Group
    from commlib.p2p.channels.channel import Channel
    from commlib.p2p.channels.connection import Connection
    from commlib.p2p.channels.device_channel import DeviceChannel
    from commlib.p2p.channels.ends import ChannelEnds
    from commlib.p2p.device.edge import DeviceEdge

log = logging.getLogger("commlib")

_LONGEST_EDGE = 200  # characters
_MOST_DEPTH = 4096
_PARTING = 10.0  # seconds for queued device work when a group ends


class Channels:
    """The channels of one group. Costs nothing until the first one is opened."""

    def __init__(self, group: Group, letters: RendezvousOwner) -> None:
        self._group, self._letters = group, letters
        self._mailbox: Rendezvous | None = None
        self._open: dict[Address, weakref.ref[Connection]] = {}  # weak: a channel may be dropped
        self._opened: Counter[tuple[int, int | str]] = Counter()
        self._created = 0
        self._dropped: deque[ChannelEnds] = deque()  # ends of channels that were not closed; filled by finalizers
        self._lingering: deque[ChannelEnds] = deque()  # closed, but the other side may still map their memory
        self._leave_reason = ""
        self._printed: set[str] = set()

    def open(
        self,
        peer: int,
        edge: int | str,
        shape: Any,
        dtype: Any,
        depth: int,
        codec: ChannelCodec | None,
        device: Device | None = None,
    ) -> Any:
        """Open this rank's side of a channel: see `Communicator.channel`."""
        group = self._group
        terms, form = _make_spec(group, peer, edge, shape, dtype, depth, codec, device)
        text = f"channel {edge!r} with rank {peer}"
        forks.check(text)
        if group.failure is not None:
            group.raise_failure(text)
        if group.runtime.closing or self._leave_reason:
            raise ShutdownError(f"{text}: commlib has been shut down, or {group.name} was closed")
        if self._mailbox is None:
            self._mailbox = self._letters.mailbox
        self.sweep()
        address = Address(peer, edge, self._opened[peer, edge])
        if any(one.peer == peer and one.edge == edge and _is_open(self._open[one]) for one in self._open):
            raise UsageError(
                f"{text} of {group.name} is open on rank {group.rank}: close it first, or use another edge"
            )
        tag = TAG + 1 + self._created * TAGS
        if tag + TAGS > (tags := self._mailbox.transport.tags):
            raise TransportError(
                f"{text}: this MPI has {tags} tags for channels, too few for another of {group.name}: "
                "reopen channels less often, open them in another group, or use send and recv"
            )
        try:
            return self._open_new(group, self._mailbox, address, terms, form, tag, text, device)
        except BaseException as error:  # the other side may have been notified
            group.abandon(text, error)
            raise

    def _open_new(
        self,
        group: Group,
        mailbox: Rendezvous,
        address: Address,
        terms: ChannelSpec,
        form: PayloadFormat,
        tag: int,
        text: str,
        device: Device | None,
    ) -> Channel | DeviceChannel:
        from commlib.p2p.channels.channel import Channel  # loads kernels, and few groups have channels
        from commlib.p2p.channels.connection import Connection
        from commlib.p2p.channels.ends import ChannelEnds

        self._opened[address.peer, address.edge] += 1
        self._created += 1
        edge = None if device is None else self._edge(group, device, address.peer, terms)
        try:
            ends = ChannelEnds.make(group, mailbox, address, terms, form, tag, edge)
        except CommlibError as error:
            mailbox.post(address, "hello", error=str(error))
            raise
        mailbox.post(address, "hello", **ends.hello())
        mailbox.expect(address)
        connection = Connection(group, self, ends, text)
        self._open[address] = weakref.ref(connection)
        weakref.finalize(connection, self._dropped.append, ends).atexit = False
        channel = Channel(connection)
        if edge is None:
            return channel
        from commlib.p2p.channels.device_channel import DeviceChannel

        group.runtime.poller.watch(_Handshake(text, group, ends, self._log_path), group, awaited=False)
        return DeviceChannel(channel, edge, terms)

    def _edge(self, group: Group, device: Device, peer: int, terms: ChannelSpec) -> DeviceEdge:
        from commlib.p2p.device.edge import DeviceEdge

        refusal = ""
        if not group.config.device_peers:
            refusal = "COMMLIB_DEVICE_PEERS=0"
        elif not group.config.node_path or peer not in group.hierarchy.ranks:
            refusal = "the ranks share no host memory"
        ipc, is_named = group.config.device_ipc, group.named_memory
        return DeviceEdge(device, terms.depth, terms.nbytes, refusal, ipc=ipc, is_named=is_named)

    def _log_path(self, group: Group, ends: ChannelEnds) -> None:
        """Log why device channels use host memory, once for each reason."""
        edge, peer = ends.device, ends.address.peer
        why = "" if edge is None else edge.refusal or edge.host_slots_reason
        if edge is None or not why or why in self._printed or group.rank > peer:
            return
        self._printed.add(why)
        how = "by host messages" if edge.refusal else "through shared host memory"
        log.log(
            logging.INFO if edge.is_expected else logging.WARNING,
            "%s: channels of %s between ranks %d and %d go %s: %s",
            group.name, edge.device.name, group.rank, peer, how, why,
        )  # fmt: skip

    def look(self, peer: int) -> None:
        """Poll for the control messages of another rank, and free unused channels. Never blocks."""
        if self._mailbox is not None:
            self._mailbox.poll(peer)
        if self._dropped:
            self.sweep()

    def sweep(self) -> None:
        """Free the memory of closed and dropped channels that is no longer in use."""
        for ends in drain(self._dropped):
            self.end(ends, "has dropped this channel")
        self._lingering.extend([ends for ends in drain(self._lingering) if not ends.try_close()])

    def end(self, ends: ChannelEnds, reason: str, *, failed: bool = False) -> None:
        """Notify the other side that this side has ended; free its memory, now or later. Idempotent."""
        self._open.pop(ends.address, None)
        ends.halt()
        ends.notify(reason, failed=failed)
        if not ends.try_close():
            self._lingering.append(ends)

    def halt(self) -> None:
        """Stop all channels, as in a forked child."""
        for connection in self._connections():
            connection.ends.halt()

    def leave(self, reason: str) -> None:
        """End all channels, because the group has failed or is closing. Blocks briefly at most. Idempotent."""
        if self._mailbox is None or self._leave_reason:
            return
        self._leave_reason = reason or LEFT
        for connection in self._connections():
            if connection.ends.device is not None and not reason:
                connection.flush(_PARTING)
            self.end(connection.ends, self._leave_reason, failed=bool(reason))
        self.sweep()
        if not reason:
            self.close()

    def close(self) -> None:
        """Free everything. The other ranks free their own sides."""
        if not self._leave_reason:
            self.leave("")
            return
        deadline = time.monotonic() + _PARTING
        for ends in drain(self._lingering):
            if ends.device is not None:
                ends.device.part(deadline)
            ends.close()

    def _connections(self) -> Sequence[Connection]:
        return [connection for reference in list(self._open.values()) if (connection := reference()) is not None]


def _is_open(reference: weakref.ref[Connection]) -> bool:
    return reference() is not None


class _Handshake:
    """Connect the two sides of a device channel on the poller's thread, without a call of the user."""

    def __init__(
        self, text: str, group: Group, ends: ChannelEnds, log_path: Callable[[Group, ChannelEnds], None]
    ) -> None:
        self.description, self._text = f"opening {text}", text
        self._group, self._ends, self._log_path = group, ends, log_path

    def done(self) -> bool:
        group, ends = self._group, self._ends
        if ends.has_notified:
            return True
        try:
            if not ends.try_connect(group, self._text):
                return ends.bye() is not None
        except CommlibError:  # the next call on the channel raises it
            return True
        self._log_path(group, ends)
        return True


def _make_spec(
    group: Group,
    peer: int,
    edge: Any,
    shape: Any,
    dtype: Any,
    depth: int,
    codec: ChannelCodec | None,
    device: Device | None,
) -> tuple[ChannelSpec, PayloadFormat]:
    """Return the spec that both sides must share, and the payload format. Raises UsageError for invalid arguments."""
    if not 0 <= integer("channel", "peer", peer) < group.size or peer == group.rank:
        raise UsageError(
            f"channel: peer is {peer}, but rank {group.rank} of {group.name} has the peers 0 to {group.size - 1} "
            "without itself"
        )
    if isinstance(edge, str):
        if not 0 < len(edge) <= _LONGEST_EDGE:
            raise UsageError(f"channel: edge is a name of {len(edge)} characters, expected 1 to {_LONGEST_EDGE}")
    else:
        edge = integer("channel", "edge", edge)
    lengths = shape if isinstance(shape, Sequence) else (shape,)
    dimensions = tuple(integer("channel", "a length of the shape", length) for length in lengths)
    if min(dimensions, default=0) < 0 or len(dimensions) > MOST_DIMENSIONS:
        raise UsageError(f"channel: shape {dimensions}: expected at most {MOST_DIMENSIONS} lengths, none negative")
    if not 1 <= integer("channel", "depth", depth) <= _MOST_DEPTH:
        raise UsageError(f"channel: depth is {depth}, expected 1 to {_MOST_DEPTH} messages")
    kind: np.dtype[Any] = numpy_dtype(dtype)
    if device is not None:
        if codec is not None:
            raise UsageError(
                "channel: codec= supports only host arrays: between devices open a channel of uint8, and send the "
                "payload of commlib.compress.activations.encode"
            )
        return ChannelSpec(dimensions, kind, depth, "none", device.name), PlainFormat(np.dtype(np.uint8))
    form: PayloadFormat = PlainFormat(kind) if codec is None else CodedFormat(codec, kind)
    return ChannelSpec(dimensions, kind, depth, form.name), form
