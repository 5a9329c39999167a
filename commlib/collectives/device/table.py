"""Device paths: the implementations of collectives on device arrays, in a table for each group and device.

A call uses the first path that supports it and is available on all ranks. On one node the table starts with the path
that moves the fewest bytes. On several nodes it starts with NCCL, which is known to be fast between nodes.
Measured times (`commlib tune --device`) reorder the paths that have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from commlib.collectives.call import Call
from commlib.collectives.device.call import DeviceCall
from commlib.collectives.device.cuda_aware import CudaAware
from commlib.collectives.device.host_staging import StagedPath
from commlib.collectives.device.nccl import Nccl
from commlib.collectives.device.node import DevicePeers, NodeDevicePath
from commlib.collectives.device.staging_queue import OnWait, Run, StagingQueue
from commlib.collectives.paths import Path, Verb
from commlib.devices.array import DeviceArray
from commlib.dtypes import name_of
from commlib.errors import UsageError
from commlib.execution.accumulation import is_in_halves
from commlib.group.group import Group


class DevicePath(Protocol):
    """One implementation of a group's collectives, for arrays of one device."""

    @property
    def name(self) -> str:
        """The value of `algorithm=` that selects it; also its name in tables of measured times."""
        ...

    @property
    def refusal(self) -> str:
        """Why it is not available, as far as is known; "" if nothing rules it out. The same on all ranks."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether it is known to be available."""
        ...

    @property
    def only_queues(self) -> bool:
        """Whether its calls only queue work on a stream."""
        ...

    def takes(self, verb: Verb, call: Call) -> bool:
        """Return whether it may run a call that names no device path, as far as is known. The same on all ranks."""
        ...

    def open(self, text: str, on_wait: OnWait) -> bool:
        """Set it up, within a call `text` of all ranks; return whether it is available. The same on all ranks."""
        ...

    def run(self, verb: Verb, call: Call) -> Run:
        """Return a function that runs a supported call. Raises UsageError if the named algorithm cannot run it."""
        ...


class DevicePaths:
    """The device paths of one group on one device."""

    def __init__(self, paths: tuple[Path, ...], group: Group, station: StagingQueue, peers: DevicePeers) -> None:
        self._group, self._station = group, station
        self._direct, self._host = CudaAware(paths, group, station.device), StagedPath(paths, group, station)
        between, nccl = NodeDevicePath(peers), Nccl(group, station.device)
        first: tuple[DevicePath, ...] = (between, nccl) if group.one_node else (nccl, between)
        self._table: tuple[DevicePath, ...] = (*first, NodeDevicePath(peers, by_host=True), self._direct, self._host)

    def compile(self, verb: Verb, call: Call) -> DeviceCall:
        """Compile a call for the first available path. Raises UsageError if the call names an unavailable one."""
        group, text = self._group, call.text
        order, chosen = self._order(verb, call), list[tuple[DevicePath, Run]]()
        if order[0][0].is_open:
            chosen.append(_prepare(verb, *order[0]))

        def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> Any:
            if not chosen:
                selected = next((choice for choice in order if choice[0].open(text, on_wait)), None)
                if selected is None:
                    raise UsageError(f"{verb.name}: algorithm {call.algorithm!r}: {order[-1][0].refusal}")
                chosen.append(_prepare(verb, *selected))
            return chosen[0][1](x, target, on_wait)

        return DeviceCall(
            group.progress,
            text,
            self._station,
            run,
            blocks=any(request.algorithm == "native" for _, request in order),
            only_queues=lambda: bool(chosen) and chosen[0][0].only_queues,
            on_wait=group.waits.watch_each(f"{text}: copies to and from {self._station.device.name}"),
        )

    def open(self, text: str, on_wait: OnWait) -> tuple[str, ...]:
        """Open all paths; return the names of the available ones, in the table's order. Collective."""
        return tuple(dict.fromkeys(way.name for way in self._table if way.open(text, on_wait)))

    def _order(self, verb: Verb, call: Call) -> list[tuple[DevicePath, Call]]:
        """Return the paths that may run a call, best first, each with the call as it is to run it."""
        if call.op and is_in_halves(call.dtype, call.op):
            if call.algorithm in _ALONE and call.algorithm != self._host.name:
                why = f"the mean of {name_of(call.dtype)} is computed on the host, because the sum may overflow"
                raise UsageError(f"{verb.name}: algorithm {call.algorithm!r}: {why}")
            return [(self._host, call)]
        if call.algorithm in _ALONE:
            return [(way, call) for way in self._table if way.name == call.algorithm]
        taking = [way for way in self._table if way.takes(verb, call)]
        times = self._measured(verb, call) if call.algorithm == "auto" and len(taking) > 1 else ()
        if not times:
            return [(way, call) for way in taking]
        named = (replace(call, algorithm=time) for time in times)
        direct = next((request for request in named if self._direct.does(verb, request)), call)
        names = [direct.algorithm if way is self._direct else way.name for way in taking]
        order = [taking[number] for number in order_by_times(names, times)]
        return [(way, direct if way is self._direct else call) for way in order]

    def _measured(self, verb: Verb, call: Call) -> Sequence[str]:
        """Return the algorithms with measured times for this size, the fastest first."""
        group, nodes = self._group, self._group.topology.nodes
        size = group.size if verb.name == "all_gather" else 1  # tables list the gathered size
        times = group.runtime.chooser.measured(
            verb.name, len(nodes), max(map(len, nodes)), size * call.nbytes, device=call.device
        )
        return [time.algorithm for time in times]


# A call that names one of these uses no other path. "node" and "hierarchical" also name paths of the host.
_ALONE = ("nccl", "messages", "host")


def _prepare(verb: Verb, way: DevicePath, call: Call) -> tuple[DevicePath, Run]:
    return way, way.run(verb, call)


def order_by_times(names: Sequence[str], times: Sequence[str]) -> list[int]:
    """Return the order of `names` after sorting those with measured times among themselves, the fastest first.

    times: the measured names, the fastest first. Names without a time keep their position.
    """
    timed = iter(sorted((n for n, name in enumerate(names) if name in times), key=lambda n: times.index(names[n])))
    return [next(timed) if name in times else number for number, name in enumerate(names)]
