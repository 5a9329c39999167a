"""CompressedReduction: reduce buckets with compression, after a warm-up that shows the order of gradients.

    CompressionWarmup: all-reduce, until ranks agree on the order of gradients, or resume a run that knew it
    CompressedReduction: from then on, with the same buckets

Compression starts with settled buckets, because its state belongs to the positions of parameters in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.compress.scheme import BucketPart
from commlib.data_parallel.bucket_order import BucketOrder
from commlib.data_parallel.bucket_reducer import BucketPlan, BucketReducer
from commlib.data_parallel.bucket_reduction import BucketReduction
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.options import Gradient
from commlib.data_parallel.reducer_ranks import BucketCompression, ReducerRanks
from commlib.data_parallel.resume_point import ResumePoint, agree_on_resume_point
from commlib.data_parallel.unbucketed_gradients import UnbucketedGradients


class CompressionWarmup(BucketReduction):
    """Reduces without compression until the order of gradients is settled.

    Before the first reduction ranks agree on whether all of them resume one saved run, which settles the order.
    """

    def __init__(self, ranks: ReducerRanks, compression: BucketCompression, gradients: Sequence[Gradient]) -> None:
        super().__init__(ranks)
        self.may_launch = False
        self._compression, self._gradients = compression, gradients
        self._requested: ResumePoint | None = None

    def successor(self, order: BucketOrder, unbucketed: UnbucketedGradients) -> BucketReduction:
        """Return the compressed reduction as soon as the order is settled. Collective in the first call."""
        steps = 0
        if not self.may_launch:
            self.may_launch = True
            point = agree_on_resume_point(self._ranks, self._requested)
            if point is None:
                self._compression.drop_common()
            else:
                order.restore(point.order)
                unbucketed.restore(point.sparse)
                steps = point.steps
        if not order.is_settled:
            return self
        return CompressedReduction(self._ranks, self._compression, self._gradients, steps)

    def resume(self, point: ResumePoint) -> None:
        """Request to resume a saved run: it is resumed if all ranks request the same before the first reduction."""
        if not self.may_launch:
            self._requested = point

    def resume_point(self, order: BucketOrder, unbucketed: UnbucketedGradients) -> ResumePoint | None:
        """Return the requested point, because nothing is compressed yet."""
        return self._requested

    def take_over(self, before: BucketReduction) -> None:
        """Skip the agreement if ranks reached it in another reducer."""
        self.may_launch = self.may_launch or before.may_launch


class CompressedReduction(BucketReduction):
    """Compresses float32 buckets over all ranks, and all-reduces all other buckets.

    `steps`: compressed reductions in the run that is resumed. The compression state moves to new buckets by the names
    of `gradients`. A second plan of a bucket is the first one, with the bucket's other array.
    """

    def __init__(
        self, ranks: ReducerRanks, compression: BucketCompression, gradients: Sequence[Gradient], steps: int = 0
    ) -> None:
        super().__init__(ranks)
        self._compression, self._gradients, self._steps = compression, gradients, steps
        self._plans: dict[Bucket, Any] = {}

    def use(self, buckets: Sequence[Bucket]) -> None:
        """Drop the plans of the previous buckets."""
        self._compression.move()
        self._plans.clear()

    def plan(self, bucket: Bucket, array: Any) -> BucketPlan:
        """Return the plan that reduces a bucket in its array."""
        known = self._plans.get(bucket)
        if known is not None:
            known.use(array)
            reused: BucketPlan = known
            return reused
        parts = []
        for slot in bucket.slots:
            if slot.count:
                gradient = self._gradients[slot.parameter]
                parts.append(BucketPart(gradient.name, slot.offset, gradient.shape))
        if bucket.dtype != "float32" or bucket.axis or not parts:
            return super().plan(bucket, array)
        key = f"bucket {bucket.index}"
        plan: BucketPlan = self._compression.reduction(key, array, parts, bucket.flags, bucket.reduction)
        self._plans[bucket] = plan
        return plan

    def end(self, engine: BucketReducer) -> None:
        """Count the reduction, and undo it if a sum is not finite."""
        self._steps += 1
        self._compression.end_step()

    def commit(self) -> None:
        """Accept the last reduction."""
        self._compression.commit()

    def rollback(self) -> None:
        """Undo the last reduction, unless a step has used it."""
        self._compression.rollback()

    def resume_point(self, order: BucketOrder, unbucketed: UnbucketedGradients) -> ResumePoint | None:
        """Return the point from which a later run resumes."""
        scheme = self._compression.scheme
        assert scheme is not None, "something is compressed"
        known = None if order.order is None else tuple(order.order)
        return ResumePoint(scheme.name, known, tuple(sorted(unbucketed.sparse)), self._steps)
