"""Ways: how the data of devices' arrays goes. A way is a class; this is the table of them, for a group and a device.

A call takes the first one that takes it and that the ranks find to be there. On a node the table's order is by what
moves the fewest bytes. Between nodes NCCL comes first, which many have measured there. Those that were measured here
(`commlib tune --device`) change places by what they took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from commlib.collectives.call import Call
from commlib.collectives.device.call import DeviceCall
from commlib.collectives.device.cuda_aware import Direct
from commlib.collectives.device.nccl import Nccl
from commlib.collectives.device.node import Between, Peers
from commlib.collectives.device.staged import Staged
from commlib.collectives.device.staging_queue import OnWait, Run, Station
from commlib.collectives.paths import Path, Verb
from commlib.devices.array import DeviceArray
from commlib.dtypes import name_of
from commlib.errors import UsageError
from commlib.execution.accumulation import is_in_halves
from commlib.group.group import Group


class Way(Protocol):
    """One way on which the calls of a group may go, with arrays of one device."""

    @property
    def name(self) -> str:
        """What users give as `algorithm=` to have it, and what tables of measured times call it."""
        ...

    @property
    def refusal(self) -> str:
        """Why it is not there, as far as was found out; "" if nothing is known against it. The same on all ranks."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether it is known to be there."""
        ...

    @property
    def only_queues(self) -> bool:
        """Whether its calls do nothing but queue work on a stream."""
        ...

    def takes(self, verb: Verb, call: Call) -> bool:
        """Return whether it may take a call that asks for no way alone, as far as is known. The same on all ranks."""
        ...

    def open(self, text: str, on_wait: OnWait) -> bool:
        """Make what it needs, within a call `text` of all ranks, and return whether it is there. The same on all."""
        ...

    def run(self, verb: Verb, call: Call) -> Run:
        """Return what does a call that it takes. Raises UsageError for an algorithm that cannot do it."""
        ...


class Ways:
    """Those of a group and a device."""

    def __init__(self, paths: tuple[Path, ...], group: Group, station: Station, peers: Peers) -> None:
        self._group, self._station = group, station
        self._direct, self._host = Direct(paths, group, station.device), Staged(paths, group, station)
        between, nccl = Between(peers), Nccl(group, station.device)
        first: tuple[Way, ...] = (between, nccl) if group.one_node else (nccl, between)
        self._table: tuple[Way, ...] = (*first, Between(peers, by_host=True), self._direct, self._host)

    def compile(self, verb: Verb, call: Call) -> DeviceCall:
        """Return what runs a call by the first way that is there. Raises UsageError if it names one that cannot be."""
        group, text = self._group, call.text
        order, chosen = self._order(verb, call), list[tuple[Way, Run]]()
        if order[0][0].is_open:
            chosen.append(_chosen(verb, *order[0]))

        def run(x: DeviceArray, target: DeviceArray, on_wait: OnWait) -> Any:
            if not chosen:
                found = next((choice for choice in order if choice[0].open(text, on_wait)), None)
                if found is None:
                    raise UsageError(f"{verb.name}: algorithm {call.algorithm!r}: {order[-1][0].refusal}")
                chosen.append(_chosen(verb, *found))
            return chosen[0][1](x, target, on_wait)

        return DeviceCall(
            group.progress,
            text,
            self._station,
            run,
            blocks=any(asked.algorithm == "native" for _, asked in order),
            only_queues=lambda: bool(chosen) and chosen[0][0].only_queues,
            on_wait=group.on_wait(f"{text}: copies to and from {self._station.device.name}"),
        )

    def open(self, text: str, on_wait: OnWait) -> tuple[str, ...]:
        """Open all of them; return the names of those that are there, in the table's order. Collective."""
        return tuple(dict.fromkeys(way.name for way in self._table if way.open(text, on_wait)))

    def _order(self, verb: Verb, call: Call) -> list[tuple[Way, Call]]:
        """Return the ways that may take a call, each with what it is asked for, the first choice first."""
        if call.op and is_in_halves(call.dtype, call.op):
            if call.algorithm in _ALONE and call.algorithm != self._host.name:
                why = f"the mean of {name_of(call.dtype)}, whose sum may not fit it, is taken on the host"
                raise UsageError(f"{verb.name}: algorithm {call.algorithm!r}: {why}")
            return [(self._host, call)]
        if call.algorithm in _ALONE:
            return [(way, call) for way in self._table if way.name == call.algorithm]
        taking = [way for way in self._table if way.takes(verb, call)]
        times = self._measured(verb, call) if call.algorithm == "auto" and len(taking) > 1 else ()
        if not times:
            return [(way, call) for way in taking]
        named = (replace(call, algorithm=time) for time in times)
        direct = next((asked for asked in named if self._direct.does(verb, asked)), call)
        names = [direct.algorithm if way is self._direct else way.name for way in taking]
        order = [taking[number] for number in by_times(names, times)]
        return [(way, direct if way is self._direct else call) for way in order]

    def _measured(self, verb: Verb, call: Call) -> Sequence[str]:
        """Return the algorithms that were measured for data of this size, the fastest first."""
        group, nodes = self._group, self._group.topology.nodes
        size = group.size if verb.name == "all_gather" else 1  # tables mean what is gathered
        found = group.runtime.chooser.measured(
            verb.name, len(nodes), max(map(len, nodes)), size * call.nbytes, device=call.device
        )
        return [time.algorithm for time in found]


# Who asks for one of these by name wants no other. Between devices "node" and "hierarchical" are the host's, too.
_ALONE = ("nccl", "messages", "host")


def _chosen(verb: Verb, way: Way, call: Call) -> tuple[Way, Run]:
    return way, way.run(verb, call)


def by_times(names: Sequence[str], times: Sequence[str]) -> list[int]:
    """Return the order of some names: those that were timed change places among themselves, the fastest first.

    times: names, the fastest first. What was not timed stays where it is: nobody knows.
    """
    timed = iter(sorted((n for n, name in enumerate(names) if name in times), key=lambda n: times.index(names[n])))
    return [next(timed) if name in times else number for number, name in enumerate(names)]
