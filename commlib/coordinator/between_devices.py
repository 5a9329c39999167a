"""BetweenDevices: run agreed operations where their arrays are, by the group's own verbs for arrays of a device.

    asked for: an event of the caller's stream | agreed: all are queued, on a stream of their own | the host waits

Those that scale, Adasum, those that a rank takes part in which has joined, and small all-reduces between nodes, which
are fused there, go through the host: see `Staging`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from commlib.collectives.operands import made_like
from commlib.coordinator.job import Job
from commlib.coordinator.kind import options_of, root_of
from commlib.coordinator.on_device import OnDevice
from commlib.coordinator.request import Request
from commlib.devices.protocol import Device, Event, Stream
from commlib.devices.waiting import wait_for
from commlib.schedule.layout import even

# Between nodes each collective costs latencies: what is smaller is fused on the host.
_ALONE_BETWEEN_NODES = 1 << 20


class BetweenDevices:
    """Runs operations of `comm`, whose ranks are `members`, on their devices. All has happened when one has ended."""

    def __init__(self, comm: Any, members: Sequence[int]) -> None:
        self._comm, self._members = comm, members
        self._least = 0 if comm.one_node else _ALONE_BETWEEN_NODES
        self._streams: dict[Device, Stream] = {}
        self._verbs: dict[str, Callable[[Request, Sequence[OnDevice], Sequence[OnDevice], Any], Any]] = {
            "allreduce": self._all_reduce,
            "allgather": self._all_gather,
            "broadcast": self._broadcast,
            "alltoall": self._all_to_all,
            "reducescatter": self._reduce_scatter,
        }

    def takes(self, job: Job) -> bool:
        """Tell whether an operation goes this way; all ranks say the same of it."""
        request, pending = job.launch.request, job.pending
        if request.verb not in self._verbs or pending is None or job.launch.joined:
            return False
        op, *scales = options_of(request)
        if op == "adasum" or scales != [1.0, 1.0]:
            return False
        least = self._least if request.verb == "allreduce" else 0  # others are not fused
        return all(type(x) is OnDevice and x.nbytes >= least for x in pending.inputs)

    def run(self, jobs: Sequence[Job]) -> Iterable[tuple[Job, Any]]:
        """Run operations, and yield each with its value. All ranks give the same ones, in the same order."""
        ends = [self._queue(job) for job in jobs]
        for job, (value, end) in zip(jobs, ends, strict=True):
            wait_for(end, self._comm.watch(str(job.launch.request)))
            yield job, value

    def _queue(self, job: Job) -> tuple[Any, Event]:
        """Queue one; return its value and the event behind it."""
        request, pending = job.launch.request, job.pending
        assert pending is not None, "`takes` has seen it"
        device: Device = pending.inputs[0].array.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = device.stream()
        with device.using(stream):
            for x in dict.fromkeys((*pending.inputs, *pending.outputs)):  # in place they are the same
                for event in x.ready:
                    stream.wait(event)
            value = self._verbs[request.verb](request, pending.inputs, pending.outputs, pending.extra)
            return value, stream.record()

    # Each takes the request, its arrays, where results go and what else a rank has for it. New arrays are memory of the
    # caller's stream.

    def _all_reduce(self, request: Request, inputs: Sequence[OnDevice], outputs: Sequence[OnDevice], _: Any) -> Any:
        op = options_of(request)[0]
        for source, target in zip(inputs, outputs, strict=True):
            if source.nbytes:
                self._comm.all_reduce(source.array, op, out=target.array)
        return [x.given for x in outputs]

    def _broadcast(self, request: Request, inputs: Sequence[OnDevice], outputs: Sequence[OnDevice], _: Any) -> Any:
        root = root_of(request, self._members)
        for x in inputs:
            if x.nbytes:
                self._comm.broadcast(x.array, root)
        return [x.given for x in outputs]

    def _all_gather(self, request: Request, inputs: Sequence[OnDevice], *_: Any) -> Any:
        return [self._comm.all_gather_v(x.array) for x in inputs]

    def _all_to_all(self, request: Request, inputs: Sequence[OnDevice], outputs: Any, splits: Sequence[int]) -> Any:
        return self._comm.all_to_all_v(inputs[0].array, splits)

    def _reduce_scatter(self, request: Request, inputs: Sequence[OnDevice], *_: Any) -> Any:
        return [self._part(x, options_of(request)[0]) for x in inputs]

    def _part(self, x: OnDevice, op: str) -> Any:
        rows = even(x.shape[0], self._comm.size).counts[self._comm.rank]
        target, given = made_like(x.array, (rows, *x.shape[1:]))
        self._comm.reduce_scatter(x.array, op, out=target)
        return given
