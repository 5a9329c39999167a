"""What reduces buckets whose gradients are compressed: the plans that an Engine asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.compress import GradientCompression, Part
from commlib.compress.bucket import CompressedBucket
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.engine import Plan


class CompressedPlans:
    """Makes plans for buckets of `comm`: compressed for float32, all-reduces as they are for other dtypes.

    `parameters` are the (name, shape) of each, by number. They are called for every bucket of an Engine, after
    `start`: what is remembered moves to the new buckets by the parameters' names. Asked again for a bucket, they reduce
    it in its other array.
    """

    def __init__(
        self, comm: Any, compression: GradientCompression, parameters: Sequence[tuple[str, tuple[int, ...]]]
    ) -> None:
        self._comm, self._compression, self._parameters = comm, compression, parameters
        self._made: dict[Bucket, CompressedBucket] = {}

    def start(self) -> CompressedPlans:
        """Forget the buckets before; return this."""
        self._compression.move()
        self._made.clear()
        return self

    def __call__(self, bucket: Bucket, array: Any) -> Plan:
        """Return what reduces a bucket in its array."""
        made = self._made.get(bucket)
        if made is not None:
            made.use(array)
            return made
        parts = []
        for slot in bucket.slots:
            if slot.count:
                name, shape = self._parameters[slot.parameter]
                parts.append(Part(name, slot.offset, shape))
        if bucket.dtype != "float32" or not parts:
            plain: Plan = self._comm.plan_all_reduce(array, bucket.reduction, out=array)
            return plain
        key = f"bucket {bucket.index}"
        made = self._compression.reduction(key, array, parts, bucket.flags, bucket.reduction)
        self._made[bucket] = made
        return made
