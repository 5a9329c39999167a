"""CompressedBucket: reduce one bucket over a group, encoded only on the slow link.

    several nodes, several ranks each     one rank on each node     within_node=True       one node
    sum within the node (shared memory)
    this rank's share over its rail     everything over all       everything over all    nothing is compressed
    shares to all ranks of the node

Shared memory is faster than any codec, so nothing is compressed within a node unless the user requests it.
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
from commlib.compress.scheme import BucketPart, Scheme, SchemeReducer
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of, name_of_device
from commlib.group.operation import Operation
from commlib.node.collective import Exchange, NodeCollective
from commlib.schedule.layout import even

_ALIGNMENT = 256
"""Elements: shares begin at multiples of it, so few blocks of a codec are cut."""


class SlowLink:
    """The private groups that carry the compressed reductions of a communicator. Construction is collective.

    within_node: compress between all ranks, even within a node. whole: all ranks. node: the ranks of this node, where
    values are added up first; None without such a sum. comm: the ranks among which this rank's share crosses the slow
    link; None if this rank has no share. share: the number of that share, one for each of the `rails`.
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
        """Whether any data is compressed: the same on all ranks."""
        return self.rails > 0 and self.whole.size > 1

    @property
    def hosts(self) -> int:
        """The number of ranks that exchange a share."""
        return self.whole.size if self.node is None else len(self.whole.topology.nodes)

    def shares(self, parts: Sequence[BucketPart], count: int, *, divisible: bool) -> list[tuple[int, int]]:
        """Return (first element, end) of each rail's share of a bucket with `count` elements.

        Parameters are cut only if `divisible`. The last share ends at `count`.
        """
        ideal = even(-(-count // _ALIGNMENT), self.rails).offsets
        bounds = [min(offset * _ALIGNMENT, count) for offset in ideal]
        if not divisible:
            starts = [0, *sorted(part.start for part in parts), count]
            bounds = [min(starts, key=lambda start: abs(start - bound)) for bound in bounds]
        bounds[0], bounds[-1] = 0, count
        return list(pairwise(bounds))


def parts_within(parts: Sequence[BucketPart], first: int, end: int) -> list[BucketPart]:
    """Return the parts within a share, with offsets from its first element. The name of a piece includes its cut."""
    result = []
    for part in parts:
        start, stop = max(part.start, first), min(part.stop, end)
        if start >= stop:
            continue
        if stop - start == part.count:
            result.append(BucketPart(part.name, start - first, part.shape))
        else:
            name = f"{part.name}[{start - part.start}:{stop - part.start}]"
            result.append(BucketPart(name, start - first, (stop - start,)))
    return result


def split_piece(name: str) -> tuple[str, str]:
    """Return the parameter name and the piece of a part's name. The piece is "" for a full parameter."""
    match = re.fullmatch(r"(.*?)(\[\d+:\d+\])?", name, re.DOTALL)
    assert match is not None
    return match[1], match[2] or ""


class CompressedBucket:
    """Reduces one bucket of a group by a scheme, as one operation of that group. It has the interface of a plan.

    `array`, on any device, holds float32 values, and flags from element `flags` on. Flags are exact: positive after the
    reduction if they were positive on any rank. `op` is "sum" or "mean". `finite` is True if the result was finite, and
    the same on all ranks.
    """

    def __init__(
        self, link: SlowLink, scheme: Scheme, array: Any, parts: Sequence[BucketPart], flags: int, op: str, key: str
    ) -> None:
        self._link, self._flags = link, flags
        self._kernels = device_of(array).kernels
        self.finite = True
        shares = link.shares(parts, flags, divisible=scheme.divisible)
        self._shares = [*shares[:-1], (shares[-1][0], len(array))]  # flags belong to the last share
        self._scale = 1 / link.whole.size if op == "mean" else 1.0
        self._gaps = Gaps(parts, 0, flags)
        self.reducer: SchemeReducer | None = None
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
        """Bytes that this rank sent across the slow link in the last reduction."""
        return 0 if self.reducer is None else self.reducer.sent_bytes

    def __call__(self) -> Any:
        """Run the reduction in this thread."""
        return self._now()

    def end_step(self) -> None:
        """End a step in which this bucket was the only one: see `GradientCompression.end_step`."""
        if not self.finite and self.reducer is not None:
            self.reducer.rollback()

    def _run(self) -> None:
        link, array = self._link, self._array
        self._gaps.clear(self._values, self._kernels)  # values of the last step
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
        """Copy the shares of the rails to all ranks of the node."""
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
