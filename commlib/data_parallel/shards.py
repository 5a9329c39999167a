"""Shards: keep one part of every bucket's gradients and parameters on each rank, and gather the parameters.

    backward: reduce-scatter 0, 1, ... | the optimizer updates `own(b)` with `gradients(b)` | gather ..., 1, 0 | forward

Gradients and optimizer state thus take 1/P of the memory, for the bytes of an all-reduce (Rajbhandari et al. 2020,
ZeRO). The cuts of a bucket ignore parameter boundaries: `pieces` lists the parameters in a part, with the range of
each. P ranks may be one of several replicas, such as a node: then parts are also all-reduced over the replicas (HSDP).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from commlib.data_parallel.bucket_reducer import BucketPlan, BucketReducer
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.plan_sequence import PlanProgram, PlanSequence
from commlib.data_parallel.report import all_reduce_bytes
from commlib.data_parallel.shard_axes import ShardAxes
from commlib.dtypes import Array
from commlib.errors import UsageError


class ShardPiece(NamedTuple):
    """The elements of one parameter that this rank owns: from `first` on, at `start` to `stop` of its part."""

    parameter: int
    first: int
    start: int
    stop: int


class Shards:
    """This rank's parts of `buckets`, each of which has its `axes`. Construction is collective.

    The size of the shard axis must divide the values of a bucket. Raises UsageError for buckets on a device.
    """

    def __init__(self, buckets: Sequence[Bucket], axes: Sequence[ShardAxes]) -> None:
        self._buckets, self._axes = tuple(buckets), tuple(axes)
        self._gradients: list[Any] = []
        self._own: list[Any] = []
        self._whole: list[Any] = []
        self._of: dict[int, tuple[int, int, int]] = {}  # bucket, first element and end of each parameter
        for index, (bucket, shard) in enumerate(zip(self._buckets, (one.shard for one in axes), strict=True)):
            if bucket.device != "cpu":
                raise UsageError(f"gradients on {bucket.device} cannot be sharded: only those on the host can")
            self._whole.append(shard.empty((bucket.flags,), bucket.dtype))
            part = (bucket.flags // shard.size,)
            self._own.append(self._whole[index] if shard.size == 1 else shard.empty(part, bucket.dtype))
            self._gradients.append(shard.empty(part, bucket.dtype))
            for slot in bucket.slots:
                self._of[slot.parameter] = index, slot.offset, slot.offset + slot.count

    def pieces(self, bucket: int) -> list[ShardPiece]:
        """Return the pieces of parameters that this rank owns, in order."""
        length = len(self._own[bucket])
        begin = self._axes[bucket].shard.rank * length
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

    def plan(self, bucket: Bucket, array: Any) -> BucketPlan:
        """Return the plan that reduces a bucket in its array: a reduce-scatter of values, an all-reduce of flags.

        With replicas, this rank's part and the flags are then all-reduced over them.
        """
        axes = self._axes[bucket.index]
        shard, replica = axes.shard, axes.replica
        own, flags = self._gradients[bucket.index], array[bucket.flags :]
        plans = [shard.plan_all_reduce(flags, "sum", out=flags)]
        if bucket.flags:
            plans.insert(0, shard.plan_reduce_scatter(array[: bucket.flags], bucket.reduction, out=own))
        nbytes = (shard.size - 1) * bucket.nbytes // shard.size
        if replica is None:
            return PlanSequence(plans, nbytes)
        plans.append(replica.plan_all_reduce(flags, "sum", out=flags))
        if bucket.flags:
            plans.append(replica.plan_all_reduce(own, bucket.reduction, out=own))
        nbytes += all_reduce_bytes(replica.size, bucket.nbytes // shard.size)
        text = f"bucket {bucket.index}: {bucket.count} x {bucket.dtype}, op={bucket.reduction}, {shard.size} parts"
        return PlanProgram(axes.whole, text, plans, nbytes, on=array)

    def end(self, engine: BucketReducer) -> None:
        """Complete the parts after a reduction: those of buckets without a plan, and those with a scale."""
        for bucket, axes, own in zip(self._buckets, self._axes, self._gradients, strict=True):
            if axes.whole.size == 1:
                own[...] = engine.array(bucket.index)[: bucket.flags]
            elif bucket.scale != 1:
                own *= own.dtype.type(bucket.scale)

    def gather(self, engine: BucketReducer) -> None:
        """Start to gather the parameters, last bucket first. Collective.

        Backward makes gradients in the order of the buckets, so forward needs parameters in the reverse order.
        """
        engine.prefetch([self._gather(bucket) for bucket in reversed(self._buckets)])

    def gathered(self, index: int, engine: BucketReducer) -> Array:
        """Wait until a parameter is gathered; return its elements: a 1-D view that the next gather overwrites."""
        bucket, start, stop = self._of[index]
        engine.fetched(len(self._buckets) - 1 - bucket)
        result: Array = self._whole[bucket][start:stop]
        return result

    def _gather(self, bucket: Bucket) -> BucketPlan:
        """Return the plan that gathers the parameters of a bucket from the ranks' parts."""
        axes, own, whole = self._axes[bucket.index], self._own[bucket.index], self._whole[bucket.index]
        if own is whole:
            return PlanSequence([], 0)
        gather: BucketPlan = axes.shard.plan_all_gather(own, out=whole)
        if axes.replica is None:
            return gather
        text = f"gather of bucket {bucket.index}: {len(whole)} x {bucket.dtype}, {axes.shard.size} parts"
        return PlanProgram(axes.whole, text, [gather], own.nbytes * (axes.shard.size - 1), on=whole)
