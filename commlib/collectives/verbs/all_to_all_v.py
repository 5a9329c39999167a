"""all_to_all_v: every rank sends a given number of its rows to each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.collectives.call import Call
from commlib.collectives.call_table import Calls, check_bound
from commlib.collectives.device.call import DeviceCall, InnerCall
from commlib.collectives.device.host_staging import StagedResult
from commlib.collectives.device.peers import DevicePeers
from commlib.collectives.device.uneven_exchange import NodeExchange, exchange_rows
from commlib.collectives.host.message_call import MessageCall
from commlib.collectives.host.schedule_path import own_program
from commlib.collectives.host.uneven_messages import exchange
from commlib.collectives.operands import Result, allocate_like, copy_if_shared, result, rows, source
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import as_view, device_of, name_of_device
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.execution.streaming import Region
from commlib.group.arguments import integer
from commlib.group.group import Group
from commlib.node.uneven_exchange import SPLITS, UnevenExchange, make_counts_error, make_length_error
from commlib.runtime.compiled_call import CompiledCall, Plan
from commlib.runtime.work import Work
from commlib.schedule.layout import uneven

_NAME = "all_to_all_v"

# Marks calls that exchange no counts: ranks that disagree on this would wait for each other.
_COUNTED = ", counted"


@dataclass(slots=True)
class RowCounts:
    """One rank's counts: the rows to send to each rank, the rows to receive if known, and the result array if given."""

    splits: list[int]
    takes: list[int] | None
    result: Result | None

    @property
    def parts(self) -> Array:
        """The counts and the result as an int64 array for the node's kernel."""
        out = self.result
        room = (0, 0) if out is None else (id(out.flat), out.array.shape[0])
        return np.array([*room, sum(self.splits), *self.splits, *(self.takes or [0] * len(self.splits))], np.int64)


@dataclass(frozen=True, slots=True)
class UnevenCall:
    """One uneven call that is ready to run: the compiled call, its arrays and counts. x: the user's array."""

    compiled: CompiledCall
    source: Any
    target: Any
    deal: RowCounts
    x: Any

    def run(self) -> Any:
        """Run the call now and return its result."""
        return self._deliver(self.compiled.now(self.source, self.target))

    def start(self) -> Work:
        """Start the call and return its work."""
        return self.compiled.start(self.source, self.target, deliver=self._deliver)

    def plan(self) -> Plan:
        """Bind the call to its arrays. Raises UsageError if it works on a copy, which would not see later changes."""
        out, takes = self.deal.result, self.deal.takes
        check_bound(self.source, self.x, _NAME)
        if out is not None and out.staged:
            check_bound(out.flat, out.array, _NAME)
        if out is not None and takes is not None and isinstance(self.compiled, UnevenExchange):
            return self.compiled.bind_to(
                self.source, self.target, out.flat, (out.user_array, np.array(takes, np.int64))
            )
        return self.compiled.bind(self.source, self.target, deliver=self._deliver)

    def _deliver(self, value: Any) -> tuple[Any, Array]:
        result, received = value if isinstance(value, tuple) else result_of(value, self.target)
        out = self.deal.result
        return (result if out is None else out.deliver()), received


