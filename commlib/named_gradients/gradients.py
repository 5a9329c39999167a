"""NamedGradients: reduce gradients by name that come as arrays, for a framework with immutable tensors.

    begin(kinds) | give(numbers, arrays), give(...) -> complete buckets are launched | end(rows) -> results

Each kind of call (names, dtypes and shapes of gradients) gets a GradientReducer when it first runs. That is collective,
and so it is not done when a function is traced: ranks may trace at different times.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.data_parallel import (
    Gradient,
    GradientReducer,
    Groups,
    Options,
    Statistics,
    StepClock,
    StepReport,
    load_compression,
    place_groups,
    save_compression,
)
from commlib.data_parallel.array_values import ArrayValues
from commlib.data_parallel.bucket_order import buckets_of
from commlib.horovod.process_sets import ProcessSet, process_set_of
from commlib.named_gradients.by_name import ByName, overlap_pays_here

Gradients = tuple[Gradient, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Reduce one kind of call."""

    gradients: Gradients
    reducer: GradientReducer
    values: ArrayValues
    ranks: ByName


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Describe a call before it runs: its dense and its sparse gradients. The others are None here.

    `order` are the numbers of all as backward makes them. `threads` train on this rank. A gradient that only some ranks
    have is an error if this is `strict`, if its number is in `strict`, and if it is sparse: how it is to come out here
    is not known.
    """

    names: Sequence[str]
    dense: Sequence[int]
    sparse: Sequence[int]
    order: Sequence[int]
    threads: int
    strict: bool | Collection[int]


class NamedGradients:
    """Reduces gradients over a process set, under names that begin with `name`. `groups` are names that go together."""

    def __init__(self, name: str, options: Options, groups: Groups, process_set: ProcessSet | None) -> None:
        self.name, self.options, self.groups = name, options, groups
        self.process_set = process_set_of(process_set)
        self.statistics = Statistics()
        self.report: StepReport | None = None
        """What the last step cost, a step being from the end of one reduction to that of the next."""
        self._clock = StepClock()
        self._loaded: dict[str, Any] | None = None
        self._kept: list[Kept] = []

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.process_set.size() or 1

    @property
    def alone(self) -> bool:
        """Whether this rank reduces alone: it is the only rank or, as in Horovod, outside the process set."""
        return self.size == 1 or self.process_set.included() is False

    @property
    def reducers(self) -> list[GradientReducer]:
        """What reduces gradients, one for each kind of call so far: its buckets, options and compression."""
        return [kept.reducer for kept in self._kept]

    @property
    def compression_choice(self) -> str:
        """How gradients are compressed, and why so."""
        return self._kept[0].reducer.compression_choice if self._kept else "not known before the first step"

    def options_here(self) -> Options:
        """Return the options as they are for the ranks of the set. Not collective."""
        return self.options.for_ranks_of(self.process_set.coordinator(self.name).comm)

    def launches(self, gradients: Gradients, call: Call) -> list[list[int]]:
        """Return the gradients that are best given together, in order; not collective.

        That is one list where nothing is launched before the end.
        """
        options = self.options_here()
        overlap = overlap_pays_here(call.threads) if options.overlap is None else options.overlap
        groups = place_groups(self.groups, call.names)
        buckets = buckets_of(gradients, options, groups, call.order, call.sparse) if overlap else ()
        found = [[index for index in bucket.parameters if index in call.dense] for bucket in buckets]
        return [members for members in found if members] or [list(call.dense)]

    def find(self, gradients: Gradients, call: Call) -> Kept:
        """Return what reduces these gradients. Collective when first called for them."""
        there = [*call.dense, *call.sparse]
        for kept in self._kept:
            if kept.gradients is gradients or _fits(kept.gradients, gradients, there):
                if kept.ranks.is_current:
                    return kept
                self._kept.remove(kept)
                self._loaded = None  # from before it
                break
        ranks = ByName(self.process_set, self.name)
        values = ArrayValues(gradients, ranks.watch)
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
        self._kept.append(Kept(gradients, reducer, values, ranks))
        return self._kept[-1]

    def stepped(self, reducer: GradientReducer) -> None:
        """Note that all gradients of a step were reduced."""
        reducer.stepped()
        self.report = self._clock.step(self.statistics)

    def compression_state(self) -> dict[str, Any]:
        """Return what compression remembers on this rank, for `load_compression_state` there; {} if nothing."""
        return save_compression(self._kept[0].reducer, np.copy) if self._kept else self._loaded or {}

    def load_compression_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `compression_state` returned: with the same bits if before the first step, on every rank."""
        self._loaded = dict(state) if state else None
        for reducer in self.reducers if state else ():
            load_compression(reducer, dict(state), np.asarray)


class NamedReduction:
    """One call of `NamedGradients`, which may run again and again, one run after another."""

    def __init__(self, gradients: NamedGradients, call: Call) -> None:
        self._gradients, self._call = gradients, call
        self._lock = threading.Lock()  # what nothing orders is given from several threads
        self._kept: Kept | None = None

    def begin(self, kinds: Gradients, *, eager: bool) -> None:
        """Begin a run with gradients of these kinds. `eager`: launch buckets as soon as they are complete."""
        with self._gradients.statistics.exposing():
            kept = self._kept = self._gradients.find(kinds, self._call)
            if kept.reducer.active:
                kept.reducer.give_up()  # a run that failed: the others wait for this rank
            kept.values.forget_all()
            kept.reducer.begin(eager=eager)

    def give(self, members: Sequence[int], arrays: Sequence[Any], begins: Gradients | None = None) -> None:
        """Give gradients, in the dtypes that travel. `begins`: begin with these kinds before.

        Each is an array of the host, or a DeviceArray if its kind is on that device.
        """
        with self._lock, self._gradients.statistics.exposing():
            if begins is not None:
                self.begin(begins, eager=True)
            kept = self._begun()
            for index, array in zip(members, arrays, strict=True):
                if array.dtype.kind == "c":  # pairs, also of one number without dimensions
                    array = array.reshape(-1).view(f"f{array.itemsize // 2}")
                kept.values.give(index, array)
                kept.reducer.ready(index)

    def end(self, rows: Sequence[tuple[Any, Any]]) -> dict[int, Any]:
        """Give the sparse gradients, as (numbers, rows), and return what was reduced, by number.

        A dense gradient is an array over a slot (see `ArrayValues`), of pairs where numbers are complex. A sparse one
        is (numbers, rows) of all ranks. What is None here is there, too, if another rank had it.
        """
        kept, call, gradients = self._begun(), self._call, self._gradients
        reducer, values = kept.reducer, kept.values
        with gradients.statistics.exposing():
            for index, (numbers, those) in zip(call.sparse, rows, strict=True):
                values.give_rows(index, numbers, those)
                reducer.ready(index)
            reducer.end(strict={*call.strict, *reducer.sparse} if isinstance(call.strict, Collection) else call.strict)
        gradients.stepped(reducer)
        results: dict[int, Any] = {index: values.rows_result(index) for index in call.sparse}
        for index in range(len(call.names)):
            if (array := values.result(index)) is not None:
                results[index] = array
        values.forget_all()
        return results

    def _begun(self) -> Kept:
        assert self._kept is not None, "begin comes first"
        return self._kept


def _fits(known: Gradients, gradients: Gradients, there: Collection[int]) -> bool:
    """Tell whether gradients may be those that are known, as far as they are there."""
    return len(known) == len(gradients) and all(known[index] == gradients[index] for index in there)
