"""DeviceExecution: run agreed operations on devices, by the group's collectives for device arrays.

    submitted: an event of the caller's stream | agreed: all are queued on a separate stream | the host waits

Some operations go through the host, see `Staging`: those with scale factors, Adasum, operations after a rank has
joined, and small all-reduces between nodes, which are fused on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from commlib.collectives.operands import allocate_like
from commlib.coordinator.device_operands import DeviceOperand
from commlib.coordinator.fusion import options_of, root_of
from commlib.coordinator.launched_op import LaunchedOp
from commlib.coordinator.op_request import OpRequest
from commlib.devices.protocol import Device, DeviceEvent, Stream
from commlib.devices.waiting import wait_for
from commlib.literals import Op
from commlib.schedule.layout import even

# Between nodes each collective costs latency, so smaller arrays are fused on the host.
_ALONE_BETWEEN_NODES = 1 << 20


class DeviceExecution:
    """Runs operations of `comm` on devices. `members` lists the names of its ranks. Yielded operations are complete."""

    def __init__(self, comm: Any, members: Sequence[int]) -> None:
        self._comm, self._members = comm, members
        self._least = 0 if comm.one_node else _ALONE_BETWEEN_NODES
        self._streams: dict[Device, Stream] = {}
        self._verbs: dict[str, Callable[[OpRequest, Sequence[DeviceOperand], Sequence[DeviceOperand], Any], Any]] = {
            "allreduce": self._all_reduce,
            "allgather": self._all_gather,
            "broadcast": self._broadcast,
            "alltoall": self._all_to_all,
            "reducescatter": self._reduce_scatter,
        }

    def takes(self, job: LaunchedOp) -> bool:
        """Return whether this path takes an operation; the same on all ranks."""
        request, pending = job.launch.request, job.pending
        if request.verb not in self._verbs or pending is None or job.launch.joined:
            return False
        op, *scales = options_of(request)
        if op == "adasum" or scales != [1.0, 1.0]:
            return False
        least = self._least if request.verb == "allreduce" else 0  # other operations are not fused
        return all(type(x) is DeviceOperand and x.nbytes >= least for x in pending.inputs)

    def run(self, jobs: Sequence[LaunchedOp]) -> Iterable[tuple[LaunchedOp, Any]]:
        """Run operations, and yield each with its value. All ranks pass the same operations in the same order."""
        ends = [self._queue(job) for job in jobs]
        for job, (value, end) in zip(jobs, ends, strict=True):
            wait_for(end, self._comm.watch(str(job.launch.request)))
            yield job, value

    def _queue(self, job: LaunchedOp) -> tuple[Any, DeviceEvent]:
        """Queue one operation; return its value and the event behind it."""
        request, pending = job.launch.request, job.pending
        assert pending is not None, "`takes` accepts pending operations only"
        device: Device = pending.inputs[0].array.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = device.stream()
        with device.using(stream):
            for x in dict.fromkeys((*pending.inputs, *pending.outputs)):  # in-place operations list it twice
                for event in x.ready:
                    stream.wait(event)
            value = self._verbs[request.verb](request, pending.inputs, pending.outputs, pending.extra)
            return value, stream.record()

    # Each takes the request, the inputs, the outputs and this rank's extra argument. New arrays are allocated on the
    # caller's stream.

    def _all_reduce(
        self, request: OpRequest, inputs: Sequence[DeviceOperand], outputs: Sequence[DeviceOperand], _: Any
    ) -> Any:
        op = options_of(request)[0]
        for source, target in zip(inputs, outputs, strict=True):
            if source.nbytes:
                self._comm.all_reduce(source.array, op, out=target.array)
        return [x.user_array for x in outputs]

    def _broadcast(
        self, request: OpRequest, inputs: Sequence[DeviceOperand], outputs: Sequence[DeviceOperand], _: Any
    ) -> Any:
        root = root_of(request, self._members)
        for x in inputs:
            if x.nbytes:
                self._comm.broadcast(x.array, root)
        return [x.user_array for x in outputs]

    def _all_gather(self, request: OpRequest, inputs: Sequence[DeviceOperand], *_: Any) -> Any:
        return [self._comm.all_gather_v(x.array) for x in inputs]

    def _all_to_all(
        self, request: OpRequest, inputs: Sequence[DeviceOperand], outputs: Any, splits: Sequence[int]
    ) -> Any:
        return self._comm.all_to_all_v(inputs[0].array, splits)

    def _reduce_scatter(self, request: OpRequest, inputs: Sequence[DeviceOperand], *_: Any) -> Any:
        return [self._part(x, options_of(request)[0]) for x in inputs]

    def _part(self, x: DeviceOperand, op: Op) -> Any:
        rows = even(x.shape[0], self._comm.size).counts[self._comm.rank]
        target, given = allocate_like(x.array, (rows, *x.shape[1:]))
        self._comm.reduce_scatter(x.array, op, out=target)
        return given
