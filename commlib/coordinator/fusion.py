"""Fusion: pack agreed all-reduces of one kind into one array, and reduce them together if that pays.

A `FusionKey` is such a kind. A rank that has joined takes part with the neutral element, and drops the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from commlib.buffers.views import address_of
from commlib.coordinator.adasum import adasum
from commlib.coordinator.launched_op import LaunchedOp
from commlib.coordinator.op_request import OpRequest
from commlib.coordinator.records import ACTIVITIES
from commlib.coordinator.scaling import neutral_element, scale
from commlib.dtypes import INTEGERS, NUMPY, Array
from commlib.kernels.packing import pack, unpack
from commlib.literals import Op
from commlib.observe.journal import journal_of
from commlib.observe.recorder import Record

# Within a node packing pays for small arrays, in batches that stay in the caches until they are unpacked (1,000 arrays
# of 4 KiB: 1.35 ms, in one batch 1.6). Larger arrays go through the node's slots unpacked (8 MiB in arrays of 256 KiB
# and more: 1.5 ms, packed 2.3). Between nodes each collective costs latency, and packing is cheap compared to the
# network.
_NODE_BATCH, _ALONE_ON_NODE, _ALONE_BETWEEN = 1 << 20, 128 << 10, 1 << 20

_MOST_KEPT = 1 << 14  # cached requests

Item = tuple[int, Array | None, Array | None, Record | None]
"""One tensor of an all-reduce: number of elements, source and target (both None if this rank has joined), and the
record of its operation, if any."""


class Fusion:
    """Runs the all-reduces of `comm`. fusion_bytes: the largest packed array between nodes."""

    def __init__(self, comm: Any, fusion_bytes: int) -> None:
        self._comm, self._journal = comm, journal_of(comm)
        self._batch_bytes = min(fusion_bytes, _NODE_BATCH) if comm.one_node else fusion_bytes
        self._alone_bytes = _ALONE_ON_NODE if comm.one_node else _ALONE_BETWEEN
        self._buffer: Array = np.empty(0, np.uint8)
        self._kinds: dict[tuple[str, str, float, float], FusionKey] = {}
        self._parts: dict[str, tuple[OpRequest, list[tuple[FusionKey, int]]]] = {}

    def all_reduce(self, jobs: Sequence[LaunchedOp]) -> list[tuple[LaunchedOp, Any]]:
        """Run operations, and return each with its value. All ranks pass the same operations in the same order."""
        kinds: dict[FusionKey, list[Item]] = {}
        for launch, pending in jobs:
            parts = self._parts_of(launch.request)
            if pending is None:
                for kind, size in parts:
                    kinds.setdefault(kind, []).append((size, None, None, None))
            else:
                for (kind, size), source, target in zip(parts, pending.inputs, pending.outputs, strict=True):
                    kinds.setdefault(kind, []).append((size, source, target, pending.record))
        for kind, items in kinds.items():
            self._reduce_kind(kind, items)
        return [(job, None if job.pending is None else job.pending.outputs) for job in jobs]

    def _parts_of(self, request: OpRequest) -> Sequence[tuple[FusionKey, int]]:
        """Return the kind and the number of elements of each tensor of an all-reduce."""
        known = self._parts.get(request.name)
        if known is not None and known[0] is request:
            return known[1]
        options = options_of(request)
        parts = []
        for dtype, shape in request.tensors:
            kind = self._kinds.setdefault((dtype, *options), FusionKey(dtype, *options))
            parts.append((kind, math.prod(length or 0 for length in shape)))
        if len(self._parts) >= _MOST_KEPT:
            self._parts.clear()
        self._parts[request.name] = request, parts
        return parts

    def _reduce_kind(self, kind: FusionKey, items: Sequence[Item]) -> None:
        itemsize = NUMPY[kind.dtype].itemsize
        batch: list[Item] = []
        nbytes = 0
        for item in items:
            more = item[0] * itemsize
            if more >= self._alone_bytes:
                self._reduce_alone(kind, *item)
                continue
            if nbytes + more > self._batch_bytes:
                self._reduce_batch(kind, batch)
                batch, nbytes = [], 0
            batch.append(item)
            nbytes += more
        self._reduce_batch(kind, batch)

    def _reduce_batch(self, kind: FusionKey, batch: Sequence[Item]) -> None:
        if len(batch) <= 1 or kind.op == "adasum":
            for item in batch:
                self._reduce_alone(kind, *item)
            return
        sizes, sources, targets, _ = zip(*batch, strict=True)
        total = sum(sizes)
        if not total:
            return
        dtype = NUMPY[kind.dtype]
        buffer = self._reserve(total * dtype.itemsize).view(dtype)
        nbytes = np.array(sizes, np.int64) * dtype.itemsize
        joined = sources[0] is None
        if joined:
            buffer[...] = neutral_element(kind.dtype, kind.op)
        else:
            _record_activity(batch, "MEMCPY_IN_FUSION_BUFFER")
            with self._journal.span("pack", "pack", tensors=len(batch), bytes=buffer.nbytes):
                pack(sources, nbytes, address_of(buffer))
        _record_activity(batch, ACTIVITIES["allreduce"])
        self._reduce_in_place(kind, buffer)
        if not joined:
            _record_activity(batch, "MEMCPY_OUT_FUSION_BUFFER")
            with self._journal.span("pack", "unpack", tensors=len(batch), bytes=buffer.nbytes):
                unpack(address_of(buffer), targets, nbytes)

    def _reduce_alone(
        self, kind: FusionKey, size: int, source: Array | None, target: Array | None, record: Record | None
    ) -> None:
        if size == 0:
            return
        if record is not None:
            record.round(ACTIVITIES["allreduce"])
        if source is None or target is None:
            source = target = np.full(size, neutral_element(kind.dtype, kind.op), NUMPY[kind.dtype])
        if kind.op != "adasum" and kind.prescale == kind.postscale == 1:
            self._comm.all_reduce(source, kind.op, out=target)
            return
        if source is not target:
            target[...] = source
        self._reduce_in_place(kind, target.reshape(-1))

    def _reduce_in_place(self, kind: FusionKey, array: Array) -> None:
        op, postscale = kind.as_run(self._comm.size)
        scale(array, kind.prescale)
        if op == "adasum":
            adasum(self._comm, array)
        else:
            self._comm.all_reduce(array, op, out=array)
        scale(array, postscale)

    def _reserve(self, nbytes: int) -> Array:
        """Return symmetric memory of this size. All ranks request the same sizes in the same order."""
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(0, np.uint8)  # may be released
            self._buffer = self._comm.empty(1 << max(16, (nbytes - 1).bit_length()), "uint8")
        return self._buffer[:nbytes]


def _record_activity(batch: Sequence[Item], activity: str) -> None:
    """Record the current activity of the operations of a batch, by Horovod's names."""
    before = None
    for *_, record in batch:
        if record is not None and record is not before:  # several tensors may belong to one operation
            record.round(activity)
        before = record


@dataclass(frozen=True, slots=True, eq=False)  # one object per kind, compared by identity
class FusionKey:
    """Key of tensors that can be reduced as one array."""

    dtype: str
    op: Op | Literal["adasum"]
    prescale: float
    postscale: float

    def as_run(self, size: int) -> tuple[Any, float]:
        """Return the operation to run on `size` ranks, and the scale of its result."""
        if self.op == "mean" and self.postscale != 1 and self.dtype in INTEGERS:
            return "sum", self.postscale / size  # truncated once instead of twice
        return self.op, self.postscale


def options_of(request: OpRequest) -> tuple[Any, float, float]:
    """Return operation, prescale and postscale of a reduction."""
    return (
        str(request.option("op", "sum")),
        float(request.option("prescale_factor", 1.0)),
        float(request.option("postscale_factor", 1.0)),
    )


def root_of(request: OpRequest, members: Sequence[int]) -> int:
    """Return the root of an operation, as its index in the group's `members`."""
    return members.index(int(request.option("root", 0)))
