"""Buckets in symmetric memory and the collectives that reduce them: what every framework's adapter shares.

The adapter puts gradients into their slots (`write`, or into the array `slot` itself) and calls `launch(bucket)` in
index order (a `Tracker` says when); then `finish` and `used`. No framework is known here: slots are numpy arrays.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from commlib.data_parallel.agreement import Gathers
from commlib.data_parallel.buckets import Bucket
from commlib.kernels.stream import stream_copy

Array = npt.NDArray[Any]

# More gradients than this do not stay in a core's caches until they are reduced.
_CACHED_BYTES = 16 << 20


class Pending(Protocol):
    """A launched reduction, as `commlib.work.Work` is one."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Any: ...


class Plan(Protocol):
    """A prepared all-reduce: call it to run it here and now, or start it on the progress thread."""

    def __call__(self) -> Any: ...

    def start(self) -> Pending: ...


class Reducer(Gathers, Protocol):
    """What the engine needs of a communicator."""

    def empty(self, shape: Any, dtype: Any = ...) -> Array: ...

    def plan_all_reduce(self, x: Any, op: str = ..., *, out: Any = ...) -> Plan: ...


def overlap_pays(comm: Any, *, threads: int, cores: int) -> bool:
    """Tell whether buckets should be launched while backward runs. Collective when first called.

    They should where a network is waited for, and where each rank has more `cores` than `threads` that train. With
    every core busy a reduction within a node takes cores and memory from backward itself: it was measured to cost 2 to
    8 % of a step then, and to hide nothing.
    """
    ranks = comm.node().size
    return bool(ranks < comm.size or cores > threads)


def cores_per_rank(comm: Any) -> int:
    """Return how many cores this rank has for itself: those it is bound to, or its share of the node's."""
    mine, all_cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return mine if mine < all_cores else all_cores // int(comm.runtime.ranks_on_node)


@dataclass(slots=True)
class Statistics:
    """What was reduced so far, and what it cost the thread that trains."""

    exposed_seconds: float = 0.0
    """Time the training thread waited for, or spent in, reductions: what overlap could not hide."""
    nbytes: int = 0
    """Bytes of gradients (padding and flags included) that this rank put into reductions."""
    reductions: int = 0
    """How often all buckets were reduced."""
    early_launches: int = 0
    """Buckets that were launched while backward was still running."""


class Engine:
    """Owns the buckets of one set of parameters on one rank. Construction is collective.

    With one rank it reduces nothing, and every answer is still right.
    """

    def __init__(self, comm: Reducer, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self.statistics = Statistics()
        self._arrays = [comm.empty((bucket.count,), bucket.dtype) for bucket in self.buckets]
        self._slots: dict[int, Array] = {}
        self._places: dict[int, tuple[int, int]] = {}  # address and bytes of each slot
        self._flags: dict[int, Array] = {}
        for bucket, array in zip(self.buckets, self._arrays, strict=True):
            for slot in bucket.slots:
                values = array[slot.offset : slot.offset + slot.count]
                self._slots[slot.parameter] = values
                self._places[slot.parameter] = values.ctypes.data, values.nbytes
                self._flags[slot.parameter] = array[slot.flag : slot.flag + 1]
        self._plans: list[Plan] = []
        if comm.size > 1:
            self._plans = [
                comm.plan_all_reduce(array, bucket.reduction, out=array)
                for bucket, array in zip(self.buckets, self._arrays, strict=True)
            ]
        self._pending: list[Pending] = []
        nbytes = sum(bucket.nbytes for bucket in self.buckets)
        self._copy = stream_copy if nbytes > _CACHED_BYTES else ctypes.memmove

    @property
    def in_flight(self) -> bool:
        """Buckets were launched and not waited for: their slots must not be touched."""
        return bool(self._pending)

    def slot(self, parameter: int) -> Array:
        """Return the 1-D array, in symmetric memory, that holds the gradient of `parameter`."""
        return self._slots[parameter]

    def write(self, parameter: int, address: int) -> None:
        """Copy the gradient at `address`, contiguous and of its slot's dtype, into the slot of `parameter`."""
        target, nbytes = self._places[parameter]
        self._copy(target, address, nbytes)

    def launch(self, index: int) -> None:
        """Start reducing a bucket whose gradients are all in their slots, while backward goes on."""
        self._prepare(index, ())
        self.statistics.early_launches += 1
        if self._plans:
            self._pending.append(self._plans[index].start())

    def finish(self, remaining: Collection[int], unused: Collection[int] = ()) -> None:
        """Reduce the `remaining` buckets and wait for all of them. Parameters in `unused` count as zeros.

        Raises what the collectives raise. Nothing is in flight afterwards, whether it raises or not.
        """
        started = time.perf_counter()
        for index in remaining:
            self._prepare(index, unused)
        try:
            if self._plans:
                self._reduce(remaining)
        finally:
            self._pending.clear()
            self.statistics.reductions += 1
            self.statistics.exposed_seconds += time.perf_counter() - started

    def used(self, parameter: int) -> bool:
        """Tell whether any rank had a gradient of `parameter` in the reduction that just finished."""
        return bool(self._flags[parameter][0] > 0)

    def _prepare(self, index: int, unused: Collection[int]) -> None:
        bucket, array = self.buckets[index], self._arrays[index]
        self.statistics.nbytes += bucket.nbytes
        array[bucket.flags : bucket.flags + len(bucket.slots)] = 1
        for slot in bucket.slots if unused else ():
            if slot.parameter in unused:
                self._slots[slot.parameter].fill(0)
                array[slot.flag] = 0

    def _reduce(self, remaining: Collection[int]) -> None:
        if not all(work.done() for work in self._pending):
            self._pending.extend(self._plans[index].start() for index in remaining)
            remaining = ()
        failure: Exception | None = None
        for work in self._pending:
            # All are waited for even if one fails: what is still in flight would write into slots later.
            try:
                work.wait()
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
        # Nothing is left to keep in order with, and this thread has nothing else to do: waking another costs time.
        for index in remaining:
            self._plans[index]()
