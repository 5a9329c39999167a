"""all_to_all and all_to_all_v: every rank sends each rank a part of its array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.arguments import integer
from commlib.buffers.views import address_of
from commlib.collectives import hierarchical
from commlib.collectives.all_gather import gather_counts
from commlib.collectives.by_messages import MessageCall
from commlib.collectives.call import Call
from commlib.collectives.operands import apart_from, made_like, result, rows, source
from commlib.collectives.paths import Move, Verb
from commlib.collectives.ready import Calls, Ready
from commlib.collectives.scheduled import own_program, planned
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of, empty_like, name_of_device
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.execution.streaming import Region
from commlib.group.group import Group
from commlib.node.collective import Exchange, NodeCollective, ranges
from commlib.schedule.layout import cut, uneven


def all_to_all(calls: Calls, x: Any, out: Any, algorithm: str) -> Ready:
    size = calls.group.size
    array = source(x, "all_to_all")
    length, _ = rows(array, "all_to_all")
    if length % size:
        raise UsageError(
            f"all_to_all: dimension 0 of x has length {length}, which is not a multiple of {size} ranks; "
            "use all_to_all_v for uneven parts"
        )
    target = result(out, array.shape, array.dtype, "all_to_all", device_of(array))
    flat = apart_from(array.reshape(-1), target.flat)  # every chunk may be overwritten before it has been sent
    call = Call("all_to_all", array.shape, array.dtype, algorithm=algorithm, device=name_of_device(array))
    return Ready.into(calls.find(VERB, call, (array.dtype, array.shape, algorithm), array.shape), flat, target, x)


def _exchange(call: Call, rank: int, size: int) -> Exchange:
    nbytes = call.nbytes // size
    parts = ranges(uneven([call.count // size] * size), call.dtype.itemsize)
    return Exchange(parts, parts, nbytes, [rank * nbytes] * size, call.nbytes)


def _messages(group: Group, call: Call) -> Move:
    steps, pieces = planned(group, call, call.nbytes)
    pieces = pieces if steps.sends_single_chunks else 1
    chunk = call.count // group.size
    layouts = [cut(uneven([chunk] * chunks), pieces) for chunks in steps.regions]

    def move(x: Array, target: Array) -> None:
        scratch = [empty_like(x, chunks * chunk) for chunks in steps.regions[2:]]
        arrays = [x, target, *scratch]
        regions = [
            [Region(array, layouts[number][piece]) for number, array in enumerate(arrays)] for piece in range(pieces)
        ]
        group.execute(steps, regions, call.text)

    return move


VERB = Verb("all_to_all", _messages, exchange=_exchange, hierarchical=hierarchical.all_to_all)


def all_to_all_v(calls: Calls, x: Any, splits: Sequence[int]) -> Ready:
    group = calls.group
    array = source(x, "all_to_all_v")
    length, row = rows(array, "all_to_all_v")
    sending = [integer("all_to_all_v", "a split", n) for n in splits]
    if len(sending) != group.size or min(sending) < 0 or sum(sending) != length:
        raise UsageError(
            f"all_to_all_v: splits {sending} must be {group.size} lengths, none negative, "
            f"that add up to {length}, the length of dimension 0 of x"
        )
    call = Call("all_to_all_v", array[:0].shape, array.dtype, algorithm="", device=name_of_device(array))
    return calls.whole(_Uneven(group, call.text, sending, row), array, x)


_COUNTED = ", counted"


class _Uneven(MessageCall):
    """An all-to-all of so many rows to each rank. How many come from each is exchanged when it first runs.

    Its text then says so: a rank that has yet to exchange them would wait for ranks that do not.
    """

    __slots__ = ("_exchange", "_outof", "_received", "_row", "_sending")

    def __init__(self, group: Group, text: str, sending: Sequence[int], row: int) -> None:
        super().__init__(group, text, self._run, flat=False)
        self._row, self._outof = row, uneven(n * row for n in sending)
        self._sending = np.array(sending, np.int64)
        self._received = np.empty(0, np.int64)
        self._exchange: NodeCollective | None = None

    def perform(self, x: Any, target: Any) -> Any:
        value = super().perform(x, target)
        if not self.text.endswith(_COUNTED):
            self.text += _COUNTED
        return value

    def _run(self, x: Any, _: Any) -> tuple[Any, Array]:
        group, row = self._group, self._row
        if not self.text.endswith(_COUNTED):
            self._count(x)
        output, given = made_like(x, (int(self._received.sum()), *x.shape[1:]))
        if self._exchange is not None:
            self._exchange.run_at(address_of(x), address_of(output))
        else:
            into = uneven(int(n) * row for n in self._received)
            regions = [Region(x.reshape(-1), self._outof), Region(output.reshape(-1), into)]
            group.execute(own_program(group, "all_to_all", "pairwise"), [regions], self.text, part=1)
        return given, self._received.copy()

    def _count(self, x: Any) -> None:
        group, size = self._group, self._group.size
        if (
            group.shares_memory and type(x) is not DeviceArray
        ):  # all ranks learn all splits, because they must agree on the longest part
            every = gather_counts(group, self.text, self._sending).reshape(size, size)
            self._received = every[:, group.rank].copy()
            into = uneven(int(n) * self._row for n in self._received)
            longest = int(every.max()) * self._row * x.itemsize
            exchange = Exchange(ranges(self._outof, x.itemsize), ranges(into, x.itemsize), longest)
            self._exchange = NodeCollective.exchange(group.open(), self.text, exchange)
        else:
            self._received = np.empty(size, np.int64)
            layout = uneven([1] * size)
            regions = [Region(self._sending, layout), Region(self._received, layout)]
            group.execute(own_program(group, "all_to_all", "pairwise"), [regions], self.text)
