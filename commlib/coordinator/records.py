"""Records: record the progress of named operations, while there is a recorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.coordinator.launched_op import LaunchedOp
from commlib.coordinator.op_request import OpRequest
from commlib.coordinator.pending_op import PendingOp
from commlib.observe.recorder import Record
from commlib.runtime.recording import Recording

ACTIVITIES = {
    "allreduce": "MPI_ALLREDUCE",
    "allgather": "MPI_ALLGATHER",
    "broadcast": "MPI_BCAST",
    "alltoall": "MPI_ALLTOALL",
    "reducescatter": "MPI_REDUCESCATTER",
}
"""Horovod's timeline names for the execution of an operation, by verb."""


class Records:
    """Writes the records of one group, `name`."""

    def __init__(self, recording: Recording, name: str) -> None:
        self.recording, self._name = recording, name
        self._launched = 0  # number of operations, the same on all ranks

    def queue(self, pending: PendingOp) -> None:
        """Record that an operation was submitted."""
        if (record := self._record(pending.request, pending.inputs)) is not None:
            pending.record = record
            record.queue()

    def mark_cycle(self) -> None:
        """Record the beginning of a cycle, for recorders that mark cycles."""
        recorder = self.recording.recorder
        if recorder is not None and recorder.marks_cycles:
            recorder.mark("CYCLE_START", self._name)

    def run(self, jobs: Sequence[LaunchedOp]) -> dict[str, Record]:
        """Count operations, and record that they run; return their records by name."""
        first = self._launched + 1
        self._launched += len(jobs)
        records: dict[str, Record] = {}
        if self.recording.recorder is None:
            return records
        for number, job in enumerate(jobs, first):
            request = job.launch.request
            record = self._record(request) if job.pending is None else job.pending.record
            if record is not None:
                record.sequence = number
                record.run()
                records[request.name] = record
        return records

    def _record(self, request: OpRequest, inputs: Sequence[Any] = ()) -> Record | None:
        recorder = self.recording.recorder
        if recorder is None:
            return None
        nbytes = sum(getattr(array, "nbytes", 0) for array in inputs)
        return Record(recorder, request.verb, self._name, (request.name,), nbytes=nbytes, name=request.name)
