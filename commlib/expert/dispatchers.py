"""Dispatchers of an expert axis: layers of one axis share them and their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from commlib.communicator import Communicator
from commlib.compress.codec import Codec
from commlib.devices.protocol import Device
from commlib.errors import ShutdownError
from commlib.expert.cost_dispatcher import CostDispatcher
from commlib.expert.device_dispatcher import DeviceDispatcher
from commlib.expert.dispatcher import Dispatcher
from commlib.expert.local_dispatcher import LocalDispatcher
from commlib.expert.memory_dispatcher import MemoryDispatcher
from commlib.expert.placement import ExpertPlacement
from commlib.expert.shared_memory_dispatcher import SharedMemoryDispatcher
from commlib.expert.side_stream import SideStream
from commlib.expert.token_buffers import TokenBuffers
from commlib.sharding.axis import ParallelAxis


@dataclass(slots=True)
class _Dispatchers:
    comm: Communicator
    regions: TokenBuffers | None
    made: dict[tuple[ExpertPlacement, str], MemoryDispatcher] = field(default_factory=dict)
    beside: dict[Device, SideStream] = field(default_factory=dict)

    def comms(self) -> Iterator[Communicator]:
        """Yield all communicators on which ranks may wait."""
        yield self.comm
        for exchange in self.made.values():
            yield from exchange.comms


def dispatcher_over(axis: ParallelAxis, placement: ExpertPlacement, codec: Codec | None = None) -> MemoryDispatcher:
    """Return the dispatcher over an axis. Collective at the first call, and again after `leave`.

    codec: fixed-length codec for floats between ranks that share no memory.
    """
    left = axis.exchanges
    failures = [comm.group.failure for comm in left.comms()] if left is not None and axis.size > 1 else []
    if failure := next(filter(None, failures), None):
        leave(axis, f"{failure}")  # on all ranks, to mark all dispatchers between them as unusable
        axis.exchanges = None
    ways = _dispatchers_of(axis)
    key = placement, "" if codec is None else codec.name
    if key not in ways.made:
        comm = ways.comm
        there = partial(DeviceDispatcher, comm, placement, codec=None if comm.group.shares_memory else codec)
        host: Dispatcher
        if axis.size == 1:
            host = LocalDispatcher(placement, axis.empty)
        elif ways.regions is not None:
            host = SharedMemoryDispatcher(comm, placement, axis.empty, regions=ways.regions)
        else:
            host = CostDispatcher(comm, placement, axis.empty, codec=codec)
        ways.made[key] = MemoryDispatcher(comm, host, there)
    return ways.made[key]


def leave(axis: ParallelAxis, text: str) -> None:
    """Make all ranks that wait for this rank on an axis raise PeerError with a text. Not collective."""
    for comm in _dispatchers_of(axis).comms() if axis.size > 1 else ():
        comm.group.fail(ShutdownError(text))


def side_stream_on(axis: ParallelAxis, device: Device) -> SideStream:
    """Return the side stream for exchanges over an axis on a device."""
    ways = _dispatchers_of(axis)
    if device not in ways.beside:
        ways.beside[device] = SideStream(device)
    return ways.beside[device]


def _dispatchers_of(axis: ParallelAxis) -> _Dispatchers:
    if axis.exchanges is None:
        comm, regions = axis.comm, None
        if axis.size > 1:
            comm = axis.comm.split(0, name=f"{axis.comm.name}.experts")  # type: ignore[assignment]  # all are in it
            regions = TokenBuffers(comm) if comm.group.shares_memory else None
        axis.exchanges = _Dispatchers(comm, regions)
    found: _Dispatchers = axis.exchanges
    return found