def result_of(value: Any, parts: Array) -> tuple[Any, Array]:
    """Return the result of a node exchange (None if it wrote to a given array) and the rows from each rank."""
    return value, parts[SPLITS + (len(parts) - SPLITS) // 2 :].copy()


def all_to_all_v(calls: Calls, x: Any, splits: Any, takes: Any, out: Any) -> UnevenCall:
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
        array = copy_if_shared(array, target.array)
    elif taking is not None and type(array) is not DeviceArray:
        target = result(None, (sum(taking), *array.shape[1:]), array.dtype, _NAME)
    deal = RowCounts(sending, taking, target)
    known = taking is not None
    device = name_of_device(array)
    call = Call(_NAME, array[:0].shape, array.dtype, algorithm="", device=device, label=calls.label)
    kind = array.shape[1:], row * array.itemsize
    if type(array) is DeviceArray:
        direct = group.transport.accepts(call.device)
        inner = _MessageExchange(group, call.text) if direct else _compile(group, call.text, *kind, known)
        whole = _DeviceExchange(group, inner, deal if direct else RowCounts(sending, taking, None), target)
        context, text = calls.context(array.device), whole.text
        moved: InnerCall = whole
        if not direct:
            moved = StagedResult(context.queue, whole, None if target is None else target.array)
        if context.peers.may_exchange:
            text = call.text + _COUNTED * known
            moved = NodeExchange(context.peers, text, _ExchangeBetweenDevices(context.peers, text, deal), moved)
        return UnevenCall(DeviceCall(context, text, moved), array, array, deal, x)
    compiled = _compile(group, call.text, *kind, known)
    if isinstance(compiled, UnevenExchange):
        calls.uneven[array.dtype, array.shape[1:], known] = compiled
        return UnevenCall(compiled, array, deal.parts, deal, x)
    return UnevenCall(compiled, array, deal, deal, x)


def run_compiled(calls: Calls, x: Array, splits: Sequence[int], takes: Sequence[int] | None, out: Any) -> Any:
    """Run a compiled call on plain numpy arrays; return None if the arrays need the full checks.

    Small calls spend most of their time in Python. Here the kernel checks the counts; any other fault returns None, and
    the slow route reports it.
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
    lengths = [integer(_NAME, one, n) for n in counts]
    if len(lengths) != group.size or min(lengths) < 0 or total not in (None, sum(lengths)):
        also = "" if total is None else f", that add up to {total}, the length of dimension 0 of x"
        raise UsageError(f"{_NAME}: {name} {lengths} must be {group.size} lengths, none negative{also}")
    return lengths


def _result(array: Any, out: Any, takes: list[int] | None) -> Result:
    """Return the Result for the received rows, whose number may not be known yet. Raises UsageError."""
    length = sum(as_view(out, _NAME, "out").shape[:1]) if takes is None else sum(takes)
    return result(out, (length, *array.shape[1:]), array.dtype, _NAME, device_of(array))


def _compile(group: Group, text: str, row: tuple[int, ...], row_bytes: int, known: bool) -> CompiledCall:
    if not group.shares_memory:
        return _MessageExchange(group, text)
    text += _COUNTED * known

    def make(*, counted: bool = True) -> UnevenExchange:
        return UnevenExchange(group.open(), group.name, text, row, row_bytes, known=known, counted=counted)

    return make() if group.status.is_open else _Opening(group, text, make)


class _Opening(CompiledCall):
    """A call of a group without a board. The first call to run opens the board."""

    __slots__ = ("_group", "_made", "_make")

    def __init__(self, group: Group, text: str, make: Callable[..., UnevenExchange]) -> None:
        super().__init__(group.progress, text)
        self._group, self._make = group, make
        self._made: UnevenExchange | None = None

    def perform(self, x: Any, target: Any) -> Any:
        parts = target.parts
        if not self._group.status.is_open:
            self._group.calls.perform(self.text, self._group.open)
            return result_of(self._make(counted=False).perform(x, parts), parts)
        if self._made is None:
            self._made = self._make()
        return result_of(self._made.perform(x, parts), parts)


@dataclass(frozen=True, slots=True)
class _ExchangeBetweenDevices:
    """The exchange between the devices of a node for one rank's counts."""

    peers: DevicePeers
    text: str
    deal: RowCounts

    def perform(self, x: Any, target: Any) -> Any:
        group, deal = self.peers.group, self.deal
        result, received = group.calls.perform(
            self.text, exchange_rows, self.peers, self.text, x, deal.splits, deal.takes, deal.result
        )
        counts = received.tolist()
        if deal.takes is not None and counts != deal.takes:
            raise make_counts_error(group.name, group.rank, counts, deal.takes, deal.splits, deal.splits)
        _check_fit(group, received, deal.result)
        return result, received


class _DeviceExchange(CompiledCall):
    """Run the exchange for one rank's counts, and check that the received rows fit the result array."""

    __slots__ = ("_deal", "_group", "_inner", "_out")

    def __init__(self, group: Group, inner: CompiledCall, deal: RowCounts, out: Result | None) -> None:
        super().__init__(group.progress, inner.text)
        self._group, self._inner, self._deal, self._out = group, inner, deal, out

    def perform(self, x: Any, target: Any) -> Any:
        if isinstance(self._inner, UnevenExchange):
            parts = self._deal.parts
            value = result_of(self._inner.perform(x, parts), parts)
        else:
            value = self._inner.perform(x, self._deal)
        _check_fit(self._group, value[1], self._out)
        return value


class _MessageExchange(MessageCall):
    """The exchange by messages. Ranks exchange the counts first, unless all know them."""

    __slots__ = ()

    def __init__(self, group: Group, text: str) -> None:
        super().__init__(group, text, lambda *_: None)

    def perform(self, x: Any, target: Any) -> Any:
        group, deal = self._group, target
        text = self.text + _COUNTED * (deal.takes is not None)
        odd: dict[int, int] = {}
        result = group.calls.perform(text, self._exchange, text, x, deal, odd)
        # The error is local to this rank: the exchange itself is complete.
        if odd:
            row_bytes = max(1, math.prod(x.shape[1:]) * x.itemsize)
            counts = [odd.get(peer, count * row_bytes) // row_bytes for peer, count in enumerate(deal.takes)]
            raise make_counts_error(group.name, group.rank, counts, deal.takes, deal.splits, deal.splits)
        received = np.array(deal.takes, np.int64)
        _check_fit(group, received, deal.result)
        return result, received

    def _exchange(self, text: str, x: Any, deal: RowCounts, odd: dict[int, int]) -> Any:
        group, row = self._group, math.prod(x.shape[1:])
        is_certain = deal.takes is None
        if deal.takes is None:
            received = np.empty(group.size, np.int64)
            layout = uneven([1] * group.size)
            regions = [Region(np.array(deal.splits, np.int64), layout), Region(received, layout)]
            group.programs.execute(own_program(group, "all_to_all", "pairwise"), [regions], text)
            deal.takes = received.tolist()  # a plan exchanges the counts only once
        out, result = deal.result, None
        if out is not None and out.array.shape[0] == sum(deal.takes):
            target = out.flat
        else:
            target, result = allocate_like(x, (sum(deal.takes), *x.shape[1:]))
            target = target.reshape(-1)
        outof, into = (uneven(count * row for count in counts) for counts in (deal.splits, deal.takes))
        odd |= exchange(group, text, x.reshape(-1), outof, target, into, is_certain=is_certain)
        return result


def _check_fit(group: Group, received: Array, out: Result | None) -> None:
    if out is not None and out.array.shape[0] != received.sum():
        raise make_length_error(group.name, group.rank, received.tolist(), out.array.shape[0])
