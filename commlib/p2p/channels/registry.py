"""Channels: open and end the channels of one group. Two ranks open each, whenever they like; all end with the group.

Opening a channel involves no other rank and no wait. A rank makes the memory that it receives into, and posts a letter
about it. It meets the other side's letter when it first uses the channel.
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
from commlib.node.board import LEFT
from commlib.p2p.channels.payload import Codec, Coded, Form, Plain
from commlib.p2p.channels.posted import MOST_DIMENSIONS, TAGS
from commlib.p2p.channels.spec import Terms
from commlib.p2p.channels.taken import taken
from commlib.p2p.letters import Letters
from commlib.p2p.mailbox import TAG, Address, Mailbox
from commlib.process import forks

if TYPE_CHECKING:
    from commlib.group.group import Group
    from commlib.p2p.channels.channel import Channel
    from commlib.p2p.channels.device_channel import DeviceChannel
    from commlib.p2p.channels.ends import Ends
    from commlib.p2p.device.edge import DeviceEdge

log = logging.getLogger("commlib")

_LONGEST_EDGE = 200  # characters
_MOST_DEPTH = 4096
_PARTING = 10.0  # seconds for what devices have still to do when a group ends


class Channels:
    """Keep what a group knows of its channels. Costs nothing until the first is opened."""

    def __init__(self, group: Group, letters: Letters) -> None:
        self._group, self._letters = weakref.ref(group), letters
        self._mailbox: Mailbox | None = None
        self._open: dict[Address, weakref.ref[Channel]] = {}
        self._opened: Counter[tuple[int, int | str]] = Counter()
        self._made = 0
        self._dropped: deque[Ends] = deque()  # of channels that nobody closed; filled by the garbage collector
        self._lingering: deque[Ends] = deque()  # closed, but the other side may still map their memory
        self._left = ""
        self._said: set[str] = set()

    def open(
        self,
        peer: int,
        edge: int | str,
        shape: Any,
        dtype: Any,
        depth: int,
        codec: Codec | None,
        device: Device | None = None,
    ) -> Any:
        """Open this rank's side of a channel: see `Communicator.channel`."""
        group = self._group()
        assert group is not None
        terms, form = _terms(group, peer, edge, shape, dtype, depth, codec, device)
        text = f"channel {edge!r} with rank {peer}"
        forks.check(text)
        if group.failure is not None:
            group.raise_failure(text)
        if group.runtime.closing or self._left:
            raise ShutdownError(f"{text}: commlib has been shut down, or {group.name} was closed")
        if self._mailbox is None:
            self._mailbox = self._letters.mailbox
        self.sweep()
        address = Address(peer, edge, self._opened[peer, edge])
        if any(known.peer == peer and known.edge == edge and _is_open(self._open[known]) for known in self._open):
            raise UsageError(
                f"{text} of {group.name} is open on rank {group.rank}: close it first, or name another edge"
            )
        tag = TAG + 1 + self._made * TAGS
        if tag + TAGS > (tags := self._mailbox.transport.tags):
            raise TransportError(
                f"{text}: this MPI has {tags} tags for channels, too few for another of {group.name}: "
                "close and reopen fewer, open them in another group, or use send and recv"
            )
        try:
            return self._open_new(group, self._mailbox, address, terms, form, tag, text, device)
        except BaseException as error:  # the other side may have been told
            group.abandon(text, error)
            raise

    def _open_new(
        self,
        group: Group,
        mailbox: Mailbox,
        address: Address,
        terms: Terms,
        form: Form,
        tag: int,
        text: str,
        device: Device | None,
    ) -> Channel | DeviceChannel:
        from commlib.p2p.channels.channel import Channel  # loads kernels, and few groups have channels
        from commlib.p2p.channels.ends import Ends

        self._opened[address.peer, address.edge] += 1
        self._made += 1
        edge = None if device is None else self._edge(group, device, address.peer, terms)
        try:
            ends = Ends.make(group, mailbox, address, terms, form, tag, edge)
        except CommlibError as error:
            mailbox.post(address, "hello", error=str(error))
            raise
        mailbox.post(address, "hello", **ends.hello())
        mailbox.expect(address)
        channel = Channel(group, self, ends, text)
        self._open[address] = weakref.ref(channel)
        weakref.finalize(channel, self._dropped.append, ends).atexit = False
        if edge is None:
            return channel
        from commlib.p2p.channels.device_channel import DeviceChannel

        group.runtime.poller.watch(_Meeting(text, group, ends, self._say), group, awaited=False)
        return DeviceChannel(channel, group, edge, terms)

    def _edge(self, group: Group, device: Device, peer: int, terms: Terms) -> DeviceEdge:
        from commlib.p2p.device.edge import DeviceEdge

        refusal = ""
        if not group.config.device_peers:
            refusal = "COMMLIB_DEVICE_PEERS=0"
        elif not group.config.node_path or peer not in group.hierarchy.ranks:
            refusal = "the ranks share no memory"
        ipc, is_named = group.config.device_ipc, group.named_memory
        return DeviceEdge(device, terms.depth, terms.nbytes, refusal, ipc=ipc, is_named=is_named)

    def _say(self, group: Group, ends: Ends) -> None:
        """Say why channels of devices go by way of the host, once for each reason."""
        edge, peer = ends.device, ends.address.peer
        why = "" if edge is None else edge.refusal or edge.apart
        if edge is None or not why or why in self._said or group.rank > peer:
            return
        self._said.add(why)
        how = "by way of the host" if edge.refusal else "through memory of the host"
        log.log(
            logging.INFO if edge.is_expected else logging.WARNING,
            "%s: channels of %s between ranks %d and %d go %s: %s",
            group.name, edge.device.name, group.rank, peer, how, why,
        )  # fmt: skip

    def look(self, peer: int) -> None:
        """Ask for what another rank has told, and give back what is used no more. Never blocks."""
        if self._mailbox is not None:
            self._mailbox.ask(peer)
        if self._dropped:
            self.sweep()

    def sweep(self) -> None:
        """Give back what ended channels have left, once it is unused."""
        for ends in taken(self._dropped):
            self.end(ends, "has dropped this channel")
        self._lingering.extend([ends for ends in taken(self._lingering) if not ends.try_close()])

    def end(self, ends: Ends, reason: str, *, failed: bool = False) -> None:
        """Tell the other side that this one takes part no more, and give back what it has, now or later. Idempotent."""
        self._open.pop(ends.address, None)
        ends.halt()
        ends.tell(reason, failed=failed)
        if not ends.try_close():
            self._lingering.append(ends)

    def halt(self) -> None:
        """Let nothing move in any channel, as in a forked child."""
        for channel in self._channels():
            channel.ends.halt()

    def leave(self, reason: str) -> None:
        """End all channels: the group has failed on this rank, or it leaves. Never blocks for long. Idempotent."""
        if self._mailbox is None or self._left:
            return
        self._left = reason or LEFT
        for channel in self._channels():
            if channel.ends.device is not None and not reason:
                channel.flush(_PARTING)
            self.end(channel.ends, self._left, failed=bool(reason))
        self.sweep()
        if not reason:
            self.close()

    def close(self) -> None:
        """Give everything back. The other ranks' sides end by themselves."""
        if not self._left:
            self.leave("")
            return
        deadline = time.monotonic() + _PARTING
        for ends in taken(self._lingering):
            if ends.device is not None:
                ends.device.part(deadline)
            ends.close()

    def _channels(self) -> Sequence[Channel]:
        return [channel for known in list(self._open.values()) if (channel := known()) is not None]


