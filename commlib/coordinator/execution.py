"""Agreed operations become collectives of one group: those that can be are fused, all in the same order on all ranks.

A rank that has joined gets no pending operation, and does its part with nothing: the neutral element in a reduction, no
rows in a gather or an exchange. What it receives is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from commlib.buffers.views import address_of
from commlib.coordinator.adasum import adasum
from commlib.coordinator.compressed import VERB as COMPRESSED
from commlib.coordinator.compressed import CompressedReductions
from commlib.coordinator.negotiation import Launch
from commlib.coordinator.on_device import Staging
from commlib.coordinator.pending import Pending
from commlib.coordinator.request import Request
from commlib.coordinator.scaling import neutral, scale
from commlib.dtypes import INTEGERS, NUMPY, Array
from commlib.errors import UsageError
from commlib.kernels.host.pack import pack, unpack

# On a node packing pays for small arrays, in batches that stay in the caches until they are unpacked (1,000 arrays of
# 4 KiB: 1.35 ms, in one batch 1.6); larger ones go through the node's slots as they are (8 MiB in arrays of 256 KiB and
# more: 1.5 ms, packed 2.3). Between nodes each collective costs latencies, and packing is cheap beside the network.
_NODE_BATCH, _ALONE_ON_NODE, _ALONE_BETWEEN = 1 << 20, 128 << 10, 1 << 20

_MOST_KEPT = 1 << 14  # what was worked out about requests


class Job(NamedTuple):
    """One agreed operation on this rank; `pending` is None where this rank has joined."""

    launch: Launch
    pending: Pending | None


@dataclass(frozen=True, slots=True, eq=False)  # one object for each kind, so that it is found by its identity
class Kind:
    """Tensors of one kind can be reduced as one array."""

    dtype: str
    op: str
    prescale: float
    postscale: float


Item = tuple[int, Array | None, Array | None]
"""One tensor of an all-reduce: elements, source and target; both are None where this rank has joined."""


class Execution:
    """Runs agreed operations on `comm`, whose ranks are called `members`.

    fusion_bytes: how much is reduced as one array at most, between nodes.
    """

    def __init__(self, comm: Any, members: Sequence[int], fusion_bytes: int) -> None:
        self._comm, self._members = comm, tuple(members)
        self._batch_bytes = min(fusion_bytes, _NODE_BATCH) if comm.one_node else fusion_bytes
        self._alone_bytes = _ALONE_ON_NODE if comm.one_node else _ALONE_BETWEEN
        self._buffer: Array = np.empty(0, np.uint8)
        self.staging: Staging | None = None  # made when an array of a device comes
        self.compressed = CompressedReductions(comm)
        self._kinds: dict[tuple[str, str, float, float], Kind] = {}
        self._parts: dict[str, tuple[Request, list[tuple[Kind, int]]]] = {}
        self._verbs: dict[str, Callable[[Job], Any]] = {
            COMPRESSED: self._compressed_all_reduce,
            "allgather": self._all_gather,
            "broadcast": self._broadcast,
            "alltoall": self._all_to_all,
            "reducescatter": self._reduce_scatter,
            "barrier": lambda job: None,  # agreeing was meeting
            "broadcast_object": self._broadcast_object,
            "allgather_object": self._all_gather_object,
            "process_set": self._split,
        }

    def run(self, jobs: Sequence[Job], done: Callable[[Job, Any, BaseException | None], None]) -> None:
        """Run operations, telling how each has ended. Raises nothing that belongs to one of them alone.

        What it raises has left this rank out of step with the others.
        """
        if self.staging is not None:
            jobs, done = self.staging.bring(jobs, done)
        reductions = [job for job in jobs if job.launch.request.verb == "allreduce"]
        self._guarded(reductions, done, self._all_reduce)
        for job in jobs:
            if job.launch.request.verb != "allreduce":
                self._guarded([job], done, self._run_one)

    def _guarded(
        self,
        jobs: Sequence[Job],
        done: Callable[[Job, Any, BaseException | None], None],
        run: Callable[[Sequence[Job]], Iterable[tuple[Job, Any]]],
    ) -> None:
        ended = 0
        try:
            for job, value in run(jobs):  # in order
                ended += 1
                done(job, value, None)
        except UsageError as error:  # refused before anything was sent, on all ranks alike
            for job in jobs[ended:]:
                done(job, None, error)

    def _run_one(self, jobs: Sequence[Job]) -> Iterable[tuple[Job, Any]]:
        yield jobs[0], self._verbs[jobs[0].launch.request.verb](jobs[0])

    # Reductions

    def _all_reduce(self, jobs: Sequence[Job]) -> Iterable[tuple[Job, Any]]:
        kinds: dict[Kind, list[Item]] = {}
        for launch, pending in jobs:
            parts = self._parts_of(launch.request)
            if pending is None:
                for kind, size in parts:
                    kinds.setdefault(kind, []).append((size, None, None))
            else:
                for (kind, size), source, target in zip(parts, pending.inputs, pending.outputs, strict=True):
                    kinds.setdefault(kind, []).append((size, source, target))
        for kind, items in kinds.items():
            self._reduce_kind(kind, items)
        return [(job, None if job.pending is None else job.pending.outputs) for job in jobs]

    def _parts_of(self, request: Request) -> Sequence[tuple[Kind, int]]:
        """Return the kind and the number of elements of each tensor of an all-reduce."""
        known = self._parts.get(request.name)
        if known is not None and known[0] is request:
            return known[1]
        options = _options(request)
        found = []
        for dtype, shape in request.tensors:
            kind = self._kinds.setdefault((dtype, *options), Kind(dtype, *options))
            found.append((kind, math.prod(length or 0 for length in shape)))
        if len(self._parts) >= _MOST_KEPT:
            self._parts.clear()
        self._parts[request.name] = request, found
        return found

    def _reduce_kind(self, kind: Kind, items: Sequence[Item]) -> None:
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

    def _reduce_batch(self, kind: Kind, batch: Sequence[Item]) -> None:
        if len(batch) <= 1 or kind.op == "adasum":
            for item in batch:
                self._reduce_alone(kind, *item)
            return
        sizes, sources, targets = zip(*batch, strict=True)
        total = sum(sizes)
        if not total:
            return
        dtype = NUMPY[kind.dtype]
        buffer = self._room(total * dtype.itemsize).view(dtype)
        nbytes = np.array(sizes, np.int64) * dtype.itemsize
        joined = sources[0] is None
        if joined:
            buffer[...] = neutral(kind.dtype, kind.op)
        else:
            pack(sources, nbytes, address_of(buffer))
        self._reduce_in_place(kind, buffer)
        if not joined:
            unpack(address_of(buffer), targets, nbytes)

    def _reduce_alone(self, kind: Kind, size: int, source: Array | None, target: Array | None) -> None:
        if size == 0:
            return
        if source is None or target is None:
            source = target = np.full(size, neutral(kind.dtype, kind.op), NUMPY[kind.dtype])
        if kind.op != "adasum" and kind.prescale == kind.postscale == 1:
            self._comm.all_reduce(source, kind.op, out=target)
            return
        if source is not target:
            target[...] = source
        self._reduce_in_place(kind, target.reshape(-1))

    def _reduce_in_place(self, kind: Kind, array: Array) -> None:
        op, postscale = kind.op, kind.postscale
        if op == "mean" and postscale != 1 and kind.dtype in INTEGERS:
            op, postscale = "sum", postscale / self._comm.size  # truncated once, not twice
        scale(array, kind.prescale)
        if op == "adasum":
            adasum(self._comm, array)
        else:
            self._comm.all_reduce(array, op, out=array)
        scale(array, postscale)

    def _room(self, nbytes: int) -> Array:
        """Return so many bytes of symmetric memory. All ranks ask for the same, in the same order."""
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(0, np.uint8)  # may be released
            self._buffer = self._comm.empty(1 << max(16, (nbytes - 1).bit_length()), "uint8")
        return self._buffer[:nbytes]

    def _reduce_scatter(self, job: Job) -> Any:
        request = job.launch.request
        op, prescale, postscale = _options(request)
        results = []
        for index, (dtype, shape) in enumerate(request.tensors):
            if job.pending is None:
                array = np.full([length or 0 for length in shape], neutral(dtype, op), NUMPY[dtype])
            else:
                array = job.pending.inputs[index]
            if prescale != 1:
                array = array.copy()
                scale(array, prescale)
            factor = postscale
            how = op
            if op == "mean" and postscale != 1 and dtype in INTEGERS:
                how, factor = "sum", postscale / self._comm.size
            part = self._comm.reduce_scatter(array, how)
            scale(part, factor)
            results.append(part)
        return results

    def _compressed_all_reduce(self, job: Job) -> Any:
        request, pending = job.launch.request, job.pending
        if self.compressed.compression(request).scheme is None:
            return next(iter(self._all_reduce([job])))[1]
        if pending is None:
            self.compressed.run(request, None, ())
            return None
        self.compressed.run(request, pending.inputs, pending.outputs)
        return pending.outputs

    # Movement

    def _all_gather(self, job: Job) -> Any:
        return [self._comm.all_gather_v(array) for array in _inputs(job)]

    def _broadcast(self, job: Job) -> Any:
        root = self._root(job)
        for array in _inputs(job):
            if array.size:
                self._comm.broadcast(array, root)
        return None if job.pending is None else job.pending.outputs

    def _all_to_all(self, job: Job) -> Any:
        (array,) = _inputs(job)
        splits = [0] * self._comm.size if job.pending is None else job.pending.extra
        return self._comm.all_to_all_v(array, splits)

    def _broadcast_object(self, job: Job) -> Any:
        return self._comm.broadcast_object(None if job.pending is None else job.pending.extra, self._root(job))

    def _root(self, job: Job) -> int:
        return self._members.index(int(job.launch.request.option("root", 0)))

    def _all_gather_object(self, job: Job) -> Any:
        return self._comm.all_gather_object(None if job.pending is None else job.pending.extra)

    def _split(self, job: Job) -> Any:
        if job.pending is None or job.launch.joined:
            raise UsageError(f"{job.launch.request}: not while a rank has joined: it takes no part in making groups")
        return job.pending.extra(self._comm)


def _options(request: Request) -> tuple[str, float, float]:
    return (
        str(request.option("op", "sum")),
        float(request.option("prescale_factor", 1.0)),
        float(request.option("postscale_factor", 1.0)),
    )


def _inputs(job: Job) -> Sequence[Array]:
    """Return the arrays of an operation; where this rank has joined, arrays without rows, or to be overwritten."""
    if job.pending is not None:
        return job.pending.inputs
    shapes = [(NUMPY[dtype], [length or 0 for length in shape]) for dtype, shape in job.launch.request.tensors]
    return [np.zeros(shape, dtype) for dtype, shape in shapes]
