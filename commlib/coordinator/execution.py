"""Execution: run agreed operations as collectives of one group, in the same order on all ranks.

A rank that has joined gets no pending operation, and does its part with nothing: the neutral element in a reduction, no
rows in a gather or an exchange. What it receives is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from commlib.coordinator.between_devices import BetweenDevices
from commlib.coordinator.compressed_buckets import MAKE, REDUCE, CompressedBuckets
from commlib.coordinator.compressed_reductions import VERB as COMPRESSED
from commlib.coordinator.compressed_reductions import CompressedReductions
from commlib.coordinator.fusion import Fusion
from commlib.coordinator.job import Job
from commlib.coordinator.kind import Kind, options_of, root_of
from commlib.coordinator.on_device import Staging
from commlib.coordinator.records import ACTIVITIES
from commlib.coordinator.scaling import neutral, scale
from commlib.dtypes import NUMPY
from commlib.errors import UsageError

_Done = Callable[[Job, Any, BaseException | None], None]
_Run = Callable[[Sequence[Job]], Iterable[tuple[Job, Any]]]


class Execution:
    """Runs agreed operations on `comm`; `members` are the names of its ranks. fusion_bytes: see `Fusion`."""

    def __init__(self, comm: Any, members: Sequence[int], fusion_bytes: int) -> None:
        self._comm, self._members = comm, tuple(members)
        self.fusion = Fusion(comm, fusion_bytes)
        self.staging: Staging | None = None  # made when an array of a device comes
        self._between_devices = BetweenDevices(comm, self._members)
        self.compressed = CompressedReductions(comm)
        self.buckets = CompressedBuckets(comm)
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
            "memory": self._memory,
            MAKE: lambda job: self.buckets.make(job.launch.request),
            REDUCE: self._reduce_compressed,
        }

    def run(self, jobs: Sequence[Job], done: _Done) -> None:
        """Run operations, telling how each has ended. Raises nothing that belongs to one of them alone.

        What it raises has left this rank out of step with the others.
        """
        if self.staging is not None:
            stays = [self._between_devices.takes(job) for job in jobs]
            there = [job for job, is_there in zip(jobs, stays, strict=True) if is_there]
            self._run_all(there, done, self._between_devices.run, self._between_devices.run)
            others = [job for job, is_there in zip(jobs, stays, strict=True) if not is_there]
            jobs, done = self.staging.bring(others, done)
        self._run_all(jobs, done, self.fusion.all_reduce, self._run_one)

    def _run_all(self, jobs: Sequence[Job], done: _Done, all_reduce: _Run, one: _Run) -> None:
        """Run all-reduces together, then the others one by one."""
        self._guarded([job for job in jobs if job.launch.request.verb == "allreduce"], done, all_reduce)
        for job in jobs:
            if job.launch.request.verb != "allreduce":
                self._guarded([job], done, one)

    def _guarded(self, jobs: Sequence[Job], done: _Done, run: _Run) -> None:
        ended = 0
        try:
            for job, value in run(jobs):  # in order
                ended += 1
                done(job, value, None)
        except UsageError as error:  # refused before anything was sent, on all ranks alike
            for job in jobs[ended:]:
                done(job, None, error)

    def _run_one(self, jobs: Sequence[Job]) -> Iterable[tuple[Job, Any]]:
        (job,) = jobs
        verb, record = job.launch.request.verb, None if job.pending is None else job.pending.record
        if record is not None and verb in ACTIVITIES:
            record.round(ACTIVITIES[verb])
        yield job, self._verbs[verb](job)

    # Reductions

    def _reduce_scatter(self, job: Job) -> Any:
        request = job.launch.request
        results = []
        for index, (dtype, shape) in enumerate(request.tensors):
            kind = Kind(dtype, *options_of(request))
            if job.pending is None:
                array = np.full([length or 0 for length in shape], neutral(dtype, kind.op), NUMPY[dtype])
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

    def _compressed_all_reduce(self, job: Job) -> Any:
        request, pending = job.launch.request, job.pending
        if self.compressed.compression(request).scheme is None:
            return self.fusion.all_reduce([job])[0][1]
        if pending is None:
            self.compressed.run(request, None, ())
            return None
        self.compressed.run(request, pending.inputs, pending.outputs)
        return pending.outputs

    def _reduce_compressed(self, job: Job) -> None:
        if job.pending is None:
            self.buckets.run(job.launch.request, None)
        else:
            self.buckets.run(job.launch.request, job.pending.inputs[0], job.pending.extra)

    # Movement

    def _all_gather(self, job: Job) -> Any:
        return [self._comm.all_gather_v(array) for array in job.inputs()]

    def _broadcast(self, job: Job) -> Any:
        root = root_of(job.launch.request, self._members)
        for array in job.inputs():
            if array.size:
                self._comm.broadcast(array, root)
        return None if job.pending is None else job.pending.outputs

    def _all_to_all(self, job: Job) -> Any:
        (array,) = job.inputs()
        splits = [0] * self._comm.size if job.pending is None else job.pending.extra
        return self._comm.all_to_all_v(array, splits)

    def _broadcast_object(self, job: Job) -> Any:
        return self._comm.broadcast_object(
            None if job.pending is None else job.pending.extra, root_of(job.launch.request, self._members)
        )

    def _all_gather_object(self, job: Job) -> Any:
        return self._comm.all_gather_object(None if job.pending is None else job.pending.extra)

    def _split(self, job: Job) -> Any:
        if job.pending is None or job.launch.joined:
            raise UsageError(f"{job.launch.request}: not while a rank has joined: it takes no part in making groups")
        return job.pending.extra(self._comm)

    def _memory(self, job: Job) -> Any:
        """Make memory that all ranks of a node share; None where a rank has joined and takes no part."""
        if job.pending is None or job.launch.joined:
            return None
        return job.pending.extra(self._comm)