def _is_open(known: weakref.ref[Channel]) -> bool:
    return known() is not None


class _Meeting:
    """Let the two sides of a channel between devices meet on the poller's thread, whatever their hosts do meanwhile."""

    def __init__(self, text: str, group: Group, ends: Ends, say: Callable[[Group, Ends], None]) -> None:
        self.description, self._text = f"opening {text}", text
        self._group, self._ends, self._say = weakref.ref(group), weakref.ref(ends), say

    def done(self) -> bool:
        group, ends = self._group(), self._ends()
        if group is None or ends is None or ends.has_told:
            return True
        try:
            if not ends.try_connect(group, self._text):
                return ends.bye() is not None
        except CommlibError:  # whoever uses the channel finds out
            return True
        self._say(group, ends)
        return True


def _terms(
    group: Group, peer: int, edge: Any, shape: Any, dtype: Any, depth: int, codec: Codec | None, device: Device | None
) -> tuple[Terms, Form]:
    """Return what both sides must have alike. Raises UsageError for what no side may have."""
    if not 0 <= integer("channel", "peer", peer) < group.size or peer == group.rank:
        raise UsageError(
            f"channel: peer is {peer}, but rank {group.rank} of {group.name} has as peers the other ranks from 0 to "
            f"{group.size - 1}"
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
                "channel: codec= is for arrays of the host: between devices open a channel of uint8, and send what "
                "commlib.compress.activations.encode returns"
            )
        return Terms(dimensions, kind, depth, "none", device.name), Plain(np.dtype(np.uint8))
    form: Form = Plain(kind) if codec is None else Coded(codec, kind)
    return Terms(dimensions, kind, depth, form.name), form
