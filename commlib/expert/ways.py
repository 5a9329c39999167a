"""Ways between the ranks of an expert axis: layers of one axis share them, and the memory that they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.devices.protocol import Device
from commlib.errors import ShutdownError
from commlib.expert.alone import Alone
from commlib.expert.beside import Beside
from commlib.expert.by_place import ByPlace
from commlib.expert.chosen import Chosen
from commlib.expert.exchange import Exchange
from commlib.expert.on_device import OnDevice
from commlib.expert.on_node import OnNode
from commlib.expert.placement import Placement
from commlib.expert.regions import Regions
from commlib.sharding.axis import Axis


@dataclass(slots=True)
class _Ways:
    comm: Communicator
    regions: Regions | None
    made: dict[tuple[Placement, str], ByPlace] = field(default_factory=dict)
    beside: dict[Device, Beside] = field(default_factory=dict)

    def comms(self) -> Iterator[Communicator]:
        """Yield all communicators on which ranks may wait."""
        yield self.comm
        for exchange in self.made.values():
            yield from exchange.comms


def exchange_over(axis: Axis, placement: Placement, codec: Codec | None = None) -> ByPlace:
    """Return how rows travel over an axis. Collective when it is first asked for, and again after `leave`.

    codec: how floats travel between ranks that share no memory, of a fixed length.
    """
    left = axis.exchanges
    failures = [comm.group.failure for comm in left.comms()] if left is not None and axis.size > 1 else []
    if failure := next(filter(None, failures), None):
        leave(axis, f"{failure}")  # on all, so that all exchanges between them are known to be of no use
        axis.exchanges = None
    ways = _ways(axis)
    key = placement, "" if codec is None else codec.name
    if key not in ways.made:
        comm = ways.comm
        there = partial(OnDevice, comm, placement, codec=None if comm.group.shares_memory else codec)
        host: Exchange
        if axis.size == 1:
            host = Alone(placement, axis.empty)
        elif ways.regions is not None:
            host = OnNode(comm, placement, axis.empty, regions=ways.regions)
        else:
            host = Chosen(comm, placement, axis.empty, codec=codec)
        ways.made[key] = ByPlace(comm, host, there)
    return ways.made[key]


def leave(axis: Axis, text: str) -> None:
    """Let all ranks that wait for this one in an exchange over an axis raise PeerError with a text. Not collective."""
    for comm in _ways(axis).comms() if axis.size > 1 else ():
        comm.group.fail(ShutdownError(text))


def beside_on(axis: Axis, device: Device) -> Beside:
    """Return what runs exchanges over an axis beside the caller's stream of a device."""
    ways = _ways(axis)
    if device not in ways.beside:
        ways.beside[device] = Beside(device)
    return ways.beside[device]


def _ways(axis: Axis) -> _Ways:
    if axis.exchanges is None:
        comm, regions = axis.comm, None
        if axis.size > 1:
            comm = axis.comm.split(0, name=f"{axis.comm.name}.experts")  # type: ignore[assignment]  # all are in it
            regions = Regions(comm) if comm.group.shares_memory else None
        axis.exchanges = _Ways(comm, regions)
    found: _Ways = axis.exchanges
    return found
