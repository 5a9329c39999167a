"""Reduce gradients by name: each bucket is a named operation, and ranks may request buckets in any order.

A joined rank participates in an operation without the bucket: with zeros, and flags that mark them as unused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from commlib.buffers.aligned_arrays import aligned_empty
from commlib.compress import Scheme, scheme_of
from commlib.compress.gradients import GradientCompression
from commlib.compress.scheme import BucketPart
from commlib.coordinator import Coordinator, PendingOp
from commlib.coordinator.compressed_buckets import make_bucket_request, make_compression_request
from commlib.coordinator.device_operands import record_ready
from commlib.coordinator.op_request import OpRequest
from commlib.data_parallel.buckets import Bucket
from commlib.devices.array import DeviceArray
from commlib.devices.host import HOST
from commlib.devices.protocol import Device
from commlib.dtypes import Array, numpy_dtype
from commlib.errors import UsageError
from commlib.group.overlap import cores_per_rank
from commlib.group.single_rank import SingleRank
from commlib.horovod.basics import local_size, size
from commlib.horovod.operations import allgather_object, start_allgather, start_allreduce
from commlib.horovod.process_sets import ProcessSet, process_set_of, require_world
from commlib.horovod.reductions import resolve_op


def reduce_by_name(process_set: ProcessSet | None) -> Callable[..., None]:
    """Return a function that reduces arrays in place over a process set, by name: see `Ranks.reduce_by_name`."""

    def reduce(arrays: Sequence[Array], name: str, *, op: str, predivide: float) -> None:
        start_allreduce(
            arrays,
            arrays,
            name,
            op=resolve_op(op),
            prescale_factor=1 / predivide,
            postscale_factor=predivide,
            process_set=process_set,
            blocking=True,
        ).wait()

    return reduce


def overlap_pays_here(threads: int) -> bool:
    """Return `commlib.group.overlap.overlap_pays`, but without a message: ranks may trace at different times."""
    return local_size() < size() or cores_per_rank(require_world()) > threads


class ProcessSetRanks:
    """The `Ranks` of a process set, whose operations have names that begin with `name`. Construction is collective.

    in_order: this rank could reduce in program order instead.
    """

    needs_all_ranks = False
    together = True

    def __init__(self, process_set: ProcessSet | None, name: str, *, in_order: bool = False) -> None:
        self._process_set = process_set_of(process_set)
        self._coordinator = self._process_set.coordinator(name)
        comm = self._coordinator.comm
        self.group = comm.group  # has the timeline, if one is written
        self.rank, self.size = comm.rank, comm.size
        self.is_hierarchical = bool(comm.is_hierarchical)
        self._memories = 0
        self._name = name
        # Earlier objects of this name have used other serial numbers, also on ranks that had joined then.
        counts = self._coordinator.serials
        serials, ordered = zip(*self.all_gather_object((counts.get(name, 0), in_order)), strict=True)
        counts[name] = serial = max(serials) + 1
        self.is_complete = len(serials) == self.size
        """Whether no rank had joined at construction."""
        self.may_be_ordered = self.is_complete and all(ordered)
        """Whether all ranks are here, and all could reduce in program order."""
        self._name = name if serial == 1 else f"{name} ({serial})"

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks that have not joined."""
        return allgather_object(obj, f"{self._name}.said", self._process_set)

    def take_turn(self) -> None:
        """Do nothing: operations are matched by name, so they need no turn."""

    def overlap_pays(self, threads: int) -> bool:
        """Return whether to launch buckets during backward, with `threads` threads training."""
        return self.size > 1 and overlap_pays_here(threads)

    def along(self, axis: str) -> Any:
        """Return this object: operations by name have one axis."""
        if axis:
            raise UsageError(f"{self._name}: axis {axis!r} needs communicators: operations by name have only one axis")
        return self

    def empty(self, shape: Any, dtype: Any = "float32", device: Device = HOST) -> Any:
        """Return symmetric memory; private memory, with the same results, if a rank has joined."""
        options = (("shape", str(shape)), ("device", device.name))
        request = OpRequest("memory", f"{self._name}.memory.{self._memories}", (), options, repeats=False)
        self._memories += 1
        make = lambda comm: comm.empty(shape, dtype, device=device)  # noqa: E731
        memory = self._coordinator.submit(request, extra=make, blocking=True).wait()
        return _private_memory(shape, dtype, device) if memory is None else memory

    def watch(self, text: str) -> Callable[[], None]:
        """Return a function to call while this rank waits for a device."""
        watch: Callable[[], None] = self._coordinator.comm.watch(text)
        return watch

    def plan(self, bucket: Bucket, array: Any) -> BucketByName:
        """Return the plan that reduces a bucket in its array."""
        return BucketByName(f"{self._name}.{bucket.index}", array, bucket.reduction, self._process_set)

    def gather_rows(self, arrays: Sequence[Any]) -> list[Any]:
        """Return each array gathered from all ranks along dimension 0, in one operation."""
        name = f"{self._name}.rows"
        gathered: list[Any] = start_allgather(arrays, name, process_set=self._process_set, blocking=True).wait()
        return gathered

    def reduce_by_name(self, arrays: Sequence[Array], name: str, *, op: str, predivide: float) -> None:
        """Reduce arrays in place, by name."""
        reduce_by_name(self._process_set)(arrays, f"{self._name}.{name}", op=op, predivide=predivide)

    def compression(self, scheme: Scheme | None, *, within_node: bool, count: int, device: str = "cpu") -> Any:
        """Return the compression of buckets. Joined ranks look the scheme up in `scheme_of`, so it must be there."""
        if scheme is not None:
            parsed = scheme_of(scheme.name)
            if type(parsed) is not type(scheme) or parsed.name != scheme.name:
                raise UsageError(f"compression {scheme.name!r} must be available by name in commlib.compress.scheme_of")
        if scheme is None:
            alone: Any = SingleRank()
            return GradientCompression(alone, None)  # compresses nothing
        request = make_compression_request(
            f"{self._name}.compressed",
            scheme.name,
            within_node=within_node,
            count=count,
            device="" if device == "cpu" else device,
        )
        return NamedCompression(
            self._coordinator, request.name, self._coordinator.submit(request, blocking=True).wait()
        )


