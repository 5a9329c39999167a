"""BetweenDevices: run agreed all-reduces where their arrays are, by the group's own verb for arrays of a device.

    asked for: an event of the caller's stream | agreed: all are queued, on a stream of their own | the host waits

Other operations, and those that a rank takes part in which has joined, go through the host: see `Staging`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from commlib.coordinator.job import Job
from commlib.coordinator.kind import options_of
from commlib.coordinator.on_device import OnDevice
from commlib.devices.protocol import Device, Event, Stream
from commlib.devices.waiting import wait_for

# Between nodes each collective costs latencies: what is smaller is fused on the host.
_ALONE_BETWEEN_NODES = 1 << 20


class BetweenDevices:
    """Runs all-reduces of `comm` on its ranks' devices. Both copies and sums have happened when one has ended."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._least = 0 if comm.one_node else _ALONE_BETWEEN_NODES
        self._streams: dict[Device, Stream] = {}

    def takes(self, job: Job) -> bool:
        """Tell whether an operation goes this way; all ranks say the same of it."""
        request, pending = job.launch.request, job.pending
        if request.verb != "allreduce" or pending is None or job.launch.joined:
            return False
        op, *scales = options_of(request)
        if op == "adasum" or scales != [1.0, 1.0]:
            return False
        return all(type(x) is OnDevice and x.nbytes >= self._least for x in pending.inputs)

    def all_reduce(self, jobs: Sequence[Job]) -> Iterable[tuple[Job, Any]]:
        """Run operations, and yield each with its value. All ranks give the same ones, in the same order."""
        ends = [self._queue(job) for job in jobs]
        for job, end in zip(jobs, ends, strict=True):
            assert job.pending is not None, "`takes` has seen it"
            if end is not None:
                wait_for(end, self._comm.watch(str(job.launch.request)))
            yield job, [x.given for x in job.pending.outputs]

    def _queue(self, job: Job) -> Event | None:
        """Queue one; return the event behind it, None if there is nothing to do."""
        assert job.pending is not None, "`takes` has seen it"
        op = options_of(job.launch.request)[0]
        pairs = [pair for pair in zip(job.pending.inputs, job.pending.outputs, strict=True) if pair[0].nbytes]
        if not pairs:
            return None
        device: Device = pairs[0][0].array.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = device.stream()
        with device.using(stream):
            for source, target in pairs:
                for event in (*source.ready, *target.ready):
                    stream.wait(event)
                self._comm.all_reduce(source.array, op, out=target.array)
            return stream.record()
