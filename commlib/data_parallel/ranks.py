"""Ranks: reduce gradients together, and launch their reductions in one order.

`InOrder` launches on a communicator: every rank launches the same buckets in the same order, so nothing is agreed on.
`commlib.named_gradients.by_name.ByName` launches operations by name: ranks may launch in any order and may have
joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from commlib.compress import GradientCompression, Scheme
from commlib.data_parallel.buckets import Bucket
from commlib.data_parallel.engine import Plan, Reducer
from commlib.devices.arrays import device_named
from commlib.dtypes import Array
from commlib.errors import UsageError
from commlib.group.overlap import cores_per_rank, overlap_pays


class Compression(Protocol):
    """Compress buckets as `commlib.compress.GradientCompression` does, and remember what is left of them."""

    scheme: Scheme | None
    why: str

    def reduction(self, key: str, array: Any, parts: Any, flags: int, op: str) -> Any: ...

    def move(self) -> None: ...

    def end_step(self) -> None: ...

    def rollback(self) -> None: ...

    def commit(self) -> None: ...

    def forget_common(self) -> None: ...

    def state(self) -> dict[str, dict[str, Any]]: ...

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None: ...


class Ranks(Protocol):
    """The ranks of a GradientReducer. What it gathers may lack ranks that have joined."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def is_hierarchical(self) -> bool: ...

    @property
    def stands_in(self) -> bool:
        """A rank without data has to take part in each reduction by `GradientReducer.contribute_nothing`."""
        ...

    @property
    def together(self) -> bool:
        """Reductions are all launched before any is waited for."""
        ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def take_turn(self) -> None:
        """Say which of several reducers reduces next, before anything else of a reduction. Collective where it is."""
        ...

    def overlap_pays(self, threads: int) -> bool:
        """Tell whether buckets should be launched while `threads` train. Collective when first called."""
        ...

    def along(self, axis: str) -> Reducer:
        """Return those over which buckets of this axis are reduced."""
        ...

    def plan(self, bucket: Bucket, array: Any) -> Plan:
        """Return what reduces a bucket in its array."""
        ...

    def gather_rows(self, arrays: Sequence[Any]) -> list[Any]:
        """Return each array of all ranks, one after another along dimension 0, whose lengths may differ."""
        ...

    def reduce_by_name(self, arrays: Sequence[Array], name: str, *, op: str, predivide: float) -> None:
        """Reduce arrays in place, by name: ranks that have joined take part without knowing of them."""
        ...

    def compression(self, scheme: Scheme | None, *, within_node: bool, count: int, device: str = "cpu") -> Compression:
        """Return how buckets of about `count` elements on a device are compressed. Collective."""
        ...


class InOrder:
    """Launch reductions in one order, on a communicator `comm`; other axes are in `axes`, by name."""

    stands_in = True
    together = False

    def __init__(
        self, comm: Any, axes: Mapping[str, Any] | None = None, *, reduce_by_name: Callable[..., None] | None = None
    ) -> None:
        self.comm, self._axes = comm, {"": comm, **(axes or {})}
        self.rank, self.size = comm.rank, comm.size
        self._by_name = reduce_by_name
        self.turn: Callable[[], object] | None = None
        """Says which reducer it is that reduces next, where several do on this communicator."""
        self.all_gather_object: Callable[[Any], list[Any]] = comm.all_gather_object

    def take_turn(self) -> None:
        """Say which of several reducers reduces next."""
        if self.turn is not None:
            self.turn()

    @property
    def is_hierarchical(self) -> bool:
        """Several nodes have several ranks each."""
        return bool(self.comm.is_hierarchical)

    def overlap_pays(self, threads: int) -> bool:
        """Tell whether buckets should be launched while `threads` train. Collective when first called."""
        return self.size > 1 and overlap_pays(self.comm, threads=threads, cores=cores_per_rank(self.comm))

    def along(self, axis: str) -> Any:
        """Return the communicator of an axis."""
        return self._axes[axis]

    def plan(self, bucket: Bucket, array: Any) -> Plan:
        """Return an all-reduce of a bucket in its array."""
        plan: Plan = self._axes[bucket.axis].plan_all_reduce(array, bucket.reduction, out=array)
        return plan

    def gather_rows(self, arrays: Sequence[Any]) -> list[Any]:
        """Return each array of all ranks, one after another along dimension 0. Collective."""
        return [self.comm.all_gather_v(array) for array in arrays]

    def reduce_by_name(self, arrays: Sequence[Array], name: str, *, op: str, predivide: float) -> None:
        """Reduce arrays in place, by name. Raises UsageError where there is only a communicator."""
        if self._by_name is not None:
            return self._by_name(arrays, name, op=op, predivide=predivide)
        raise UsageError("a compressor of your own needs process_set= instead of comm=: it reduces by name")

    def compression(
        self, scheme: Scheme | None, *, within_node: bool, count: int, device: str = "cpu"
    ) -> GradientCompression:
        """Return how buckets of about `count` elements on a device are compressed. Collective."""
        there = device_named(device, "compression")
        return GradientCompression(self.comm, scheme, within_node=within_node, count=count, device=there)
