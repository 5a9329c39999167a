"""RankLinks: open and close one rank's ends of the links between stages on different ranks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.errors import PeerError, line
from commlib.p2p.channels.channel import Channel
from commlib.p2p.channels.device_channel import DeviceChannel
from commlib.pipeline.device_links import DeviceReceiver, DeviceSender
from commlib.pipeline.links import Receiver, Sender
from commlib.pipeline.message import HEAD
from commlib.pipeline.schedule.ir import Kind
from commlib.pipeline.schedule.lower import LinkDirection, LoweredSchedule
from commlib.pipeline.stage import Tensors

_LEFT, _IN_VAIN = "has left the pipeline: it", " in vain, because "
"""The start of the reason why a rank leaves, and the text before the reason of another rank."""


class Waiter(Protocol):
    """What waits in a link."""

    @property
    def purpose(self) -> str:
        """What it waits for, at the end of a sentence."""
        ...


class RankLinks:
    """The senders and receivers of this rank, by link direction: one channel each. Their parameters: see `Runner`."""

    def __init__(
        self,
        comm: Communicator,
        lowered: LoweredSchedule,
        tensors: Tensors,
        name: str,
        codecs: Mapping[LinkDirection, Codec],
        devices: Sequence[str],
    ) -> None:
        self.senders: dict[LinkDirection, Sender | DeviceSender] = {}
        self.receivers: dict[LinkDirection, Receiver | DeviceReceiver] = {}
        self._channels: list[Channel | DeviceChannel] = []
        rank, placement = comm.rank, lowered.schedule.placement
        for way, depth in lowered.depths.items():
            link, kind = way
            ends = placement[link.source], placement[link.target]
            sender, receiver = ends if kind is Kind.F else ends[::-1]
            if rank not in ends:
                continue
            peer = receiver if rank == sender else sender
            edge, codec = f"{name} {link} {kind}", codecs.get(way)
            channel: Channel | DeviceChannel
            if devices[rank] and devices[rank] == devices[peer]:
                channel = device_channel = comm.channel(peer, edge, HEAD, "uint8", depth, device=tensors.device)
                if rank == sender:
                    self.senders[way] = DeviceSender(device_channel, tensors, codec)
                else:
                    self.receivers[way] = DeviceReceiver(device_channel, tensors, codec)
            else:
                channel = host_channel = comm.channel(peer, edge, HEAD, "uint8", depth)
                if rank == sender:
                    self.senders[way] = Sender(host_channel, tensors, codec)
                else:
                    self.receivers[way] = Receiver(host_channel, tensors, codec)
            self._channels.append(channel)

    def explain_waits(self, waiter: Waiter) -> None:
        """Let the messages about long waits say what this object, which is not kept alive, waits for."""
        for channel in self._channels:
            channel.purpose = partial(_purpose, weakref.ref(waiter))

    def leave(self, error: BaseException, place: str = "") -> None:
        """Close the channels because of an error at a place, and send it unless another rank caused it."""
        for channel in self._channels:
            channel.close(_leave_reason(error, place))

    def close(self) -> None:
        """Close the channels. Idempotent; not collective."""
        for channel in self._channels:
            channel.close()


def _purpose(waiter: weakref.ref[Waiter]) -> str:
    own = waiter()
    return "" if own is None else own.purpose


def _leave_reason(error: BaseException, place: str) -> str:
    """Return the reason why a rank leaves: the error, or for a rank that waited in vain the first rank's reason."""
    for peer, why in error.missing.items() if isinstance(error, PeerError) else ():
        if why.startswith(_LEFT):
            first = why.partition(_IN_VAIN)[2] or f"rank {peer} {why}"
            return f"{_LEFT} waited{place}{_IN_VAIN}{first}"
    return f"{_LEFT} failed{place} ({line(error)})"
