"""CompressedBuckets: reduce buckets of compressed gradients by name.

A bucket's request describes its parts, so a rank that has joined can take part. A rank that returns continues with its
saved residuals.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from commlib.compress import scheme_of
from commlib.compress.bucket import CompressedBucket
from commlib.compress.gradients import GradientCompression
from commlib.compress.scheme import BucketPart
from commlib.coordinator.op_request import OpRequest
from commlib.devices.arrays import device_named
from commlib.devices.host import HOST
from commlib.devices.protocol import Device, DeviceEvent, Stream
from commlib.devices.waiting import wait_for

MAKE, REDUCE = "compression", "compressed_bucket"
"""The verbs: make the compression of a set of buckets, and reduce one bucket."""


def make_compression_request(family: str, scheme: str, *, within_node: bool, count: int, device: str) -> OpRequest:
    """Return the request for the compression of the buckets of a `family`: see `GradientCompression`.

    device: the device type of the buckets, "" for the host.
    """
    options = (("scheme", scheme), ("within_node", int(within_node)), ("count", count), ("device", device))
    return OpRequest(MAKE, family, (), options, repeats=False)


def make_bucket_request(
    family: str, moves: int, key: str, count: int, parts: list[BucketPart], flags: int, op: str
) -> OpRequest:
    """Return the request for one bucket of a family whose buckets were rebuilt `moves` times."""
    described = json.dumps([(part.name, part.start, part.shape) for part in parts])
    options = (("family", family), ("moves", moves), ("key", key), ("parts", described), ("flags", flags), ("op", op))
    return OpRequest(REDUCE, f"{family}.{key}", (("float32", (count,)),), options)


class CompressedBuckets:
    """Compressed buckets of one process set. Ranks call `make` and `run` for the same requests in the same order."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._families: dict[str, tuple[GradientCompression, Device]] = {}
        self._streams: dict[Device, Stream] = {}
        self._moves: dict[str, int] = {}
        self._made: dict[str, tuple[OpRequest, CompressedBucket]] = {}

    def make(self, request: OpRequest) -> GradientCompression:
        """Return the compression of a family's buckets. Collective."""
        device = device_named(str(request.option("device")), str(request))
        compression = GradientCompression(
            self._comm,
            scheme_of(str(request.option("scheme"))),
            within_node=bool(request.option("within_node")),
            count=int(request.option("count")),
            device=device,
        )
        self._families[request.name] = compression, device
        return compression

    def reduction(self, name: str) -> CompressedBucket | None:
        """Return the reduction of a bucket; None before the bucket was first reduced."""
        entry = self._made.get(name)
        return None if entry is None else entry[1]

    def run(self, request: OpRequest, array: Any, ready: Sequence[DeviceEvent] = ()) -> None:
        """Reduce a bucket in its array. A rank that has joined passes None and adds zeros. Collective.

        ready: the events that a device array waits for. The work is complete when this returns.
        """
        compression, device = self._families[str(request.option("family"))]
        if device is HOST:
            self._run(request, array, compression, device)
            return
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = device.stream()
        with device.using(stream):
            for event in ready:
                stream.wait(event)
            self._run(request, array, compression, device)
            wait_for(stream.record(), self._comm.watch(str(request)))

    def _run(self, request: OpRequest, array: Any, compression: GradientCompression, device: Device) -> None:
        family, moves = str(request.option("family")), int(request.option("moves"))
        if array is None and moves != self._moves.get(family, moves):
            compression.move()  # the other ranks have done so, while this rank had joined
        self._moves[family] = moves
        mine = _zeros(device, request.tensors[0][1][0] or 0) if array is None else array
        known = self._made.get(request.name)
        if known is None or known[0] != request:
            parts = [
                BucketPart(name, start, tuple(shape)) for name, start, shape in json.loads(str(request.option("parts")))
            ]
            key, flags, op = str(request.option("key")), int(request.option("flags")), str(request.option("op"))
            known = self._made[request.name] = request, compression.reduction(key, mine, parts, flags, op)
        reduction = known[1]
        reduction.use(mine)
        reduction()
        if array is None:
            reduction.end_step()


def _zeros(device: Device, count: int) -> Any:
    if device is HOST:
        return np.zeros(count, np.float32)
    zeros = device.wrap(device.empty((count,), np.float32), "a bucket")
    device.kernels.fill(zeros, 0)
    return zeros
