"""Dispatcher that sends host rows and device rows on separate paths, chosen by the memory of a layer's first rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.devices.arrays import name_of_device
from commlib.errors import PeerError, ShutdownError
from commlib.expert.cost_dispatcher import CostDispatcher
from commlib.expert.device_dispatcher import DeviceDispatcher
from commlib.expert.device_plan import DeviceDispatchPlan
from commlib.expert.dispatch_plan import Assignments
from commlib.expert.dispatcher import Dispatcher

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _report_failures(method: _Method) -> _Method:
    """Report a peer's failure to the communicators of all paths: ranks on other paths may be waiting for this rank."""

    @functools.wraps(method)
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
    def dispatch_back(self, what: str, passage: Any, rows: Any, numbers: Any) -> tuple[Any, Any]:
        return self._dispatcher_of(passage).dispatch_back(what, passage, rows, numbers)

    @_report_failures
    def combine(self, what: str, passage: Any, rows: Any, gates: Any) -> Any:
        return self._dispatcher_of(passage).combine(what, passage, rows, gates)

    @_report_failures
    def combine_back(self, what: str, passage: Any, x: Any) -> Any:
        return self._dispatcher_of(passage).combine_back(what, passage, x)

    def _dispatcher_of(self, passage: Any) -> Dispatcher:
        return self._on_device() if type(passage) is DeviceDispatchPlan else self.host

    def _on_device(self) -> Dispatcher:
        if self._device_dispatcher is None:
            self._device_dispatcher = self._make()
        return self._device_dispatcher
