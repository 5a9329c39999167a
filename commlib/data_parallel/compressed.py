"""CompressedPlans: make the plans by which an Engine reduces buckets where gradients are compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.compress import Part
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.engine import MakePlan, Plan
from commlib.data_parallel.ranks import Compression


class CompressedPlans:
    """Makes plans: compressed for buckets of float32 over all ranks, those of `plain` for others.

    `parameters` are the (name, shape) of each, by number. They are called for every bucket of an Engine, after
    `start`: what is remembered moves to the new buckets by the parameters' names. Asked again for a bucket, they reduce
    it in its other array.
    """

    def __init__(
        self, plain: MakePlan, compression: Compression, parameters: Sequence[tuple[str, tuple[int, ...]]]
    ) -> None:
        self._plain, self._compression, self._parameters = plain, compression, parameters
        self._made: dict[Bucket, Any] = {}

    def start(self) -> CompressedPlans:
        """Forget the buckets before; return this."""
        self._compression.move()
        self._made.clear()
        return self

    def __call__(self, bucket: Bucket, array: Any) -> Plan:
        """Return what reduces a bucket in its array."""
        known = self._made.get(bucket)
        if known is not None:
            known.use(array)
            reused: Plan = known
            return reused
        parts = []
        for slot in bucket.slots:
            if slot.count:
                name, shape = self._parameters[slot.parameter]
                parts.append(Part(name, slot.offset, shape))
        if bucket.dtype != "float32" or bucket.axis or not parts:
            return self._plain(bucket, array)
        key = f"bucket {bucket.index}"
        made: Plan = self._compression.reduction(key, array, parts, bucket.flags, bucket.reduction)
        self._made[bucket] = made
        return made
