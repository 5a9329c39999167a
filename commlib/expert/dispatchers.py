"""Dispatchers of an expert axis: choose them by the memory of rows and by cost; layers of one axis share them.

Host rows and device rows travel on separate paths. Between nodes each token goes to each rank separately, or once to
each node, whichever is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, TypeVar, cast

import numpy as np

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.compress.codec import Codec
from commlib.cost.exchanges import direct_seconds, hierarchical_seconds
from commlib.devices.arrays import name_of_device
from commlib.devices.protocol import Device
from commlib.dtypes import Array
from commlib.errors import PeerError, ShutdownError
from commlib.expert.device_dispatcher import DeviceDispatcher
from commlib.expert.device_plan import DeviceDispatchPlan
from commlib.expert.dispatch_plan import Assignments, DispatchPlan
from commlib.expert.dispatcher import Dispatcher, Empty
from commlib.expert.hierarchical_dispatcher import HierarchicalDispatcher
from commlib.expert.local_dispatcher import LocalDispatcher
from commlib.expert.message_dispatcher import MessageDispatcher
from commlib.expert.placement import ExpertPlacement
from commlib.expert.shared_memory_dispatcher import SharedMemoryDispatcher
from commlib.expert.side_stream import SideStream
from commlib.expert.token_buffers import TokenBuffers
from commlib.sharding.axis import ParallelAxis


@dataclass(slots=True)
class _Dispatchers:
    comm: Communicator
    regions: TokenBuffers | None
    dispatchers: dict[tuple[ExpertPlacement, str], MemoryDispatcher] = field(default_factory=dict)
    side_streams: dict[Device, SideStream] = field(default_factory=dict)

    def comms(self) -> Iterator[Communicator]:
        """Yield all communicators on which ranks may wait."""
        yield self.comm
        for exchange in self.dispatchers.values():
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
    if key not in ways.dispatchers:
        comm = ways.comm
        there = partial(DeviceDispatcher, comm, placement, codec=None if comm.group.shares_memory else codec)
        host: Dispatcher
        if axis.size == 1:
            host = LocalDispatcher(placement, axis.empty)
        elif ways.regions is not None:
            host = SharedMemoryDispatcher(comm, placement, axis.empty, regions=ways.regions)
        else:
            host = CostDispatcher(comm, placement, axis.empty, codec=codec)
        ways.dispatchers[key] = MemoryDispatcher(comm, host, there)
    return ways.dispatchers[key]


def leave(axis: ParallelAxis, text: str) -> None:
    """Make all ranks that wait for this rank on an axis raise PeerError with a text. Not collective."""
    for comm in _dispatchers_of(axis).comms() if axis.size > 1 else ():
        comm.group.fail(ShutdownError(text))


def side_stream_on(axis: ParallelAxis, device: Device) -> SideStream:
    """Return the side stream for exchanges over an axis on a device."""
    ways = _dispatchers_of(axis)
    if device not in ways.side_streams:
        ways.side_streams[device] = SideStream(device)
    return ways.side_streams[device]


def _dispatchers_of(axis: ParallelAxis) -> _Dispatchers:
    if axis.exchanges is None:
        comm, regions = axis.comm, None
        if axis.size > 1:
            comm = axis.comm.split(0, name=f"{axis.comm.name}.experts")
            regions = TokenBuffers(comm) if comm.group.shares_memory else None
        axis.exchanges = _Dispatchers(comm, regions)
    result: _Dispatchers = axis.exchanges
    return result


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _report_failures(method: _Method) -> _Method:
    """Report a peer's failure to the communicators of all paths: ranks on other paths may be waiting for this rank."""

    @wraps(method)
    def called(self: MemoryDispatcher, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except PeerError as error:
            for comm in self.comms:
                comm.group.fail(ShutdownError(f"{error}"))
            raise

    return cast(_Method, called)


class MemoryDispatcher:
    """See `commlib.expert.dispatcher.Dispatcher`.

    host: the dispatcher for host rows. make: makes the dispatcher for device rows. comm: a communicator of all ranks.
    With the first rows, the ranks check on it that all of them have rows in the same memory; MismatchError if not.
    """

    def __init__(self, comm: Communicator, host: Dispatcher, make: Callable[[], DeviceDispatcher]) -> None:
        self.placement, self.host, self._comm, self._make = host.placement, host, comm, make
        self.places: set[str] = set()
        """Memories of the rows so far: names of kinds of devices, "" for the host."""
        self._device_dispatcher: DeviceDispatcher | None = None

    @property
    def comms(self) -> Sequence[Communicator]:
        """Communicators on which ranks may wait, in addition to that of all ranks."""
        return self.host.comms if isinstance(self.host, CostDispatcher) else ()

    @property
    def has_left_rank(self) -> bool:
        """Whether a rank has left. If so, all ranks must make a new dispatcher."""
        return any(isinstance(one, Communicator) and one.group.failure is not None for one in (self._comm, *self.comms))

    @_report_failures
    def dispatch(self, what: str, assigned: Assignments, x: Any, gates: Any) -> tuple[Any, Any, Any, Any]:
        name = name_of_device(x)
        if name not in self.places:
            check_agreement(self._comm, "experts", [what, f"rows on {name or 'the host'}"])
            self.places.add(name)
        return (self._on_device() if name else self.host).dispatch(what, assigned, x, gates)

    @_report_failures
    def dispatch_back(self, what: str, plan: Any, rows: Any, numbers: Any) -> tuple[Any, Any]:
        return self._dispatcher_of(plan).dispatch_back(what, plan, rows, numbers)

    @_report_failures
    def combine(self, what: str, plan: Any, rows: Any, gates: Any) -> Any:
        return self._dispatcher_of(plan).combine(what, plan, rows, gates)

    @_report_failures
    def combine_back(self, what: str, plan: Any, x: Any) -> Any:
        return self._dispatcher_of(plan).combine_back(what, plan, x)

    def _dispatcher_of(self, plan: Any) -> Dispatcher:
        return self._on_device() if type(plan) is DeviceDispatchPlan else self.host

    def _on_device(self) -> Dispatcher:
        if self._device_dispatcher is None:
            self._device_dispatcher = self._make()
        return self._device_dispatcher


class CostDispatcher:
    """See `commlib.expert.dispatcher.Dispatcher`. Chooses at the first dispatch, by the number of tokens sent then."""

    def __init__(
        self, comm: Communicator, placement: ExpertPlacement, empty: Empty = np.empty, *, codec: Codec | None = None
    ) -> None:
        self.placement = placement
        self._comm, self._empty, self._codec = comm, empty, codec
        self._dispatcher: Dispatcher | None = None

    @property
    def comms(self) -> Sequence[Communicator]:
        """Communicators on which ranks may wait, in addition to that of all ranks."""
        return self._dispatcher.comms if isinstance(self._dispatcher, HierarchicalDispatcher) else ()

    def dispatch(
        self, what: str, assigned: Assignments, x: Array, gates: Array
    ) -> tuple[DispatchPlan, Array, Array, Array]:
        if self._dispatcher is None:
            self._dispatcher = self._choose(len(x), len(gates), x.itemsize * x.shape[1])
        return self._dispatcher.dispatch(what, assigned, x, gates)

    def dispatch_back(self, what: str, plan: DispatchPlan, rows: Array, numbers: Array) -> tuple[Array, Array]:
        assert self._dispatcher is not None
        return self._dispatcher.dispatch_back(what, plan, rows, numbers)

    def combine(self, what: str, plan: DispatchPlan, rows: Array, gates: Array) -> Array:
        assert self._dispatcher is not None
        sums: Array = self._dispatcher.combine(what, plan, rows, gates)
        return sums

    def combine_back(self, what: str, plan: DispatchPlan, x: Array) -> Array:
        assert self._dispatcher is not None
        rows: Array = self._dispatcher.combine_back(what, plan, x)
        return rows

    def _choose(self, tokens: int, assignments: int, row_bytes: int) -> Dispatcher:
        comm, nodes = self._comm, self._comm.topology.nodes
        arguments = (comm, self.placement, self._empty)
        if len({len(ranks) for ranks in nodes}) > 1 or not comm.is_hierarchical:
            return MessageDispatcher(*arguments, codec=self._codec)
        totals = comm.all_reduce(np.array([tokens, assignments], np.int64))
        each, top_k = int(totals[0]) / comm.size, max(1, round(int(totals[1]) / max(1, int(totals[0]))))
        shape = len(nodes), len(nodes[0]), each, float(row_bytes), top_k, comm.runtime.chooser.machine
        if hierarchical_seconds(*shape) < direct_seconds(*shape):
            return HierarchicalDispatcher(*arguments, codec=self._codec)
        return MessageDispatcher(*arguments, codec=self._codec)
