"""BucketReduction: how the buckets of one set of gradients are reduced, from the plans of buckets to the results.

    use(buckets) | plan(bucket, array), ... | per reduction: end, take, successor | per step: commit or rollback

A GradientReducer has one reduction at a time. `BucketReduction` all-reduces buckets; a `CompressionWarmup` is replaced
by a `CompressedReduction`; a `ShardedReduction` leaves each rank its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from commlib.data_parallel.bucket_order import BucketOrder
from commlib.data_parallel.bucket_reducer import BucketPlan, BucketReducer
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.reducer_ranks import ReducerRanks
from commlib.data_parallel.resume_point import ResumePoint
from commlib.data_parallel.shards import Shards
from commlib.data_parallel.unbucketed_gradients import UnbucketedGradients
from commlib.data_parallel.values import Values
from commlib.errors import UsageError


class BucketReduction:
    """All-reduces each bucket; base of the reductions that do more."""

    may_launch = True
    """Buckets may be launched. False until ranks have agreed on the buckets, which `successor` does."""

    def __init__(self, ranks: ReducerRanks) -> None:
        self._ranks = ranks

    @property
    def shards(self) -> Shards:
        """This rank's parts of gradients and parameters. Raises UsageError if nothing is sharded."""
        raise UsageError("gradients are not sharded: every rank has all of them")

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Reduce these buckets from now on. Collective. Raises UsageError on every rank if buckets cannot change."""

    def plan(self, bucket: Bucket, array: Any) -> BucketPlan:
        """Return the plan that reduces a bucket in its array. Called again for a bucket that gets another array."""
        return self._ranks.plan(bucket, array)

    def end(self, engine: BucketReducer) -> None:
        """Complete a reduction: all buckets of `engine` are reduced."""

    def take(self, values: Values, indices: Collection[int]) -> None:
        """Make the results of these gradients visible to the framework."""
        for index in indices:
            values.take(index)

    def successor(self, order: BucketOrder, unbucketed: UnbucketedGradients) -> BucketReduction:
        """Return the reduction to use from now on, the same on all ranks. Collective.

        Called after each reduction, and before one unless `may_launch`. The new one gets all buckets by `use`.
        """
        return self

    def commit(self) -> None:
        """Accept the last reduction, because a step used it."""

    def rollback(self) -> None:
        """Undo the last reduction, unless a step has used it."""

    def check_join(self) -> None:
        """Raise UsageError if the other ranks cannot go on without gradients of this one."""

    # A run that resumes

    def resume(self, point: ResumePoint) -> None:
        """Request to resume a saved run, if nothing was reduced yet."""

    def resume_point(self, order: BucketOrder, unbucketed: UnbucketedGradients) -> ResumePoint | None:
        """Return the point from which a later run resumes; None if it needs none."""
        return None

    def take_over(self, before: BucketReduction) -> None:
        """Continue after the reduction of another reducer."""
