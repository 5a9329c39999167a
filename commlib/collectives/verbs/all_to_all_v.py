"""all_to_all_v: every rank sends each rank so many rows of its array."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.collectives.call import Call
from commlib.collectives.device.call import DeviceCall
from commlib.collectives.device.node import Peers
from commlib.collectives.device.staged import made_on_device
from commlib.collectives.device.staging_queue import OnWait, Station
from commlib.collectives.device.uneven import between_devices, exchange_rows
from commlib.collectives.host.by_messages import MessageCall
from commlib.collectives.host.scheduled import own_program
from commlib.collectives.host.uneven_messages import exchange
from commlib.collectives.operands import Result, apart_from, made_like, result, rows, source
from commlib.collectives.ready import Calls, check_bound
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of, name_of_device, viewed
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.execution.streaming import Region
from commlib.group.arguments import integer
from commlib.group.group import Group
from commlib.node.counts import unequal, unfit
from commlib.node.uneven import SPLITS, UnevenExchange
from commlib.runtime.compiled import Compiled, Plan
from commlib.runtime.work import Work
from commlib.schedule.layout import uneven

_NAME = "all_to_all_v"

# What the text of a call says whose counts need not be exchanged: others would wait for them.
_COUNTED = ", counted"


@dataclass(slots=True)
class Deal:
    """What one rank gives and takes: rows for each rank and, if it is known, from each; where to put them, if given."""

    splits: list[int]
    takes: list[int] | None
    result: Result | None

    @property
    def parts(self) -> Array:
        """The same as numbers for a node's kernel."""
        out = self.result
        room = (0, 0) if out is None else (id(out.flat), out.array.shape[0])
        return np.array([*room, sum(self.splits), *self.splits, *(self.takes or [0] * len(self.splits))], np.int64)


@dataclass(frozen=True, slots=True)
class Uneven:
    """Hold a compiled call, its array, and what becomes of it. x: what the user passed."""

    compiled: Compiled
    source: Any
    target: Any
    deal: Deal
    x: Any

    def run(self) -> Any:
        """Run it now."""
        return self._delivered(self.compiled.now(self.source, self.target))

    def start(self) -> Work:
        """Start it."""
        return self.compiled.start(self.source, self.target, deliver=self._delivered)

    def plan(self) -> Plan:
        """Bind it to its arrays. Raises UsageError if it works on a copy of them, which would not follow them."""
        out, takes = self.deal.result, self.deal.takes
        check_bound(self.source, self.x, _NAME)
        if out is not None and out.staged:
            check_bound(out.flat, out.array, _NAME)
        if out is not None and takes is not None and isinstance(self.compiled, UnevenExchange):
            return self.compiled.bind_to(self.source, self.target, out.flat, (out.given, np.array(takes, np.int64)))
        return self.compiled.bind(self.source, self.target, deliver=self._delivered)

    def _delivered(self, value: Any) -> tuple[Any, Array]:
        made, received = value if isinstance(value, tuple) else told(value, self.target)
        out = self.deal.result
        return (made if out is None else out.deliver()), received


