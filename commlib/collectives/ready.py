"""Ready: one call of a verb on its arrays, checked and compiled; and the compiled calls of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from commlib.collectives.call import Call
from commlib.collectives.device.call import DeviceCall
from commlib.collectives.device.node import Peers
from commlib.collectives.device.staging_queue import Station
from commlib.collectives.host.hierarchical import Hierarchical
from commlib.collectives.host.native import Native
from commlib.collectives.host.node import Node, Opening
from commlib.collectives.host.scheduled import Scheduled
from commlib.collectives.operands import Result
from commlib.collectives.paths import Path, Verb, compile_call
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import is_contiguous, overlap, viewed
from commlib.devices.protocol import Device
from commlib.devices.registry import lookup, named
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.group import Group
from commlib.group.weak import WeakPart
from commlib.node.uneven import UnevenExchange
from commlib.runtime.compiled import Compiled, Plan
from commlib.runtime.work import Work

if TYPE_CHECKING:
    from commlib.collectives.device.table import Ways

PATHS: tuple[Path, ...] = (Native(), Node(), Hierarchical(), Scheduled())

# Calls of more kinds than this are not kept, for each verb.
_MOST_KINDS = 256


@dataclass(frozen=True, slots=True)
class Known:
    """Hold a compiled call that was made before, and the shape of its result; () if that is `x` itself."""

    compiled: Compiled
    shape: tuple[int, ...]


class Calls:
    """Keep what was compiled for the calls of one group: a table for each verb, by what distinguishes its calls."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.all_reduces: dict[Hashable, Compiled] = {}
        self.uneven: dict[Hashable, UnevenExchange] = {}
        self._tables: defaultdict[str, dict[Hashable, Known]] = defaultdict(dict)
        self._stations: dict[Any, Station] = {}
        self._peers: dict[Any, Peers] = {}
        self._ways: dict[Any, Ways] = {}

    def find(self, verb: Verb, call: Call, key: Hashable, shape: tuple[int, ...] = ()) -> Compiled:
        """Return the compiled call for `key`, made if need be, with which `plain` finds it from then on."""
        table = self._tables[verb.name]
        key = (key, call.device) if call.device else key
        known = table.get(key)
        if known is not None:
            return known.compiled
        compiled = self._compile(verb, call)
        if not isinstance(compiled, Opening):
            if len(table) >= _MOST_KINDS:
                table.clear()
            table[key] = Known(compiled, shape)
        return compiled

    def on_device(self, x: Any, out: Any, op: str, algorithm: str) -> tuple[Compiled, DeviceArray, DeviceArray] | None:
        """Return an all-reduce of a device's array that was compiled before, and what it reads and writes, 1-D.

        None if there is none yet, or where somebody must look at the arrays first.
        """
        device = lookup(x)
        if device is None or not (out is x or lookup(out) is device):
            return None
        target = device.wrap(out, "all_reduce", "out", written=True)
        source = target if out is x else device.wrap(x, "all_reduce")
        found = self.all_reduces.get(((source.dtype, source.size, op, algorithm), device.name))
        if found is None:
            return None
        if source is not target and (
            source.dtype != target.dtype or source.shape != target.shape or overlap(source, target)
        ):
            return None
        return found, source.reshape(-1), target.reshape(-1)

    def new_all_reduce(self, verb: Verb, call: Call, key: Hashable) -> Compiled:
        """Return a compiled all-reduce for a key that is not in its table, which its callers look into themselves."""
        compiled = self._compile(verb, call)
        if not isinstance(compiled, Opening):
            if len(self.all_reduces) >= _MOST_KINDS:
                self.all_reduces.clear()
            self.all_reduces[key] = compiled
        return compiled

    def _compile(self, verb: Verb, call: Call) -> Compiled:
        group = self.group
        if not call.device and call.algorithm != "nccl":
            return compile_call(PATHS, group, verb, call)
        from commlib.collectives.device.nccl import check  # not before somebody has a device

        check(group, verb, call)
        return self.ways(named(call.device)).compile(verb, call)

    def ways(self, device: Device) -> Ways:
        """Return how the data of a device's arrays may go."""
        ways = self._ways.get(device)
        if ways is None:
            from commlib.collectives.device.table import Ways

            ways = self._ways[device] = Ways(PATHS, self.group, self.station(device), self.peers(device))
        return ways

    def open_ways(self, device: Device) -> tuple[str, ...]:
        """Return the names of the ways of a device that are there. Collective."""
        text, ways = f"ways of {device.name}", self.ways(device)
        call = DeviceCall(
            self.group.progress, text, self.station(device), lambda x, _, on_wait: ways.open(text, on_wait)
        )
        return call.now(None, None)  # type: ignore[no-any-return]

    def peers(self, device: Device) -> Peers:
        """Return where the ranks of the group meet on a device."""
        peers = self._peers.get(device)
        if peers is None:
            peers = self._peers[device] = Peers(self.group, self.station(device))
        return peers

    def station(self, device: Device) -> Station:
        """Return where the group's calls meet a device."""
        station = self._stations.get(device)
        if station is None:
            station = self._stations[device] = Station(self.group, device)
            self.group.attach(WeakPart(station))
        return station

    def plain(self, verb: str, key: Hashable, x: Array, out: Any) -> Array | None:
        """Run a call on plain arrays that was compiled before, and return its result; None if that cannot be."""
        known = self._tables[verb].get(key)
        if known is None or not x.flags.c_contiguous:
            return None
        if out is None:
            out = np.empty(known.shape, x.dtype)
        elif out is x:
            if known.shape or not x.flags.carray:
                return None
        elif (
            type(out) is not np.ndarray
            or out.dtype is not x.dtype
            or out.shape != known.shape
            or not out.flags.carray
            or np.may_share_memory(x, out)
        ):
            return None
        return known.compiled.now(x, out)  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Forget all, when the devices have done what was queued."""
        for station in self._stations.values():
            station.close()
        self._stations.clear()
        self._peers.clear()
        self._ways.clear()
        self.all_reduces.clear()
        self.uneven.clear()
        self._tables.clear()


@dataclass(frozen=True, slots=True)
class Ready:
    """Hold a compiled call, the arrays that it reads and writes, and what becomes of its value.

    deliver: makes of the value what the verb returns. known: whether that is the same before the call has run. x: what
    the user passed.
    """

    compiled: Compiled
    source: Any
    target: Any
    deliver: Callable[[Any], Any]
    known: bool = False
    x: Any = None

    @classmethod
    def into(cls, compiled: Compiled, source: Any, result: Result | None, x: Any) -> Ready:
        """Return that of a call with a result that is written to; None: this rank gets nothing."""
        if result is None:
            return cls(compiled, source, source, _nothing, True, x)
        return cls(compiled, source, result.flat, lambda _: result.deliver(), not result.staged, x)

    def run(self) -> Any:
        """Run it now."""
        return self.deliver(self.compiled.now(self.source, self.target))

    def start(self) -> Work:
        """Start it."""
        if self.known:
            return self.compiled.start(self.source, self.target, value=self.deliver(None))
        return self.compiled.start(self.source, self.target, deliver=self.deliver)

    def plan(self, verb: str) -> Plan:
        """Bind it to its arrays. Raises UsageError if it works on a copy of them, which would not follow them."""
        check_bound(self.source, self.x, verb)
        check_bound(self.target, self.target, verb)
        if not self.known and self.target is not self.source:
            raise UsageError(f"plan_{verb}: x and out must be contiguous: a copy of them would not follow them")
        if self.known:
            return self.compiled.bind(self.source, self.target, value=self.deliver(None))
        return self.compiled.bind(self.source, self.target, deliver=self.deliver)


def check_bound(array: Any, given: Any, verb: str) -> None:
    """Raise UsageError if `array`, on which a plan works, is a copy of the one that was given."""
    given = array if given is None else viewed(given, f"plan_{verb}")
    if not is_contiguous(given):
        raise UsageError(f"plan_{verb}: x and out must be contiguous: a copy of them would not follow them")
    if array.size and not overlap(array, given):
        raise UsageError(f"plan_{verb}: x and out overlap: they must be the same array, or apart")


def itself(value: Any) -> Any:
    """Return the value of a call as what its verb returns."""
    return value


def _nothing(value: Any) -> None:
    pass
