"""Shards: keep one part of every bucket's gradients and parameters on each rank, and gather the parameters.

    backward: reduce-scatter 0, 1, ... | the optimizer updates `own(b)` with `gradients(b)` | gather ..., 1, 0 | forward

Gradients and optimizer state thus take 1/P of the memory, for the bytes of an all-reduce (Rajbhandari et al. 2020,
ZeRO). The cuts of a bucket ignore parameter boundaries: `pieces` lists the parameters in a part, with the range of
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from commlib.data_parallel.bucket_reducer import BucketPlan, BucketReducer, PendingReduction
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.reducer_ranks import ReducerRanks
from commlib.dtypes import Array


class ShardPiece(NamedTuple):
    """The elements of one parameter that this rank owns: from `first` on, at `start` to `stop` of its part."""

    parameter: int
    first: int
    start: int
    stop: int


class Shards:
    """This rank's parts of `buckets`. The size of `ranks` must divide their values. Construction is collective."""

    def __init__(self, ranks: ReducerRanks, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        self._comms = [ranks.along(bucket.axis) for bucket in buckets]
        self._gradients: list[Any] = []
        self._own: list[Any] = []
        self._whole: list[Any] = []
        self._of: dict[int, tuple[int, int, int]] = {}  # bucket, first element and end of each parameter
        for index, (bucket, comm) in enumerate(zip(self._buckets, self._comms, strict=True)):
            self._whole.append(comm.empty((bucket.flags,), bucket.dtype))
            part = (bucket.flags // comm.size,)
            self._own.append(self._whole[index] if comm.size == 1 else comm.empty(part, bucket.dtype))
            self._gradients.append(comm.empty(part, bucket.dtype))
            for slot in bucket.slots:
                self._of[slot.parameter] = index, slot.offset, slot.offset + slot.count

    def pieces(self, bucket: int) -> list[ShardPiece]:
        """Return the pieces of parameters that this rank owns, in order."""
        comm, length = self._comms[bucket], len(self._own[bucket])
        begin = comm.rank * length
        result = []
        for slot in self._buckets[bucket].slots:
            start, stop = max(slot.offset, begin), min(slot.offset + slot.count, begin + length)
            if start < stop:
                result.append(ShardPiece(slot.parameter, start - slot.offset, start - begin, stop - begin))
        return result

    def gradients(self, bucket: int) -> Array:
        """Return this rank's part of the reduced gradients of a bucket."""
        result: Array = self._gradients[bucket]
        return result

    def own(self, bucket: int) -> Array:
        """Return this rank's part of a bucket's parameters. Write to it before the parameters are gathered."""
        result: Array = self._own[bucket]
        return result

    def parameter(self, index: int) -> Array:
        """Return all elements of a parameter from the last gather: a 1-D view that the next gather overwrites."""
        bucket, start, stop = self._of[index]
        result: Array = self._whole[bucket][start:stop]
        return result

    def bucket_of(self, index: int) -> int:
        """Return the bucket of a parameter."""
        return self._of[index][0]

    def reduction(self, bucket: Bucket, array: Any) -> BucketPlan:
        """Return the plan that reduces a bucket in its array: reduce-scatter of its values, all-reduce of its flags."""
        comm: Any = self._comms[bucket.index]
        values, flags = array[: bucket.flags], array[bucket.flags :]
        plans = [comm.plan_all_reduce(flags, "sum", out=flags)]
        if bucket.flags:
            own = self._gradients[bucket.index]
            plans.insert(0, comm.plan_reduce_scatter(values, bucket.reduction, out=own))
        return PlanSequence(plans, (comm.size - 1) * bucket.nbytes // comm.size)

    def take(self, engine: BucketReducer) -> None:
        """Copy the gradients of buckets with a single rank, which have no plan."""
        for index, comm in enumerate(self._comms):
            if comm.size == 1:
                self._gradients[index][...] = engine.array(index)[: self._buckets[index].flags]

    def gathers(self) -> list[BucketPlan]:
        """Return the plans that gather the parameters of each bucket from the ranks' parts."""
        plans: list[BucketPlan] = []
        for comm, own, whole in zip(self._comms, self._own, self._whole, strict=True):
            ranks: Any = comm
            plans.append(PlanSequence([], 0) if own is whole else ranks.plan_all_gather(own, out=whole))
        return plans


class PlanSequence:
    """A plan that runs other plans one after another."""

    def __init__(self, plans: Sequence[BucketPlan], nbytes: int) -> None:
        self._plans = plans
        self.sent_bytes = self.uncompressed_bytes = nbytes

    def __call__(self) -> Any:
        """Run all plans in this thread."""
        for plan in self._plans:
            plan()

    def start(self) -> PendingReduction:
        """Start all plans on the progress thread."""
        return _StartedPlans([plan.start() for plan in self._plans])


class _StartedPlans:
    """Operations that were started one after another."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    @property
    def seconds(self) -> float:
        """Total run time."""
        return float(sum(work.seconds for work in self._works))

    def done(self) -> bool:
        """Return whether all have ended."""
        return all(work.done() for work in self._works)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for all of them; then raise the first failure."""
        failure: Exception | None = None
        for work in self._works:
            try:
                work.wait(timeout)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
