"""BucketReducer: keep buckets in symmetric memory, and reduce them by collectives, for the adapters of all frameworks.

The adapter writes gradients into their slots (with `write`, or into the array `slot` directly). It calls
`launch(bucket)` in index order, as a `Tracker` directs, then `finish` and `used`. This module does not depend on a
framework: slots are numpy arrays, or DeviceArrays for gradients on a device. Work on DeviceArrays is queued on the
caller's current stream.

    backward: launch 0, launch 1, ... | finish | optimizer's step: prefetch(...) | forward: fetched(0), fetched(1), ...

Buckets may be reduced along different axes of ranks. They are still launched in one order, so ranks that share several
axes launch them in the same order.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from commlib.comparison.parameter_check import GatherRanks
from commlib.data_parallel.buckets import Bucket, Slot
from commlib.data_parallel.memory import BucketMemory
from commlib.data_parallel.report import Statistics, all_reduce_bytes
from commlib.data_parallel.traces import Traces
from commlib.dtypes import Array
from commlib.kernels.machine_code import entry_point
from commlib.literals import Op

# Above this size, gradients do not stay in a core's caches until they are reduced: the model needs the caches too.
CACHED_BYTES = 4 << 20


class PendingReduction(Protocol):
    """A launched reduction, such as a `commlib.runtime.work.Work`."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Any: ...


class BucketPlan(Protocol):
    """A prepared all-reduce: call it to run it in this thread, or start it on the progress thread.

    A plan that counts its traffic has the attributes `sent_bytes` and `uncompressed_bytes`, for its last run.
    """

    def __call__(self) -> Any: ...

    def start(self) -> PendingReduction: ...


class BucketRanks(GatherRanks, Protocol):
    """The part of a communicator that a BucketReducer needs."""

    @property
    def empty(self) -> Callable[..., Any]: ...

    def watch(self, text: str) -> Callable[[], None]: ...

    def plan_all_reduce(self, x: Any, op: Op = ..., *, out: Any = ...) -> BucketPlan: ...


MakePlan = Callable[[Bucket, Array], BucketPlan]
Axes = Mapping[str, BucketRanks] | Callable[[str], BucketRanks]


