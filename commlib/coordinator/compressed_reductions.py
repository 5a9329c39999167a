"""CompressedReductions: reduce compressed tensors by name, and keep the state of each name for the next call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commlib.buffers.views import address_of
from commlib.compress import scheme_of
from commlib.compress.bucket import CompressedBucket
from commlib.compress.gradients import GradientCompression
from commlib.compress.scheme import BucketPart
from commlib.coordinator.op_request import OpRequest
from commlib.coordinator.scaling import scale
from commlib.dtypes import Array
from commlib.kernels.packing import pack, unpack
from commlib.observe.journal import journal_of

VERB = "compressed_allreduce"


@dataclass(slots=True)
class _Bucket:
    """The tensors of one name, concatenated as float32 in symmetric memory."""

    request: OpRequest
    array: Array
    parts: list[BucketPart]
    reduction: CompressedBucket
    nbytes: Array

    def fill(self, sources: Sequence[Array] | None) -> None:
        """Copy the tensors in; None writes zeros, for a rank that has joined."""
        if sources is None:
            self.array[...] = 0
        elif all(source.dtype == np.float32 for source in sources):
            pack(sources, self.nbytes, address_of(self.array))
        else:
            for part, source in zip(self.parts, sources, strict=True):
                self.array[part.start : part.stop] = source.reshape(-1)

    def unpack_results(self, targets: Sequence[Array]) -> None:
        """Copy the results to arrays of the same shapes."""
        if all(target.dtype == np.float32 for target in targets):
            unpack(address_of(self.array), targets, self.nbytes)
            return
        with np.errstate(over="ignore"):
            for part, target in zip(self.parts, targets, strict=True):
                target[...] = self.array[part.start : part.stop].reshape(target.shape).astype(target.dtype)


class CompressedReductions:
    """The compressed reductions of one process set. Ranks call `run` for the same requests in the same order."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._journal = comm, journal_of(comm)
        self._compressions: dict[tuple[str, bool], GradientCompression] = {}
        self._buckets: dict[str, _Bucket] = {}

    def compression(self, request: OpRequest) -> GradientCompression:
        """Return the compression of a request; `scheme` is None without compression. Collective on the first call."""
        text, within = str(request.option("compression")), bool(request.option("within_node", 0))
        result = self._compressions.get((text, within))
        if result is None:
            count = sum(map(_count, request.tensors))
            result = GradientCompression(self._comm, scheme_of(text), within_node=within, count=count)
            self._compressions[text, within] = result
        return result

    def run(self, request: OpRequest, sources: Sequence[Array] | None, targets: Sequence[Array]) -> None:
        """Reduce the tensors of all ranks; `sources` is None on a rank that has joined. Collective."""
        bucket = self._buckets.get(request.name)
        if bucket is None or bucket.request != request:
            bucket = self._buckets[request.name] = self._make(request)
        with self._journal.span("pack", "pack", tensors=len(bucket.parts), bytes=bucket.array.nbytes):
            bucket.fill(sources)
        scale(bucket.array, float(request.option("prescale_factor", 1.0)))
        bucket.reduction()
        bucket.reduction.end_step()
        if sources is not None:
            scale(bucket.array, float(request.option("postscale_factor", 1.0)))
            with self._journal.span("pack", "unpack", tensors=len(bucket.parts), bytes=bucket.array.nbytes):
                bucket.unpack_results(targets)

    def _make(self, request: OpRequest) -> _Bucket:
        parts, start = [], 0
        for number, (_, shape) in enumerate(request.tensors):
            parts.append(BucketPart(str(number), start, tuple(length or 0 for length in shape)))
            start = parts[-1].stop
        compression = self.compression(request)
        assert compression.scheme is not None
        array = self._comm.empty(start)
        op = str(request.option("op"))
        reduction = CompressedBucket(compression.link, compression.scheme, array, parts, start, op, request.name)
        return _Bucket(request, array, parts, reduction, np.array([4 * part.count for part in parts], np.int64))


def _count(tensor: tuple[str, tuple[int | None, ...]]) -> int:
    return math.prod(length or 0 for length in tensor[1])
