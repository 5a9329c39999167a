"""CompressedPlans: make the plans that reduce buckets of compressed gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.compress.scheme import BucketPart
from commlib.data_parallel.bucket_reducer import BucketPlan, MakePlan
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.reducer_ranks import BucketCompression


class CompressedPlans:
    """Makes plans: compressed ones for float32 buckets over all ranks, and those of `plain` for all other buckets.

    `parameters` lists the (name, shape) of each parameter, by number. A BucketReducer calls this object for each of its
    buckets, after `start`. The compression state moves to the new buckets by parameter name. A second call for the same
    bucket returns the same plan, with the bucket's other array.
    """

    def __init__(
        self, plain: MakePlan, compression: BucketCompression, parameters: Sequence[tuple[str, tuple[int, ...]]]
    ) -> None:
        self._plain, self._compression, self._parameters = plain, compression, parameters
        self._made: dict[Bucket, Any] = {}

    def start(self) -> CompressedPlans:
        """Drop the plans of the previous buckets and return this object."""
        self._compression.move()
        self._made.clear()
        return self

    def __call__(self, bucket: Bucket, array: Any) -> BucketPlan:
        """Return the plan that reduces a bucket in its array."""
        known = self._made.get(bucket)
        if known is not None:
            known.use(array)
            reused: BucketPlan = known
            return reused
        parts = []
        for slot in bucket.slots:
            if slot.count:
                name, shape = self._parameters[slot.parameter]
                parts.append(BucketPart(name, slot.offset, shape))
        if bucket.dtype != "float32" or bucket.axis or not parts:
            return self._plain(bucket, array)
        key = f"bucket {bucket.index}"
        plan: BucketPlan = self._compression.reduction(key, array, parts, bucket.flags, bucket.reduction)
        self._made[bucket] = plan
        return plan
