"""Compressed bucket: reduce one bucket of a group, encoded where it crosses the slow link.

    several nodes, several ranks each     one rank on each node     one node, asked to     one node
    sum in the node (shared memory)
    this rank's share over its rail     everything over all       everything over all    nothing is compressed
    shares to all ranks of the node

Within a node memory is faster than any codec, so there nothing is compressed unless that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from commlib.buffers.views import address_of
from commlib.communicator import Communicator
from commlib.compress.feedback import is_finite
from commlib.compress.gaps import Gaps
from commlib.compress.scheme import Part, Reducer, Scheme
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of, name_of_device
from commlib.group.operation import Operation
from commlib.node.collective import Exchange, NodeCollective
from commlib.schedule.layout import even

_ALIGNMENT = 256
"""Elements: shares begin at multiples of it, so that few blocks of a codec are cut."""


class SlowLink:
    """The private groups over which compressed reductions of a communicator go. Collective to make.

    within_node: compress between all ranks, also those of one node. whole: all ranks. node: those of this node, where
    values are added up first; None where nothing is. comm: the ranks among which this rank's share crosses the slow
    link; None if this rank has none. share: the number of that share, one for each of the `rails`.
    """

    def __init__(self, comm: Communicator, *, within_node: bool = False) -> None:
        self.whole = comm
        self.node: Communicator | None = None
        self.comm: Communicator | None = None
        self.rails = self.share = 0
        topology = comm.topology
        if within_node or topology.is_flat:
            self.rails, self.comm = 1, comm.private()
        elif len(topology.nodes) > 1:
            parts = comm.parts()
            self.rails, self.share, self.node, self.comm = topology.rails, parts.place, parts.node, parts.rail

    @property
    def compresses(self) -> bool:
        """Whether anything is compressed at all: the same on all ranks."""
        return self.rails > 0 and self.whole.size > 1

    @property
    def hosts(self) -> int:
        """The number of ranks between which a share travels."""
        return self.whole.size if self.node is None else len(self.whole.topology.nodes)

    def shares(self, parts: Sequence[Part], count: int, *, divisible: bool) -> list[tuple[int, int]]:
        """Return (first element, end) of what each rail reduces of a bucket with so many elements.

        Parameters are cut only if they are divisible. The last share ends at `count`.
        """
        ideal = even(-(-count // _ALIGNMENT), self.rails).offsets
        bounds = [min(offset * _ALIGNMENT, count) for offset in ideal]
        if not divisible:
            starts = [0, *sorted(part.start for part in parts), count]
            bounds = [min(starts, key=lambda start: abs(start - bound)) for bound in bounds]
        bounds[0], bounds[-1] = 0, count
        return list(pairwise(bounds))


def parts_within(parts: Sequence[Part], first: int, end: int) -> list[Part]:
    """Return what a share has of the parts, counted from its beginning; the name of a piece says where it was cut."""
    found = []
    for part in parts:
        start, stop = max(part.start, first), min(part.stop, end)
        if start >= stop:
            continue
        if stop - start == part.count:
            found.append(Part(part.name, start - first, part.shape))
        else:
            name = f"{part.name}[{start - part.start}:{stop - part.start}]"
            found.append(Part(name, start - first, (stop - start,)))
    return found


def split_piece(name: str) -> tuple[str, str]:
    """Return the parameter of a part's name, and which piece of it the part is: "" for all of it."""
    found = re.fullmatch(r"(.*?)(\[\d+:\d+\])?", name, re.DOTALL)
    assert found is not None
    return found[1], found[2] or ""


class CompressedBucket:
    """Reduces one bucket of a group by a scheme, as one operation of that group: a plan, as an all-reduce has one.

    `array`, of any device, holds float32 values, and flags from element `flags` on: exact, and positive afterwards if
    they were on any rank. `op` is "sum" or "mean". `finite` says whether the result was, the same on all ranks.
    """

    def __init__(
        self, link: SlowLink, scheme: Scheme, array: Any, parts: Sequence[Part], flags: int, op: str, key: str
    ) -> None:
        self._link, self._flags = link, flags
        self._kernels = device_of(array).kernels
        self.finite = True
        shares = link.shares(parts, flags, divisible=scheme.divisible)
        self._shares = [*shares[:-1], (shares[-1][0], len(array))]  # flags go with the last one
        self._scale = 1 / link.whole.size if op == "mean" else 1.0
        self._gaps = Gaps(parts, 0, flags)
        self.reducer: Reducer | None = None
        if link.comm is not None:
            first, end = shares[link.share]
            own = parts_within(parts, first, end)
            self.reducer = scheme.reducer(link.comm, own, key=f"{key}.{first}", device=device_of(array))
        self.use(array)
        text = f"compressed all_reduce {key} of {len(array)} x float32, op={op}, {scheme.name}"
        if device := name_of_device(array):
            text += f", device={device}"
        self._text = text
        plan = link.whole.plan_program(text, self._run, on=array)
        self._now, self.start = plan, plan.start
        self.uncompressed_bytes = 2 * (link.hosts - 1) * array.nbytes // (link.hosts * link.rails)

    def use(self, array: Any) -> None:
        """Reduce in another array of the same length, on the same device, from now on."""
        self._array, self._values = array, array[: self._flags]
        if self._link.comm is not None:
            first, end = self._shares[self._link.share]
            self._mine = array[first : min(end, self._flags)]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank handed to messages across the slow link in the last reduction."""
        return 0 if self.reducer is None else self.reducer.sent_bytes

    def __call__(self) -> Any:
        """Run it here and now."""
        return self._now()

    def end_step(self) -> None:
        """Note that this bucket is all that was reduced: see `GradientCompression.end_step`."""
        if not self.finite and self.reducer is not None:
            self.reducer.rollback()

    def _run(self) -> None:
        link, array = self._link, self._array
        self._gaps.clear(self._values, self._kernels)  # of what the last step left there
        if self._scale != 1:
            self._kernels.scale(self._values, self._scale)
        if link.node is not None:
            link.node.all_reduce(array, out=array)
        if self.reducer is not None:
            self.finite = self.reducer.reduce(self._mine, array[self._flags :])
        if link.node is not None:
            self._spread(link.node)
            self.finite = is_finite(self._values)

    def _spread(self, node: Communicator) -> None:
        """Give all ranks of the node the shares of its rails."""
        if type(self._array) is DeviceArray or not node.group.shares_memory:
            if node.size > 1:
                self._spread_by_messages(node)
            return
        shares = [(first * 4, (end - first) * 4) for first, end in self._shares]
        share, others = self._link.share, [(0, 0)] * (node.size - len(shares))
        own = shares[share] if share < len(shares) else (0, 0)
        exchange = Exchange([own], [*shares, *others], max(length for _, length in shares))
        at = address_of(self._array)

        def run() -> None:
            NodeCollective.exchange(node.group.open(), self._text, exchange).run_at(at, at)

        node.group.run(Operation(self._text, run))

    def _spread_by_messages(self, node: Communicator) -> None:
        for root, (first, end) in enumerate(self._shares):
            node.broadcast(self._array[first:end], root)
