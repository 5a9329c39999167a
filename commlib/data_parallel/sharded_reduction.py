"""ShardedReduction: leave each rank its parts of the reduced gradients, and gather the parameters after a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from commlib.data_parallel.bucket_reducer import BucketPlan, BucketReducer
from commlib.data_parallel.bucket_reduction import BucketReduction
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.reducer_ranks import ReducerRanks
from commlib.data_parallel.shard_axes import ShardAxes
from commlib.data_parallel.shards import Shards
from commlib.data_parallel.values import Values
from commlib.errors import UsageError


class ShardedReduction(BucketReduction):
    """Reduces buckets to this rank's parts: over all ranks, or over `shard_axis` and then over its replicas."""

    def __init__(self, ranks: ReducerRanks, shard_axis: str) -> None:
        super().__init__(ranks)
        self._shard_axis = shard_axis
        self._shards: Shards | None = None

    @property
    def shards(self) -> Shards:
        """This rank's parts."""
        assert self._shards is not None, "call `use` first"
        return self._shards

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Shard these buckets. Raises UsageError on every rank if others are sharded already."""
        if self._shards is not None:
            raise UsageError(
                "a gradient turned out to be sparse and must leave its bucket, but buckets are sharded: pass "
                "sparse_as_dense=True"
            )
        axes = {axis: ShardAxes.of(self._ranks, axis, self._shard_axis) for axis in sorted({b.axis for b in buckets})}
        self._shards = Shards(buckets, [axes[bucket.axis] for bucket in buckets])

    def plan(self, bucket: Bucket, array: Any) -> BucketPlan:
        """Return the plan that reduces a bucket in its array."""
        return self.shards.plan(bucket, array)

    def end(self, engine: BucketReducer) -> None:
        """Complete this rank's parts."""
        self.shards.end(engine)

    def take(self, values: Values, indices: Collection[int]) -> None:
        """Leave parameters without a gradient, because this rank has only a part of each."""
        values.hide(indices)

    def check_join(self) -> None:
        """Raise UsageError: no other rank has this rank's parts."""
        raise UsageError(
            "join is impossible with sharded parameters: the other ranks need this rank's part to gather them"
        )
