"""Records: write down what becomes of named operations, while there is a recorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commlib.coordinator.job import Job
from commlib.coordinator.pending import Pending
from commlib.coordinator.request import Request
from commlib.observe.recorder import Record
from commlib.runtime.recording import Recording

ACTIVITIES = {
    "allreduce": "MPI_ALLREDUCE",
    "allgather": "MPI_ALLGATHER",
    "broadcast": "MPI_BCAST",
    "alltoall": "MPI_ALLTOALL",
    "reducescatter": "MPI_REDUCESCATTER",
}
"""How Horovod calls, in a timeline, what an operation does once its turn has come, by its verb."""


class Records:
    """Write the records of one group, `name`."""

    def __init__(self, recording: Recording, name: str) -> None:
        self._recording, self._name = recording, name
        self._launched = 0  # operations so far, on all ranks alike

    def queue(self, pending: Pending) -> None:
        """Write that an operation was asked for."""
        if (record := self._record(pending.request, pending.inputs)) is not None:
            pending.record = record
            record.queue()

    def mark_cycle(self) -> None:
        """Write that a cycle begins, for readers that want to know this too."""
        recorder = self._recording.recorder
        if recorder is not None and recorder.marks_cycles:
            recorder.mark("CYCLE_START", self._name)

    def run(self, jobs: Sequence[Job]) -> dict[str, Record]:
        """Count operations, and write that they run; return the records by their names."""
        first = self._launched + 1
        self._launched += len(jobs)
        records: dict[str, Record] = {}
        if self._recording.recorder is None:
            return records
        for number, job in enumerate(jobs, first):
            request = job.launch.request
            record = self._record(request) if job.pending is None else job.pending.record
            if record is not None:
                record.sequence = number
                record.run()
                records[request.name] = record
        return records

    def _record(self, request: Request, inputs: Sequence[Any] = ()) -> Record | None:
        recorder = self._recording.recorder
        if recorder is None:
            return None
        nbytes = sum(getattr(array, "nbytes", 0) for array in inputs)
        return Record(recorder, request.verb, self._name, (request.name,), nbytes=nbytes, name=request.name)