def told(value: Any, parts: Array) -> tuple[Any, Array]:
    """Return the result that a node's exchange has made, if any, and the rows that came from each rank."""
    return value, parts[SPLITS + (len(parts) - SPLITS) // 2 :].copy()


def all_to_all_v(calls: Calls, x: Any, splits: Any, takes: Any, out: Any) -> Uneven:
    group = calls.group
    array = source(x, _NAME)
    length, row = rows(array, _NAME)
    sending = _counts(group, splits, "splits", "a split", length)
    taking = None if takes is None else _counts(group, takes, "takes", "a count in takes")
    if taking is not None and taking[group.rank] != sending[group.rank]:
        raise UsageError(
            f"{_NAME}: rank {group.rank} keeps {sending[group.rank]} rows by splits, but {taking[group.rank]} by takes"
        )
    target = None
    if out is not None:
        target = _result(array, out, taking)
        array = apart_from(array, target.array)
    elif taking is not None and type(array) is not DeviceArray:
        target = result(None, (sum(taking), *array.shape[1:]), array.dtype, _NAME)
    deal = Deal(sending, taking, target)
    known = taking is not None
    call = Call(_NAME, array[:0].shape, array.dtype, algorithm="", device=name_of_device(array))
    kind = array.shape[1:], row * array.itemsize
    if type(array) is DeviceArray:
        direct = group.transport.accepts(call.device)
        inner = _ByMessages(group, call.text) if direct else _compiled(group, call.text, *kind, known)
        whole = _Whole(group, inner, deal if direct else Deal(sending, taking, None), target)
        there = made_on_device(group, calls.station(array.device), whole, None if target is None else target.array)
        peers = calls.peers(array.device)
        if peers.may_exchange:
            there = _between_devices(peers, calls.station(array.device), call.text, deal, there)
        return Uneven(there, array, array, deal, x)
    compiled = _compiled(group, call.text, *kind, known)
    if isinstance(compiled, UnevenExchange):
        calls.uneven[array.dtype, array.shape[1:], known] = compiled
        return Uneven(compiled, array, deal.parts, deal, x)
    return Uneven(compiled, array, deal, deal, x)


def at_once(calls: Calls, x: Array, splits: Sequence[int], takes: Sequence[int] | None, out: Any) -> Any:
    """Run a call on plain arrays of a kind that was called before; None if that cannot be.

    What a small call costs is mostly what Python does before it. So the kernel looks whether the counts are right, and
    whatever is not takes the long way.
    """
    compiled = calls.uneven.get((x.dtype, x.shape[1:], takes is not None))
    if compiled is None or not x.ndim or not x.flags.c_contiguous:
        return None
    size = calls.group.size
    counts = [*splits, *([0] * size if takes is None else takes)]
    if len(splits) != size or len(counts) != 2 * size:
        return None
    if out is None:
        if takes is None:
            parts = np.array([0, 0, len(x), *counts])
        else:
            try:
                out = np.empty((sum(takes), *x.shape[1:]), x.dtype)
            except (TypeError, ValueError):
                return None
            parts = np.array([id(out), len(out), len(x), *counts])
    elif (
        type(out) is not np.ndarray
        or out.dtype is not x.dtype
        or out.shape[1:] != x.shape[1:]
        or not out.ndim
        or not out.flags.carray
    ):
        return None
    else:
        parts = np.array([id(out), len(out), len(x), *counts])
    if parts.dtype != _WHOLE:
        return None
    value = compiled.now(x, parts)
    if value is None:
        return None
    return (value if out is None else out), parts[SPLITS + size :]


_WHOLE = np.dtype(np.int64)


def _counts(group: Group, counts: Sequence[int], name: str, one: str, total: int | None = None) -> list[int]:
    found = [integer(_NAME, one, n) for n in counts]
    if len(found) != group.size or min(found) < 0 or total not in (None, sum(found)):
        also = "" if total is None else f", that add up to {total}, the length of dimension 0 of x"
        raise UsageError(f"{_NAME}: {name} {found} must be {group.size} lengths, none negative{also}")
    return found


def _result(array: Any, out: Any, takes: list[int] | None) -> Result:
    """Return where to put what comes. Raises UsageError. How many rows come may not be known yet."""
    length = sum(viewed(out, _NAME, "out").shape[:1]) if takes is None else sum(takes)
    return result(out, (length, *array.shape[1:]), array.dtype, _NAME, device_of(array))


def _compiled(group: Group, text: str, row: tuple[int, ...], row_bytes: int, known: bool) -> Compiled:
    if not group.shares_memory:
        return _ByMessages(group, text)
    text += _COUNTED * known

    def make(*, counted: bool = True) -> UnevenExchange:
        return UnevenExchange(group.open(), group.name, text, row, row_bytes, known=known, counted=counted)

    return make() if group.is_open else _Opening(group, text, make)


class _Opening(Compiled):
    """Open a board for a group that had none, in the first call that runs."""

    __slots__ = ("_group", "_made", "_make")

    def __init__(self, group: Group, text: str, make: Callable[..., UnevenExchange]) -> None:
        super().__init__(group.progress, text)
        self._group, self._make = group, make
        self._made: UnevenExchange | None = None

    def perform(self, x: Any, target: Any) -> Any:
        parts = target.parts
        if not self._group.is_open:
            self._group.perform_call(self.text, self._group.open)
            return told(self._make(counted=False).perform(x, parts), parts)
        if self._made is None:
            self._made = self._make()
        return told(self._made.perform(x, parts), parts)


def _between_devices(peers: Peers, station: Station, text: str, deal: Deal, otherwise: DeviceCall) -> DeviceCall:
    group, full_text = peers.group, text + _COUNTED * (deal.takes is not None)

    def move(x: DeviceArray, on_wait: OnWait) -> Any:
        board, open_slots = peers.opened()
        return exchange_rows(board, open_slots, group, full_text, x, deal.splits, deal.takes, deal.result, on_wait)

    def checked(x: DeviceArray, on_wait: OnWait) -> Any:
        made, received = group.perform_call(full_text, move, x, on_wait)
        came = received.tolist()
        if deal.takes is not None and came != deal.takes:
            raise unequal(group.name, group.rank, came, deal.takes, deal.splits, deal.splits)
        _check_fit(group, received, deal.result)
        return made, received

    return between_devices(peers, station, full_text, checked, otherwise)


class _Whole(Compiled):
    """Do a deal on an array, and return its result too; that will have to fit what it is for."""

    __slots__ = ("_deal", "_group", "_inner", "_out")

    def __init__(self, group: Group, inner: Compiled, deal: Deal, out: Result | None) -> None:
        super().__init__(group.progress, inner.text)
        self._group, self._inner, self._deal, self._out = group, inner, deal, out

    def perform(self, x: Any, target: Any) -> Any:
        if isinstance(self._inner, UnevenExchange):
            parts = self._deal.parts
            value = told(self._inner.perform(x, parts), parts)
        else:
            value = self._inner.perform(x, self._deal)
        _check_fit(self._group, value[1], self._out)
        return value


class _ByMessages(MessageCall):
    """The exchange by messages of a deal. How many rows come is exchanged before, where it is not known."""

    __slots__ = ()

    def __init__(self, group: Group, text: str) -> None:
        super().__init__(group, text, lambda *_: None)

    def perform(self, x: Any, target: Any) -> Any:
        group, deal = self._group, target
        text = self.text + _COUNTED * (deal.takes is not None)
        odd: dict[int, int] = {}
        made = group.perform_call(text, self._exchange, text, x, deal, odd)
        # What is wrong concerns this rank alone: its part is done.
        if odd:
            row_bytes = max(1, math.prod(x.shape[1:]) * x.itemsize)
            came = [odd.get(peer, count * row_bytes) // row_bytes for peer, count in enumerate(deal.takes)]
            raise unequal(group.name, group.rank, came, deal.takes, deal.splits, deal.splits)
        received = np.array(deal.takes, np.int64)
        _check_fit(group, received, deal.result)
        return made, received

    def _exchange(self, text: str, x: Any, deal: Deal, odd: dict[int, int]) -> Any:
        group, row = self._group, math.prod(x.shape[1:])
        is_certain = deal.takes is None
        if deal.takes is None:
            received = np.empty(group.size, np.int64)
            layout = uneven([1] * group.size)
            regions = [Region(np.array(deal.splits, np.int64), layout), Region(received, layout)]
            group.execute(own_program(group, "all_to_all", "pairwise"), [regions], text)
            deal.takes = received.tolist()  # a plan asks once
        out, made = deal.result, None
        if out is not None and out.array.shape[0] == sum(deal.takes):
            target = out.flat
        else:
            target, made = made_like(x, (sum(deal.takes), *x.shape[1:]))
            target = target.reshape(-1)
        outof, into = (uneven(count * row for count in counts) for counts in (deal.splits, deal.takes))
        odd |= exchange(group, text, x.reshape(-1), outof, target, into, is_certain=is_certain)
        return made


def _check_fit(group: Group, received: Array, out: Result | None) -> None:
    if out is not None and out.array.shape[0] != received.sum():
        raise unfit(group.name, group.rank, received.tolist(), out.array.shape[0])
