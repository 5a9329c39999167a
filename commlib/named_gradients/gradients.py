"""NamedGradients: reduce gradients that arrive as arrays, for a framework with immutable tensors.

    begin(kinds) | give(numbers, arrays), give(...) -> complete buckets are launched | end(rows) -> results

Each kind of call (names, dtypes and shapes of gradients) gets a GradientReducer when it first runs. Setting it up is
collective, so it cannot happen when a function is traced: ranks may trace at different times.

Ranks set it up by name, and so learn whether all of them are there and make such calls in program order. Then the
reducer launches in that order, without negotiation; a rank that joins later stands in for its calls. Otherwise, such as
after a rank has joined, it launches by name.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.coordinator import Coordinator
from commlib.data_parallel import Statistics, StepReport
from commlib.data_parallel.array_values import ArrayValues
from commlib.data_parallel.bucket_order import buckets_of
from commlib.data_parallel.groups import Groups, place_groups
from commlib.data_parallel.options import Gradient, Options
from commlib.data_parallel.reducer import GradientReducer
from commlib.data_parallel.reducer_ranks import OrderedRanks, ReducerRanks
from commlib.data_parallel.report import StepClock
from commlib.data_parallel.state import load_compression, save_compression
from commlib.horovod.join import announce_turn, number_reducer
from commlib.horovod.process_sets import ProcessSet, process_set_of
from commlib.named_gradients.named_buckets import ProcessSetRanks, overlap_pays_here

Gradients = tuple[Gradient, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CallSpec:
    """A call before it runs: its dense and its sparse gradients. The others are None on this rank.

    `order` has the numbers of all gradients, in the order of backward. `threads` threads train on this rank. If only
    some ranks have a gradient, it is an error if this is `strict`, if its number is in `strict`, or if it is sparse:
    the shape of the result is then unknown. `in_order`: all ranks make such calls in one order.
    """

    names: Sequence[str]
    dense: Sequence[int]
    sparse: Sequence[int]
    order: Sequence[int]
    threads: int
    strict: bool | Collection[int]
    in_order: bool = False


class CallReducer:
    """The reducer of one kind of call. If it is ordered, a joined rank stands in for its calls: see `JoinableReducer`.

    is_complete: all ranks have it.
    """

    def __init__(
        self,
        reducer: GradientReducer,
        values: ArrayValues,
        spec: CallSpec,
        process_set: ProcessSet,
        *,
        is_complete: bool,
    ) -> None:
        self.reducer, self.values, self._process_set = reducer, values, process_set
        coordinator = self._coordinator = process_set.coordinator("gradients")
        self._restarts, self._joins = coordinator.restarts, None if is_complete else coordinator.joins
        self.gradients: Gradients = reducer.gradients
        self.in_order = spec.in_order
        """What the calls allow; if a rank had joined at construction, they reduce by name nevertheless."""
        self.comm: Any = reducer.ranks.comm if isinstance(reducer.ranks, OrderedRanks) else None
        self.number, self.takes_turns = 0, False
        if self.comm is not None:
            number_reducer(self, ordered_reducers)
            _ORDERED.add(self)

    @property
    def is_current(self) -> bool:
        """Whether this object is still valid for all ranks.

        It is invalid after a shutdown. It is invalid if a rank had joined during construction and is now back, because
        that rank does not have this object. It is invalid after a restart: ranks may restart from different places, so
        their next operations may differ.
        """
        process_set, own = self._process_set, self._coordinator
        if process_set.process_set_id is None or process_set.coordinator("gradients") is not own:
            return False
        return own.restarts == self._restarts and self._joins in (None, own.joins)

    def take_turns(self) -> None:
        """Announce each reduction from now on: the communicator has other reducers, and ranks may join."""
        if not self.takes_turns and isinstance(self.reducer.ranks, OrderedRanks):
            self.takes_turns = True
            self.reducer.ranks.turn = functools.partial(announce_turn, self.comm, self.number)

    def contribute_nothing(self) -> int | None:
        """Contribute nothing until all ranks do; see `GradientReducer.contribute_nothing`."""
        return self.reducer.contribute_nothing()

    def contribute_nothing_once(self) -> bool:
        """Contribute nothing to the next reduction of the others; see `GradientReducer.contribute_nothing_once`."""
        return self.reducer.contribute_nothing_once()

    def end_backward(self) -> None:
        """End a run that failed, if there is one."""
        self.reducer.end()


_ORDERED: weakref.WeakSet[CallReducer] = weakref.WeakSet()


def ordered_reducers() -> list[CallReducer]:
    """Return the reducers of this process that reduce in program order, by number."""
    return sorted((one for one in _ORDERED if one.is_current), key=lambda one: one.number)


class NamedGradients:
    """Reduces gradients over a process set, in program order or by name. `groups`: names that share buckets."""

    def __init__(self, name: str, options: Options, groups: Groups, process_set: ProcessSet | None) -> None:
        self.name, self.options, self.groups = name, options, groups
        self.process_set = process_set_of(process_set)
        self.statistics = Statistics()
        self.report: StepReport | None = None
        """The report of the last step; a step runs from the end of one reduction to the end of the next."""
        self._clock = StepClock()
        self._loaded: dict[str, Any] | None = None
        self._cached_reducers: list[CallReducer] = []

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.process_set.size() or 1

    @property
    def alone(self) -> bool:
        """Whether this rank reduces alone: it is the only rank, or it is outside the process set (as in Horovod).

        Raises UsageError if the process set is not registered.
        """
        return self.process_set.is_alone(self.name)

    @property
    def reducers(self) -> list[GradientReducer]:
        """The reducers, one for each kind of call so far, with their buckets, options and compression."""
        return [cached.reducer for cached in self._cached_reducers]

    @property
    def compression_choice(self) -> str:
        """The chosen compression of gradients, and the reason."""
        return (
            self._cached_reducers[0].reducer.compression_choice
            if self._cached_reducers
            else "not known before the first step"
        )

    def options_here(self) -> Options:
        """Return the options resolved for the ranks of the set. Not collective."""
        return self.options.for_ranks_of(self.process_set.coordinator(self.name).comm)

    def launches(self, gradients: Gradients, call: CallSpec) -> list[list[int]]:
        """Return lists of gradients to pass together, in order; not collective.

        It is one list if no bucket is launched before the end.
        """
        options = self.options_here()
        overlap = overlap_pays_here(call.threads) if options.overlap is None else options.overlap
        groups = place_groups(self.groups, call.names)
        buckets = buckets_of(gradients, options, groups, call.order, call.sparse) if overlap else ()
        dense = [[index for index in bucket.parameters if index in call.dense] for bucket in buckets]
        return [members for members in dense if members] or [list(call.dense)]

    def find(self, gradients: Gradients, call: CallSpec) -> CallReducer:
        """Return the reducer of these gradients. The first call for them is collective."""
        for cached in self._cached_reducers:
            if cached.gradients is not gradients and not _fits(cached.gradients, gradients, call):
                continue
            if cached.in_order == call.in_order:
                if cached.is_current:
                    return cached
                self._cached_reducers.remove(cached)
                self._loaded = None  # older than the restart
                break
        named = ProcessSetRanks(self.process_set, self.name, in_order=call.in_order)
        ranks: ReducerRanks = named
        if named.may_be_ordered:
            ranks = OrderedRanks(self.process_set.communicator(self.name))
        values = ArrayValues(gradients, ranks.along("").watch)
        reducer = GradientReducer(
            ranks,
            gradients,
            values,
            self.options,
            groups=place_groups(self.groups, call.names),
            sparse=call.sparse,
            order=call.order,
            threads=call.threads,
            what=self.name,
            counted=True,
        )
        if self._loaded is not None:
            load_compression(reducer, self._loaded, np.asarray)
        reducer.statistics = self.statistics
        self._cached_reducers.append(
            CallReducer(reducer, values, call, self.process_set, is_complete=named.is_complete)
        )
        return self._cached_reducers[-1]

    def stepped(self, reducer: GradientReducer) -> None:
        """Record that all gradients of a step were reduced, and that its costs are counted."""
        reducer.stepped()
        self.report = self._clock.step(self.statistics)

    def compression_state(self) -> dict[str, Any]:
        """Return this rank's residuals of compression, for `load_compression_state`; {} if there are none."""
        return (
            save_compression(self._cached_reducers[0].reducer, np.copy) if self._cached_reducers else self._loaded or {}
        )

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Load a `compression_state`. If every rank loads its own before the first step, results have the same bits."""
        self._loaded = dict(state) if state else None
        for reducer in self.reducers if state else ():
            load_compression(reducer, dict(state), np.asarray)


class RunOrder:
    """The order of the runs of some reducers, one after another: of all those in program order over the same ranks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while a thread passes gradients, or waits for them. Several threads may do so."""
        self.running: GradientReducer | None = None
        """The reducer of the run in progress, which may have failed."""


_ORDERS: weakref.WeakKeyDictionary[Coordinator, RunOrder] = weakref.WeakKeyDictionary()


def order_of(coordinator: Coordinator) -> RunOrder:
    """Return the order of the runs in program order over a coordinator's ranks."""
    return _ORDERS.setdefault(coordinator, RunOrder())