def _private_memory(shape: Any, dtype: Any, device: Device) -> Any:
    """Return zeroed private memory."""
    if device is HOST:
        memory = aligned_empty(shape, dtype)
        memory[...] = 0
        return memory
    there = device.empty(shape, numpy_dtype(dtype))
    device.kernels.fill(device.wrap(there, "a bucket"), 0)
    return there


class BucketByName:
    """A plan that all-reduces an array in place, by name."""

    def __init__(self, name: str, array: Array, op: str, process_set: ProcessSet) -> None:
        self._name, self._arrays, self._op, self._process_set = name, [array], resolve_op(op), process_set

    def start(self, awaited: bool = False) -> PendingOp:
        """Request the reduction. `awaited`: this thread waits for it immediately."""
        arrays = self._arrays
        return start_allreduce(arrays, arrays, self._name, op=self._op, process_set=self._process_set, blocking=awaited)

    def __call__(self) -> Any:
        """Request the reduction and wait for it."""
        return self.start(True).wait()


class NamedCompression:
    """A `GradientCompression` whose buckets are reduced by name."""

    def __init__(self, coordinator: Coordinator, family: str, compression: GradientCompression) -> None:
        self._coordinator, self._family, self._compression = coordinator, family, compression
        self._moves = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compression, name)

    def move(self) -> None:
        """Forget the buckets: see `GradientCompression.move`."""
        self._moves += 1
        self._compression.move()

    def reduction(
        self, key: str, array: Any, parts: Sequence[BucketPart], flags: int, op: str
    ) -> CompressedNamedBucket:
        """Return the reduction of a bucket. It is set up when it first runs."""
        request = make_bucket_request(self._family, self._moves, key, len(array), list(parts), flags, op)
        return CompressedNamedBucket(self._coordinator, request, array)


class CompressedNamedBucket:
    """A plan that reduces a bucket with compression, by name."""

    def __init__(self, coordinator: Coordinator, request: OpRequest, array: Any) -> None:
        self._coordinator, self._request, self._array = coordinator, request, array

    def use(self, array: Any) -> None:
        """Reduce in another array of the same length in future calls."""
        self._array = array

    def start(self, awaited: bool = False) -> PendingOp:
        """Request the reduction. `awaited`: this thread waits for it immediately."""
        array = self._array
        ready = record_ready(array) if isinstance(array, DeviceArray) else ()
        return self._coordinator.submit(self._request, [array], [array], ready, blocking=awaited)

    def __call__(self) -> Any:
        """Request the reduction and wait for it."""
        return self.start(True).wait()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent across the slow link in the last reduction."""
        reduction = self._coordinator.buckets.reduction(self._request.name)
        return 0 if reduction is None else reduction.sent_bytes

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes that float32 would have taken."""
        reduction = self._coordinator.buckets.reduction(self._request.name)
        return 0 if reduction is None else reduction.uncompressed_bytes