class BucketReducer:
    """Owns the buckets of one set of parameters on one rank. Construction is collective.

    All buckets are reduced over `comm`, or over the axes that a mapping or function finds by name. `plan` makes the
    plan that reduces a bucket in its array, by default an all-reduce of the array. It is called for buckets with more
    than one rank, in launch order, and again when a bucket's memory changes. `together`: launch all buckets before
    waiting for any. With one rank nothing is reduced, and every method still returns the right result.
    """

    def __init__(
        self,
        comm: BucketRanks | Axes,
        buckets: Sequence[Bucket],
        plan: MakePlan | None = None,
        *,
        together: bool = False,
    ) -> None:
        self.buckets = tuple(buckets)
        self._together = together
        self.statistics = Statistics()
        comms = [_comm_of_axis(comm, bucket.axis) for bucket in self.buckets]
        self._comms = comms
        self.traces = Traces(self.buckets, comms)
        self._memory = [BucketMemory(bucket, own.empty) for own, bucket in zip(comms, self.buckets, strict=True)]
        self._slots: dict[int, Any] = {}
        self._places: dict[int, tuple[int, int]] = {}  # address and bytes of each slot on the host
        self._of: dict[int, tuple[int, Slot]] = {}  # bucket and slot of each parameter
        self._makers = [None if own.size == 1 else plan or _plan_all_reduce(own) for own in comms]
        self._plans: list[BucketPlan | None] = [None] * len(self.buckets)
        self._traffic: list[tuple[int, int]] = []  # per bucket: bytes sent, bytes without the cast
        for index, (own, bucket) in enumerate(zip(comms, self.buckets, strict=True)):
            self._place(index)
            uncast = bucket.nbytes + bucket.saved_nbytes
            self._traffic.append((all_reduce_bytes(own.size, bucket.nbytes), all_reduce_bytes(own.size, uncast)))
        self._launched: list[int] = []
        self._pending: list[PendingReduction] = []
        self._fetching: list[PendingReduction | None] = []
        nbytes = sum(bucket.nbytes for bucket in self.buckets)
        self._copy = entry_point("stream.stream_copy", 3) if nbytes > CACHED_BYTES else ctypes.memmove

    @property
    def in_flight(self) -> bool:
        """Some launched buckets were not waited for: their slots must not be touched."""
        return bool(self._pending)

    @property
    def plans(self) -> Sequence[BucketPlan | None]:
        """The plan that reduces each bucket, in launch order; None for a bucket with one rank."""
        return self._plans

    def array(self, index: int) -> Any:
        """Return the array of a bucket."""
        return self._memory[index].array

    def slot(self, parameter: int) -> Any:
        """Return the 1-D array, in symmetric memory, that holds the gradient of `parameter`."""
        return self._slots[parameter]

    def write(self, parameter: int, address: int) -> None:
        """Copy the contiguous gradient at `address`, in its slot's dtype, into the slot of `parameter`."""
        entry = self._places.get(parameter)
        if entry is None:
            index, slot = self._of[parameter]
            self._memory[index].write(slot.offset, slot.count, address)
            return
        target, nbytes = entry
        self._copy(target, address, nbytes)

    def move(self, index: int, *, aside: bool) -> None:
        """Give a bucket private memory of this rank (`aside`), or its symmetric memory again.

        The previous memory is not written again: it belongs to the arrays that still reference it. Not collective: if
        only some ranks have a bucket in private memory, its reduction copies it and gives the same result. Must not be
        called while anything is in flight.
        """
        self._memory[index].move(aside=aside)
        self._place(index)

    def is_private(self, index: int) -> bool:
        """Return whether a bucket is in private memory of this rank."""
        return self._memory[index].array is not self._memory[index].symmetric

    def launch(self, index: int) -> None:
        """Start reducing a bucket while backward continues. All its gradients must be in their slots."""
        started = time.perf_counter()
        self._prepare(index, ())
        self.statistics.early_launches += 1
        self._launched.append(index)
        self._start(index)
        self.statistics.exposed_seconds += time.perf_counter() - started

    def finish(self, remaining: Collection[int], unused: Collection[int] = ()) -> None:
        """Reduce the `remaining` buckets and wait for all of them. Parameters in `unused` count as zeros.

        Raises the errors of the collectives. Nothing is in flight afterwards, even if it raises.
        """
        started = time.perf_counter()
        for index in remaining:
            self._prepare(index, unused)
        try:
            self._reduce(remaining)
            for index in (*self._launched, *remaining):
                self._memory[index].forget_flags()
                self._memory[index].scale(self.buckets[index].scale)
                self._count(index)
        finally:
            self._pending.clear()
            self._launched.clear()
            self.statistics.reductions += 1
            if self.traces.wanted:
                self.traces.ended()
            self.statistics.exposed_seconds += time.perf_counter() - started

    def used(self, parameter: int) -> bool:
        """Return whether any rank had a gradient of `parameter` in the last reduction."""
        index, slot = self._of[parameter]
        return self._memory[index].is_set(slot.flag, self._comms[index].watch)

    def prefetch(self, plans: Iterable[BucketPlan]) -> None:
        """Start plans in this order behind everything launched so far, such as gathers of parameters after a step.

        Every rank starts the same plans. Code that needs the result of plan i calls `fetched(i)` first. The next
        reduction waits for all of them.
        """
        self.fetched()
        self._fetching = [plan.start() for plan in plans]

    def fetched(self, index: int | None = None) -> None:
        """Wait for the plan with this index in the last `prefetch`, or for all of them. Raises their errors."""
        wanted = range(len(self._fetching)) if index is None else (index,)
        works = [work for place in wanted if (work := self._fetching[place]) is not None]
        if not works:
            return
        started = time.perf_counter()
        for place in wanted:
            self._fetching[place] = None
        try:
            self._wait(works)
        finally:
            self.statistics.exposed_seconds += time.perf_counter() - started

    def _place(self, index: int) -> None:
        """Locate the slots of a bucket in its memory, and make the plan that reduces this memory."""
        bucket, array, make = self.buckets[index], self._memory[index].array, self._makers[index]
        for slot in bucket.slots:
            values = array[slot.offset : slot.offset + slot.count]
            self._slots[slot.parameter] = values
            self._of[slot.parameter] = index, slot
            if isinstance(values, np.ndarray):
                self._places[slot.parameter] = values.ctypes.data, values.nbytes
        if make is not None:
            self._plans[index] = make(bucket, array)

    def _prepare(self, index: int, unused: Collection[int]) -> None:
        bucket, memory = self.buckets[index], self._memory[index]
        self.statistics.nbytes += bucket.nbytes
        memory.fill(bucket.flags, bucket.flags + len(bucket.slots), 1)
        for slot in bucket.slots if unused else ():
            if slot.parameter in unused:
                memory.fill(slot.offset, slot.offset + slot.count, 0)
                memory.fill(slot.flag, slot.flag + 1, 0)

    def _start(self, index: int, *, awaited: bool = False) -> None:
        plan = self._plans[index]
        if plan is not None:
            # Plans that are launched together get a flag that this thread is about to wait for them.
            start: Callable[..., PendingReduction] = plan.start
            self._pending.append(start(awaited) if self._together else start())
            if self.traces.wanted:
                self.traces.launched(index, self._pending[-1])

    def _reduce(self, remaining: Collection[int]) -> None:
        fetching = [work for work in self._fetching if work is not None]
        self._fetching = []
        if self._together or not all(work.done() for work in self._pending):
            for index in remaining:
                self._start(index, awaited=True)
            remaining = ()
        self._wait([*fetching, *self._pending])
        # No earlier launch is left to keep order with, and this thread is idle: waking the progress thread costs time.
        for index in remaining:
            plan = self._plans[index]
            if plan is not None:
                if self.traces.wanted:
                    self.traces.launched(index, None)
                plan()

    def _wait(self, works: Sequence[PendingReduction]) -> None:
        """Wait for all of them, and record how long they ran without a waiting thread."""
        started = time.perf_counter()
        failure: Exception | None = None
        for work in works:
            # Wait for all even if one fails: work that is still in flight would write into slots later.
            try:
                work.wait()
            except Exception as error:
                failure = failure or error
        self.statistics.hide(works, time.perf_counter() - started)
        if failure is not None:
            raise failure

    def _count(self, index: int) -> None:
        sent, uncompressed = self._traffic[index]
        plan = self._plans[index]
        self.statistics.count(getattr(plan, "sent_bytes", sent), getattr(plan, "uncompressed_bytes", uncompressed))


def _comm_of_axis(comm: BucketRanks | Axes, name: str) -> BucketRanks:
    if isinstance(comm, Mapping):
        return comm[name]
    return comm(name) if callable(comm) else comm


def _plan_all_reduce(comm: BucketRanks) -> MakePlan:
    return lambda bucket, array: comm.plan_all_reduce(array, cast(Op, bucket.reduction), out=array)
