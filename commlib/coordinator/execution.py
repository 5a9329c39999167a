"""Execution: run agreed operations as collectives of one group, in the same order on all ranks.

A rank that has joined has no pending operation, and takes part without data: with the neutral element in a reduction,
with no rows in a gather or an exchange. It drops the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from commlib.coordinator.compressed_buckets import MAKE, REDUCE, CompressedBuckets
from commlib.coordinator.compressed_reductions import VERB as COMPRESSED
from commlib.coordinator.compressed_reductions import CompressedReductions
from commlib.coordinator.device_execution import DeviceExecution
from commlib.coordinator.device_operands import Staging
from commlib.coordinator.fusion import Fusion, FusionKey, options_of, root_of
from commlib.coordinator.launched_op import LaunchedOp
from commlib.coordinator.records import ACTIVITIES
from commlib.coordinator.scaling import neutral_element, scale
from commlib.dtypes import NUMPY
from commlib.errors import UsageError

_Done = Callable[[LaunchedOp, Any, BaseException | None], None]
_Run = Callable[[Sequence[LaunchedOp]], Iterable[tuple[LaunchedOp, Any]]]


class Execution:
    """Runs agreed operations on `comm`; `members` lists the names of its ranks. fusion_bytes: see `Fusion`."""

    def __init__(self, comm: Any, members: Sequence[int], fusion_bytes: int) -> None:
        self._comm, self._members = comm, tuple(members)
        self.fusion = Fusion(comm, fusion_bytes)
        self.staging: Staging | None = None  # made for the first device array
        self._between_devices = DeviceExecution(comm, self._members)
        self.compressed = CompressedReductions(comm)
        self.buckets = CompressedBuckets(comm)
        self._verbs: dict[str, Callable[[LaunchedOp], Any]] = {
            COMPRESSED: self._compressed_all_reduce,
            "allgather": self._all_gather,
            "broadcast": self._broadcast,
            "alltoall": self._all_to_all,
            "reducescatter": self._reduce_scatter,
            "barrier": lambda job: None,  # the agreement was the barrier
            "broadcast_object": self._broadcast_object,
            "allgather_object": self._all_gather_object,
            "process_set": self._split,
            "memory": self._memory,
            MAKE: lambda job: self.buckets.make(job.launch.request),
            REDUCE: self._reduce_compressed,
        }

    def run(self, jobs: Sequence[LaunchedOp], done: _Done) -> None:
        """Run operations, and call `done` for each. Errors of a single operation go to `done` instead of being raised.

        After an error that this raises, this rank is out of step with the others.
        """
        if self.staging is not None:
            stays = [self._between_devices.takes(job) for job in jobs]
            there = [job for job, is_there in zip(jobs, stays, strict=True) if is_there]
            self._run_all(there, done, self._between_devices.run, self._between_devices.run)
            others = [job for job, is_there in zip(jobs, stays, strict=True) if not is_there]
            jobs, done = self.staging.bring(others, done)
        self._run_all(jobs, done, self.fusion.all_reduce, self._run_one)

    def _run_all(self, jobs: Sequence[LaunchedOp], done: _Done, all_reduce: _Run, one: _Run) -> None:
        """Run all-reduces together, then the others one by one."""
        self._guarded([job for job in jobs if job.launch.request.verb == "allreduce"], done, all_reduce)
        for job in jobs:
            if job.launch.request.verb != "allreduce":
                self._guarded([job], done, one)

    def _guarded(self, jobs: Sequence[LaunchedOp], done: _Done, run: _Run) -> None:
        ended = 0
        try:
            for job, value in run(jobs):  # in order
                ended += 1
                done(job, value, None)
        except UsageError as error:  # all ranks refuse it, before anything is sent
            for job in jobs[ended:]:
                done(job, None, error)

    def _run_one(self, jobs: Sequence[LaunchedOp]) -> Iterable[tuple[LaunchedOp, Any]]:
        (job,) = jobs
        verb, record = job.launch.request.verb, None if job.pending is None else job.pending.record
        if record is not None and verb in ACTIVITIES:
            record.round(ACTIVITIES[verb])
        yield job, self._verbs[verb](job)

    # Reductions

    def _reduce_scatter(self, job: LaunchedOp) -> Any:
        request = job.launch.request
        results = []
        for index, (dtype, shape) in enumerate(request.tensors):
            kind = FusionKey(dtype, *options_of(request))
            if job.pending is None:
                array = np.full([length or 0 for length in shape], neutral_element(dtype, kind.op), NUMPY[dtype])
            else:
                array = job.pending.inputs[index]
            if kind.prescale != 1:
                array = array.copy()
                scale(array, kind.prescale)
            op, postscale = kind.as_run(self._comm.size)
            part = self._comm.reduce_scatter(array, op)
            scale(part, postscale)
            results.append(part)
        return results

    def _compressed_all_reduce(self, job: LaunchedOp) -> Any:
        request, pending = job.launch.request, job.pending
        if self.compressed.compression(request).scheme is None:
            return self.fusion.all_reduce([job])[0][1]
        if pending is None:
            self.compressed.run(request, None, ())
            return None
        self.compressed.run(request, pending.inputs, pending.outputs)
        return pending.outputs

    def _reduce_compressed(self, job: LaunchedOp) -> None:
        if job.pending is None:
            self.buckets.run(job.launch.request, None)
        else:
            self.buckets.run(job.launch.request, job.pending.inputs[0], job.pending.extra)

    # Movement

    def _all_gather(self, job: LaunchedOp) -> Any:
        return [self._comm.all_gather_v(array) for array in job.inputs()]

    def _broadcast(self, job: LaunchedOp) -> Any:
        root = root_of(job.launch.request, self._members)
        for array in job.inputs():
            if array.size:
                self._comm.broadcast(array, root)
        return None if job.pending is None else job.pending.outputs

    def _all_to_all(self, job: LaunchedOp) -> Any:
        (array,) = job.inputs()
        splits = [0] * self._comm.size if job.pending is None else job.pending.extra
        return self._comm.all_to_all_v(array, splits)

    def _broadcast_object(self, job: LaunchedOp) -> Any:
        return self._comm.broadcast_object(
            None if job.pending is None else job.pending.extra, root_of(job.launch.request, self._members)
        )

    def _all_gather_object(self, job: LaunchedOp) -> Any:
        return self._comm.all_gather_object(None if job.pending is None else job.pending.extra)

    def _split(self, job: LaunchedOp) -> Any:
        if job.pending is None or job.launch.joined:
            raise UsageError(
                f"{job.launch.request}: groups cannot be made while a rank has joined, because it does not take part"
            )
        return job.pending.extra(self._comm)

    def _memory(self, job: LaunchedOp) -> Any:
        """Allocate memory that all ranks of a node share; None if a rank has joined and takes no part."""
        if job.pending is None or job.launch.joined:
            return None
        return job.pending.extra(self._comm)