class GradientCall:
    """One call of `NamedGradients`, which may run repeatedly, one run after another."""

    def __init__(self, gradients: NamedGradients, spec: CallSpec) -> None:
        self._gradients, self.spec = gradients, spec
        self._order = order_of(gradients.process_set.coordinator(gradients.name)) if spec.in_order else RunOrder()
        self._cached: CallReducer | None = None

    def begin(self, kinds: Gradients, *, eager: bool) -> None:
        """Begin a run with gradients of these kinds. `eager`: launch buckets as soon as they are complete.

        A failed run ends first, because the other ranks wait for it.
        """
        order = self._order
        cached = self._cached = self._gradients.find(kinds, self.spec)
        for reducer in (order.running, cached.reducer):
            if reducer is not None and reducer.active:
                reducer.give_up()
        order.running = cached.reducer
        cached.values.forget_all()
        cached.reducer.begin(eager=eager)

    def give(self, members: Sequence[int], arrays: Sequence[Any], begins: Gradients | None = None) -> None:
        """Pass gradients, in the dtypes that are sent. `begins`: first begin a run with these kinds.

        Each is a host array, or a DeviceArray if its kind is on that device.
        """
        with self._order.lock, self._gradients.statistics.exposing():
            if begins is not None:
                self.begin(begins, eager=True)
            self._pass(members, arrays)

    def end(self, rows: Sequence[tuple[Any, Any]]) -> dict[int, Any]:
        """Pass the sparse gradients, as (indices, rows), and return the reduced gradients, by number.

        A dense gradient is an array over a slot (see `ArrayValues`), of (real, imaginary) pairs if it is complex. A
        sparse one is (indices, rows) of all ranks. A gradient that is None on this rank is included if another rank had
        it.
        """
        with self._order.lock:
            with self._gradients.statistics.exposing():
                results = self._finish(rows)
            self._gradients.stepped(self._reducer_in_use())
        return results

    def reduce(
        self, kinds: Gradients, members: Sequence[int], arrays: Sequence[Any], rows: Sequence[tuple[Any, Any]]
    ) -> dict[int, Any]:
        """Do a whole run at once: see `begin`, `give` and `end`."""
        with self._order.lock:
            with self._gradients.statistics.exposing():
                self.begin(kinds, eager=False)
                self._pass(members, arrays)
                results = self._finish(rows)
            self._gradients.stepped(self._reducer_in_use())
        return results

    def _pass(self, members: Sequence[int], arrays: Sequence[Any]) -> None:
        assert self._cached is not None, "call begin first"
        values, reducer = self._cached.values, self._cached.reducer
        for index, array in zip(members, arrays, strict=True):
            if array.dtype.kind == "c":  # real and imaginary parts, also of a 0-dimensional array
                array = array.reshape(-1).view(f"f{array.itemsize // 2}")
            values.give(index, array)
            reducer.ready(index)

    def _finish(self, rows: Sequence[tuple[Any, Any]]) -> dict[int, Any]:
        assert self._cached is not None, "call begin first"
        spec, reducer, values = self.spec, self._cached.reducer, self._cached.values
        for index, (numbers, those) in zip(spec.sparse, rows, strict=True):
            values.give_rows(index, numbers, those)
            reducer.ready(index)
        reducer.end(strict={*spec.strict, *reducer.sparse} if isinstance(spec.strict, Collection) else spec.strict)
        self._order.running = None
        results: dict[int, Any] = {}
        for index in spec.sparse:
            results[index] = values.rows_result(index)
        for index in range(len(spec.names)):
            if (array := values.result(index)) is not None:
                results[index] = array
        return results

    @property
    def kinds(self) -> Gradients:
        """The reducer's gradients in the run in progress, or in the last one."""
        return self._reducer_in_use().gradients

    def _reducer_in_use(self) -> GradientReducer:
        assert self._cached is not None, "call begin first"
        return self._cached.reducer


def _fits(known: Gradients, gradients: Gradients, call: CallSpec) -> bool:
    """Return whether gradients may be the known ones, judged by those that this rank has."""
    there = (*call.dense, *call.sparse)
    return len(known) == len(gradients) and all(known[index] == gradients[index] for index in there)
