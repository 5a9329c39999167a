"""Ordered verbs on tensors: they run in call order, which must be the same on all ranks.

Every verb is collective unless it names a peer, takes any dtype that the core does (bfloat16 included), and works on
`ranks`, by default all. Gradients do not flow through. Errors of the core are raised:
UsageError for a bad argument on this rank, MismatchError on every rank if ranks call different verbs, PeerError if a
rank has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of
from commlib.literals import AlgorithmName, Op
from commlib.p2p.lanes.staging import stage_to_host
from commlib.ranks import Ranks
from commlib.tensor_verbs.call import NOTHING, OBJECT, RECEIVED, ROWS, SAME, Bridge, TargetTensor, TensorCall, group_of

T = TypeVar("T")


class OrderedVerbs(Generic[T]):
    """The verbs of every framework, each as a function that builds the call. None of them writes to a tensor."""

    def __init__(self, bridge: Bridge[T]) -> None:
        self._bridge = bridge
        self._room = bridge.room or np.empty_like

    def all_reduce(
        self, tensor: T, op: Op = "sum", *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Return a new tensor: the sum over all ranks by default (`allreduce` averages), the same bits on every rank.

        op: sum, mean, min, max or prod.
        """
        room = self._bridge.room
        return TensorCall(
            self._bridge,
            ranks,
            "all_reduce",
            lambda verb, x: verb(x, op, out=None if room is None else room(x), algorithm=algorithm),
            (tensor,),
            SAME,
        )

    def reduce_scatter(self, tensor: T, op: Op = "sum", *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Combine `tensor` of all ranks and return this rank's shard of the result along dimension 0.

        If the length of dimension 0 is no multiple of the size, the first ranks get one row more.
        """
        return TensorCall(self._bridge, ranks, "reduce_scatter", lambda verb, x: verb(x, op), (tensor,), ROWS)

    def reduce(self, tensor: T, op: Op = "sum", root: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T | None]:
        """Combine `tensor` of all ranks; rank `root` gets the result, the others None."""
        comm = group_of(ranks, "reduce")
        result = SAME if comm.rank == root else NOTHING
        return TensorCall(self._bridge, comm, "reduce", lambda verb, x: verb(x, op, root), (tensor,), result)

    def broadcast(self, tensor: T, root: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Return a new tensor with the values of rank `root`. All ranks pass the same shape and dtype."""
        comm = group_of(ranks, "broadcast")
        room, here = self._room, comm.rank == root

        def host(verb: Callable[..., Any], x: Any) -> Any:
            own = room(x)
            if here:
                device_of(x).copy(own, x)
            return verb(own, root)

        return TensorCall(self._bridge, comm, "broadcast", host, (tensor,), SAME)

    def all_gather(self, tensor: T, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Return `tensor` of all ranks, one after another along dimension 0. Shapes must agree."""
        return TensorCall(self._bridge, ranks, "all_gather", lambda verb, x: verb(x), (tensor,), ROWS)

    def all_gather_v(self, tensor: T, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Return `tensor` of all ranks, one after another along dimension 0, whose lengths may differ."""
        return TensorCall(self._bridge, ranks, "all_gather_v", lambda verb, x: verb(x), (tensor,), ROWS)

    def gather(self, tensor: T, root: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T | None]:
        """Like `all_gather`, but only rank `root` gets the result, the others None."""
        comm = group_of(ranks, "gather")
        result = ROWS if comm.rank == root else NOTHING
        return TensorCall(self._bridge, comm, "gather", lambda verb, x: verb(x, root), (tensor,), result)

    def scatter(self, tensor: T | None = None, root: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Return this rank's equal part of rank `root`'s `tensor` along dimension 0; other tensors are ignored."""
        inputs = () if tensor is None else (tensor,)
        return TensorCall(self._bridge, ranks, "scatter", lambda verb, *x: verb(*(x or (None,)), root), inputs, ROWS)

    def all_to_all(self, tensor: T, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Send the i-th of `size` equal parts of `tensor` along dimension 0 to rank i; return the parts received."""
        return TensorCall(self._bridge, ranks, "all_to_all", lambda verb, x: verb(x), (tensor,), SAME)

    def all_to_all_v(
        self,
        tensor: T,
        splits: Sequence[int] | T,
        *,
        takes: Sequence[int] | T | None = None,
        ranks: Ranks | None = None,
    ) -> TensorCall[tuple[T, T]]:
        """Send `splits[i]` rows of `tensor` to rank i; return (the rows received, int64 number of rows from each rank).

        takes: number of rows received from each rank, if all ranks know it.
        """
        given, group = (splits, takes), group_of(ranks, "all_to_all_v")
        asked = [counts for counts in given if isinstance(counts, self._bridge.tensor)]

        def numbers(counts: Any) -> list[int]:
            if type(counts) is DeviceArray:
                counts = stage_to_host(group.group, counts, "all_to_all_v: rows for each rank")
            return counts.tolist()  # type: ignore[no-any-return]

        def host(verb: Callable[..., Any], x: Any, *arrays: Any) -> Any:
            known = iter(arrays)
            rows = [numbers(next(known)) if isinstance(counts, self._bridge.tensor) else counts for counts in given]
            return verb(x, rows[0], takes=rows[1])

        return TensorCall(self._bridge, group, "all_to_all_v", host, (tensor, *asked), RECEIVED)

    def send(self, tensor: T, peer: int, tag: int = 0, *, ranks: Ranks | None = None) -> TensorCall[None]:
        """Send `tensor` to rank `peer`. Returns when `tensor` may be changed."""
        return TensorCall(self._bridge, ranks, "send", lambda verb, x: verb(x, peer, tag), (tensor,), NOTHING)

    def barrier(self, *, ranks: Ranks | None = None) -> TensorCall[None]:
        """Wait until all ranks have called this. The work of `barrier_async` is done when all ranks have called it."""
        return TensorCall(self._bridge, ranks, "barrier", lambda verb: verb(), (), NOTHING)

    def broadcast_object(self, value: Any, root: int = 0, *, ranks: Ranks | None = None) -> TensorCall[Any]:
        """Return rank `root`'s picklable object on all ranks."""
        return TensorCall(self._bridge, ranks, "broadcast_object", lambda verb: verb(value, root), (), OBJECT)

    def all_gather_object(self, value: Any, *, ranks: Ranks | None = None) -> TensorCall[list[Any]]:
        """Return the picklable objects of all ranks, in rank order."""
        return TensorCall(self._bridge, ranks, "all_gather_object", lambda verb: verb(value), (), OBJECT)


class WritingVerbs(Generic[T]):
    """The verbs that write to a tensor, for frameworks with writable tensors."""

    def __init__(self, bridge: Bridge[T], place: Callable[[T], TargetTensor]) -> None:
        self._bridge, self._place = bridge, place

    def all_reduce_(
        self, tensor: T, op: Op = "sum", *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Reduce `tensor` over all ranks in place, to the sum by default (`allreduce_` averages), and return it."""
        place = self._place(tensor)
        x = place.array
        return TensorCall(
            self._bridge, ranks, "all_reduce", lambda verb: verb(x, op, out=x, algorithm=algorithm), (), place
        )

    def broadcast_(self, tensor: T, root: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Overwrite `tensor` on every rank with the tensor of rank `root`, and return it."""
        place = self._place(tensor)
        return TensorCall(self._bridge, ranks, "broadcast", lambda verb: verb(place.array, root), (), place)

    def recv(self, tensor: T, peer: int, tag: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Receive the tensor that rank `peer` sends with this tag into `tensor`, and return it."""
        place = self._place(tensor)
        return TensorCall(self._bridge, ranks, "recv", lambda verb: verb(place.array, peer, tag), (), place)

    def send_recv(
        self, tensor: T, peer: int, out: T, source: int, tag: int = 0, *, ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Send `tensor` to rank `peer` while receiving into `out` from rank `source`; return `out`."""
        place = self._place(out)
        return TensorCall(
            self._bridge,
            ranks,
            "send_recv",
            lambda verb, x: verb(x, peer, place.array, source, tag),
            (tensor,),
            place,
        )


class ReturningVerbs(Generic[T]):
    """The verbs that receive, for frameworks with read-only tensors."""

    def __init__(self, bridge: Bridge[T]) -> None:
        self._bridge = bridge
        self._room = bridge.room or np.empty_like

    def recv(self, like: T, peer: int, tag: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Return the tensor that rank `peer` sends with this tag, as a new tensor of the shape and dtype of `like`."""
        room = self._room
        return TensorCall(self._bridge, ranks, "recv", lambda verb, x: verb(room(x), peer, tag), (like,), SAME)

    def send_recv(
        self, tensor: T, peer: int, like: T, source: int, tag: int = 0, *, ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Send `tensor` to rank `peer`; return the tensor that rank `source` sends, as a new tensor like `like`."""
        room = self._room
        return TensorCall(
            self._bridge,
            ranks,
            "send_recv",
            lambda verb, x, y: verb(x, peer, room(y), source, tag),
            (tensor, like),
            SAME,
        )
