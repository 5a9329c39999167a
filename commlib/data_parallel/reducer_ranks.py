"""ReducerRanks: the ranks of a GradientReducer, which launch their reductions in one order.

`OrderedRanks` launches on a communicator: every rank launches the same buckets in the same order, without negotiation.
`commlib.named_gradients.named_buckets.ProcessSetRanks` launches operations by name: ranks may launch in any order, and
may have joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from commlib.compress import Scheme
from commlib.compress.gradients import GradientCompression
from commlib.data_parallel.bucket_reducer import BucketPlan, BucketRanks
from commlib.data_parallel.buckets import Bucket
from commlib.devices.arrays import device_named
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.overlap import cores_per_rank, overlap_pays


class BucketCompression(Protocol):
    """Interface that compresses buckets as `commlib.compress.GradientCompression` does, and keeps their residuals."""

    scheme: Scheme | None
    why: str

    def reduction(self, key: str, array: Any, parts: Any, flags: int, op: str) -> Any: ...

    def move(self) -> None: ...

    def end_step(self) -> None: ...

    def rollback(self) -> None: ...

    def commit(self) -> None: ...

    def drop_common(self) -> None: ...

    def state(self) -> dict[str, dict[str, Any]]: ...

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None: ...


class ReducerRanks(Protocol):
    """The ranks of a GradientReducer. Gathered lists may lack ranks that have joined."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def is_hierarchical(self) -> bool: ...

    @property
    def needs_all_ranks(self) -> bool:
        """Whether a rank without data must take part in each reduction by `GradientReducer.contribute_nothing`."""
        ...

    @property
    def together(self) -> bool:
        """Whether all reductions are launched before any is waited for."""
        ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def take_turn(self) -> None:
        """Announce which reducer reduces next, before its first collective. Collective if it communicates."""
        ...

    def overlap_pays(self, threads: int) -> bool:
        """Return whether to launch buckets while `threads` train. Collective on the first call."""
        ...

    def along(self, axis: str) -> BucketRanks:
        """Return the communicator over which buckets of this axis are reduced."""
        ...

    def plan(self, bucket: Bucket, array: Any) -> BucketPlan:
        """Return the plan that reduces a bucket in its array."""
        ...

    def gather_rows(self, arrays: Sequence[Any]) -> list[Any]:
        """Return each array of all ranks, concatenated along dimension 0. Their lengths may differ."""
        ...

    def reduce_by_name(self, arrays: Sequence[Array], name: str, *, op: str, predivide: float) -> None:
        """Reduce arrays in place, by name. Ranks that have joined take part without knowing the arrays."""
        ...

    def compression(
        self, scheme: Scheme | None, *, within_node: bool, count: int, device: str = "cpu"
    ) -> BucketCompression:
        """Return the compression for buckets of about `count` elements on a device. Collective."""
        ...


class OrderedRanks:
    """Launches reductions in one order on a communicator `comm`; `axes` maps other axes to communicators by name."""

    needs_all_ranks = True
    together = False

    def __init__(
        self, comm: Any, axes: Mapping[str, Any] | None = None, *, reduce_by_name: Callable[..., None] | None = None
    ) -> None:
        self.comm, self._axes = comm, {"": comm, **(axes or {})}
        self.rank, self.size = comm.rank, comm.size
        self._by_name = reduce_by_name
        self.turn: Callable[[], object] | None = None
        """Announces which reducer reduces next, if several use this communicator."""
        self.all_gather_object: Callable[[Any], list[Any]] = comm.all_gather_object

    def take_turn(self) -> None:
        """Announce which of several reducers reduces next."""
        if self.turn is not None:
            self.turn()

    @property
    def is_hierarchical(self) -> bool:
        """Whether several nodes have several ranks each."""
        return bool(self.comm.is_hierarchical)

    def overlap_pays(self, threads: int) -> bool:
        """Return whether to launch buckets while `threads` train. Collective on the first call."""
        return self.size > 1 and overlap_pays(self.comm, threads=threads, cores=cores_per_rank(self.comm))

    def along(self, axis: str) -> Any:
        """Return the communicator of an axis."""
        return self._axes[axis]

    def plan(self, bucket: Bucket, array: Any) -> BucketPlan:
        """Return the plan of an all-reduce of a bucket in its array."""
        plan: BucketPlan = self._axes[bucket.axis].plan_all_reduce(array, bucket.reduction, out=array)
        return plan

    def gather_rows(self, arrays: Sequence[Any]) -> list[Any]:
        """Return each array of all ranks, concatenated along dimension 0. Collective."""
        return [self.comm.all_gather_v(array) for array in arrays]

    def reduce_by_name(self, arrays: Sequence[Array], name: str, *, op: str, predivide: float) -> None:
        """Reduce arrays in place, by name. Raises UsageError if this object has only a communicator."""
        if self._by_name is not None:
            return self._by_name(arrays, name, op=op, predivide=predivide)
        raise UsageError("a user-defined compressor reduces by name: pass process_set= instead of ranks=")

    def compression(
        self, scheme: Scheme | None, *, within_node: bool, count: int, device: str = "cpu"
    ) -> GradientCompression:
        """Return the compression for buckets of about `count` elements on a device. Collective."""
        there = device_named(device, "compression")
        return GradientCompression(self.comm, scheme, within_node=within_node, count=count, device=there)
