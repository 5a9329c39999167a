"""ByPlace: rows travel between the host's memories or between those of devices, wherever a layer's first rows are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from commlib.communicator import Communicator
from commlib.comparison.parameter_check import check_agreement
from commlib.devices.arrays import name_of_device
from commlib.errors import PeerError, ShutdownError
from commlib.expert.chosen import Chosen
from commlib.expert.device_passage import DevicePassage
from commlib.expert.exchange import Exchange
from commlib.expert.on_device import OnDevice
from commlib.expert.passage import Assigned

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _passed_on(method: _Method) -> _Method:
    """Let ranks of all ways hear of a rank that will not come: some wait for this one, on a way between other nodes."""

    @functools.wraps(method)
    def called(self: ByPlace, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except PeerError as error:
            for comm in self.comms:
                comm.group.fail(ShutdownError(f"{error}"))
            raise

    return cast(_Method, called)


class ByPlace:
    """See `commlib.expert.exchange.Exchange`.

    host: the exchange of the host's rows. make: makes that of a device's. comm: of all ranks, which find out with the
    first rows whether all of them have theirs in the same place; MismatchError if not.
    """

    def __init__(self, comm: Communicator, host: Exchange, make: Callable[[], OnDevice]) -> None:
        self.placement, self.host, self._comm, self._make = host.placement, host, comm, make
        self.places: set[str] = set()
        """Where rows have been so far: the names of kinds of devices, "" for the host."""
        self._there: OnDevice | None = None

    @property
    def comms(self) -> Sequence[Communicator]:
        """Those on which ranks may wait, beside that of all."""
        return self.host.comms if isinstance(self.host, Chosen) else ()

    @property
    def is_left(self) -> bool:
        """Whether a rank has left: then another exchange is to be made, on all ranks."""
        return any(isinstance(one, Communicator) and one.group.failure is not None for one in (self._comm, *self.comms))

    @_passed_on
    def dispatch(self, what: str, assigned: Assigned, x: Any, gates: Any) -> tuple[Any, Any, Any, Any]:
        name = name_of_device(x)
        if name not in self.places:
            check_agreement(self._comm, "experts", [what, f"rows on {name or 'the host'}"])
            self.places.add(name)
        return (self._on_device() if name else self.host).dispatch(what, assigned, x, gates)

    @_passed_on
    def dispatch_back(self, what: str, passage: Any, rows: Any, numbers: Any) -> tuple[Any, Any]:
        return self._way_of(passage).dispatch_back(what, passage, rows, numbers)

    @_passed_on
    def combine(self, what: str, passage: Any, rows: Any, gates: Any) -> Any:
        return self._way_of(passage).combine(what, passage, rows, gates)

    @_passed_on
    def combine_back(self, what: str, passage: Any, x: Any) -> Any:
        return self._way_of(passage).combine_back(what, passage, x)

    def _way_of(self, passage: Any) -> Exchange:
        return self._on_device() if type(passage) is DevicePassage else self.host

    def _on_device(self) -> Exchange:
        if self._there is None:
            self._there = self._make()
        return self._there
