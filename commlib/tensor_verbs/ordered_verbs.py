"""Ordered verbs on tensors: they run in call order, which must be the same on all ranks.

Every verb is collective unless it names a peer, takes any dtype that the core does (bfloat16 included), and works on
`ranks`, by default all. algorithm: as for the communicator's verb, see `Communicator`.
Errors of the core are raised: UsageError for a bad argument on this rank, MismatchError on every rank if ranks call
different verbs, PeerError if a rank has left.

The verbs differentiate: the backward of each is the transposed verb, which gives the gradient of the sum of all ranks'
losses; see `gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from commlib.communicator import Communicator
from commlib.devices.array import DeviceArray
from commlib.devices.arrays import device_of
from commlib.literals import AlgorithmName, Op, ScanOp
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

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            op: Sum, mean, min, max or prod. Sum and mean differentiate: the gradient is reduced in the same way.
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        room = self._bridge.room
        return TensorCall(
            self._bridge,
            ranks,
            "all_reduce",
            lambda verb, x: verb(x, op, out=None if room is None else room(x), algorithm=algorithm),
            (tensor,),
            SAME,
            lambda: {"op": op, "algorithm": algorithm},
        )

    def reduce_scatter(
        self, tensor: T, op: Op = "sum", *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Combine `tensor` of all ranks and return this rank's shard of the result along dimension 0.

        If the length of dimension 0 is no multiple of the size, the first ranks get one row more. Sum and mean
        differentiate: the gradients of the shards are gathered.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            op: "sum", "mean", "min", "max" or "prod".
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(
            self._bridge,
            ranks,
            "reduce_scatter",
            lambda verb, x: verb(x, op, algorithm=algorithm),
            (tensor,),
            ROWS,
            lambda: {"op": op},
        )

    def reduce_scatter_v(
        self,
        tensor: T,
        counts: Sequence[int] | T,
        op: Op = "sum",
        *,
        algorithm: AlgorithmName = "auto",
        ranks: Ranks | None = None,
    ) -> TensorCall[T]:
        """Combine `tensor` of all ranks and return `counts[rank]` rows of the result; all ranks give the same counts.

        Sum and mean differentiate: the gradients of the rows are gathered.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            counts: The number of rows for each rank, the same on all ranks.
            op: "sum", "mean", "min", "max" or "prod".
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        group = group_of(ranks, "reduce_scatter_v")
        rows, count_tensors = _count_inputs(self._bridge, group, "reduce_scatter_v", (counts,))
        return TensorCall(
            self._bridge,
            group,
            "reduce_scatter_v",
            lambda verb, x, *arrays: verb(x, *rows(arrays), op, algorithm=algorithm),
            (tensor, *count_tensors),
            ROWS,
            lambda: {"op": op},
            (tensor,),
        )

    def reduce(
        self, tensor: T, op: Op = "sum", root: int = 0, *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T | None]:
        """Combine `tensor` of all ranks; rank `root` gets the result, the others None. Does not differentiate.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            op: "sum", "mean", "min", "max" or "prod".
            root: The rank among them that gets the result.
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        comm = group_of(ranks, "reduce")
        result = SAME if comm.rank == root else NOTHING
        return TensorCall(
            self._bridge, comm, "reduce", lambda verb, x: verb(x, op, root, algorithm=algorithm), (tensor,), result
        )

    def scan(self, tensor: T, op: ScanOp = "sum", *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Combine `tensor` of all ranks up to and including this one.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            op: "sum", "min", "max" or "prod".
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(self._bridge, ranks, "scan", lambda verb, x: verb(x, op), (tensor,), SAME, lambda: {"op": op})

    def exscan(self, tensor: T, op: ScanOp = "sum", *, ranks: Ranks | None = None) -> TensorCall[T | None]:
        """Combine `tensor` of all ranks before this one; rank 0 gets None. Does not differentiate.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            op: "sum", "min", "max" or "prod".
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        comm = group_of(ranks, "exscan")
        result = SAME if comm.rank else NOTHING
        return TensorCall(self._bridge, ranks, "exscan", lambda verb, x: verb(x, op), (tensor,), result)

    def broadcast(
        self, tensor: T, root: int = 0, *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Return a new tensor with the values of rank `root`. All ranks pass the same shape and dtype.

        Differentiates: rank `root` gets the sum of the gradients, the others zeros.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            root: The rank among them whose values the others get.
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        comm = group_of(ranks, "broadcast")
        room, here = self._room, comm.rank == root

        def host(verb: Callable[..., Any], x: Any) -> Any:
            own = room(x)
            if here:
                device_of(x).copy(own, x)
            return verb(own, root, algorithm=algorithm)

        return TensorCall(self._bridge, comm, "broadcast", host, (tensor,), SAME, lambda: {"root": root})

    def all_gather(self, tensor: T, *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None) -> TensorCall[T]:
        """Return `tensor` of all ranks, one after another along dimension 0. Shapes must agree.

        Differentiates: each rank gets the sum of the gradients of its rows.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(
            self._bridge, ranks, "all_gather", lambda verb, x: verb(x, algorithm=algorithm), (tensor,), ROWS
        )

    def all_gather_v(self, tensor: T, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Return `tensor` of all ranks, one after another along dimension 0, whose lengths may differ.

        Differentiates: each rank gets the sum of the gradients of its rows.

        Args:
            tensor: A tensor of the same dtype on all ranks; the lengths of dimension 0 may differ.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(self._bridge, ranks, "all_gather_v", lambda verb, x: verb(x), (tensor,), ROWS)

    def gather(
        self, tensor: T, root: int = 0, *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T | None]:
        """Return `all_gather` on rank `root`, and None on the others. Does not differentiate.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            root: The rank among them that gets the result.
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        comm = group_of(ranks, "gather")
        result = ROWS if comm.rank == root else NOTHING
        return TensorCall(
            self._bridge, comm, "gather", lambda verb, x: verb(x, root, algorithm=algorithm), (tensor,), result
        )

    def scatter(
        self, tensor: T | None = None, root: int = 0, *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Return this rank's equal part of rank `root`'s `tensor` along dimension 0; other tensors are ignored.

        Differentiates if every rank passes a tensor: rank `root` gets the gradients of all parts, the others zeros.

        Args:
            tensor: On rank `root` the tensor that is shared out; `size` divides the length of dimension 0.
            root: The rank among them whose tensor is shared out.
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        inputs = () if tensor is None else (tensor,)
        return TensorCall(
            self._bridge,
            ranks,
            "scatter",
            lambda verb, *x: verb(*(x or (None,)), root, algorithm=algorithm),
            inputs,
            ROWS,
            lambda: {"root": root},
        )

    def all_to_all(self, tensor: T, *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None) -> TensorCall[T]:
        """Send the i-th of `size` equal parts of `tensor` along dimension 0 to rank i; return the parts received.

        Differentiates: the gradients of the parts go back to where the parts are from.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks; `size` divides the length of dimension 0.
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(
            self._bridge,
            ranks,
            "all_to_all",
            lambda verb, x: verb(x, algorithm=algorithm),
            (tensor,),
            SAME,
            lambda: {"algorithm": algorithm},
        )

    def all_to_all_v(
        self,
        tensor: T,
        splits: Sequence[int] | T,
        *,
        takes: Sequence[int] | T | None = None,
        ranks: Ranks | None = None,
    ) -> TensorCall[tuple[T, T]]:
        """Send `splits[i]` rows of `tensor` to rank i; return (the rows received, int64 number of rows from each rank).

        Differentiates: the gradients of the rows go back to where the rows are from.

        Args:
            tensor: A tensor; its rows go to the ranks in rank order.
            splits: The number of rows for each rank.
            takes: Number of rows received from each rank, if all ranks have it.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        group = group_of(ranks, "all_to_all_v")
        rows, count_tensors = _count_inputs(self._bridge, group, "all_to_all_v", (splits, takes))

        def host(verb: Callable[..., Any], x: Any, *arrays: Any) -> Any:
            send_counts, receive_counts = rows(arrays)
            return verb(x, send_counts, takes=receive_counts)

        return TensorCall(
            self._bridge,
            group,
            "all_to_all_v",
            host,
            (tensor, *count_tensors),
            RECEIVED,
            lambda: {"splits": splits},
            (tensor,),
        )

    def send(self, tensor: T, peer: int, tag: int = 0, *, ranks: Ranks | None = None) -> TensorCall[None]:
        """Send `tensor` to rank `peer`. Returns when `tensor` may be changed. Does not differentiate.

        Args:
            tensor: A tensor of any shape.
            peer: The rank that receives.
            tag: A number that matches sends and receives.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(self._bridge, ranks, "send", lambda verb, x: verb(x, peer, tag), (tensor,), NOTHING)

    def barrier(self, *, ranks: Ranks | None = None) -> TensorCall[None]:
        """Wait until all ranks have called this. The work of `barrier_async` is done when all ranks have called it.

        Args:
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(self._bridge, ranks, "barrier", lambda verb: verb(), (), NOTHING)

    def broadcast_object(self, value: Any, root: int = 0, *, ranks: Ranks | None = None) -> TensorCall[Any]:
        """Return rank `root`'s picklable object on all ranks.

        Args:
            value: A picklable object.
            root: The rank among them whose values the others get.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(self._bridge, ranks, "broadcast_object", lambda verb: verb(value, root), (), OBJECT)

    def all_gather_object(self, value: Any, *, ranks: Ranks | None = None) -> TensorCall[list[Any]]:
        """Return the picklable objects of all ranks, in rank order.

        Args:
            value: A picklable object.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        return TensorCall(self._bridge, ranks, "all_gather_object", lambda verb: verb(value), (), OBJECT)


class WritingVerbs(Generic[T]):
    """The verbs that write to a tensor, for frameworks with writable tensors."""

    def __init__(self, bridge: Bridge[T], place: Callable[[T], TargetTensor]) -> None:
        self._bridge, self._place = bridge, place

    def all_reduce_(
        self, tensor: T, op: Op = "sum", *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Reduce `tensor` over all ranks in place, to the sum by default (`allreduce_` averages), and return it.

        Differentiates like `all_reduce`.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            op: "sum", "mean", "min", "max" or "prod".
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        place = self._place(tensor)
        x = place.array
        return TensorCall(
            self._bridge,
            ranks,
            "all_reduce",
            lambda verb: verb(x, op, out=x, algorithm=algorithm),
            (),
            place,
            lambda: {"op": op, "algorithm": algorithm},
            operands=(tensor,),
        )

    def broadcast_(
        self, tensor: T, root: int = 0, *, algorithm: AlgorithmName = "auto", ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Overwrite `tensor` on every rank with the tensor of rank `root`, and return it.

        Differentiates like `broadcast`.

        Args:
            tensor: A tensor of the same shape and dtype on all ranks.
            root: The rank among them whose values the others get.
            algorithm: "auto", or the name of a path or schedule: see `Communicator.all_reduce`.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        place = self._place(tensor)
        return TensorCall(
            self._bridge,
            ranks,
            "broadcast",
            lambda verb: verb(place.array, root, algorithm=algorithm),
            (),
            place,
            lambda: {"root": root},
            operands=(tensor,),
        )

    def recv(self, tensor: T, peer: int, tag: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Receive the tensor that rank `peer` sends with this tag into `tensor`, and return it.

        Args:
            tensor: The tensor that is overwritten.
            peer: The rank that sends.
            tag: A number that matches sends and receives.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        place = self._place(tensor)
        return TensorCall(
            self._bridge,
            ranks,
            "recv",
            lambda verb: verb(place.array, peer, tag),
            (),
            place,
            operands=(tensor,),
        )

    def send_recv(
        self, tensor: T, peer: int, out: T, source: int, tag: int = 0, *, ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Send `tensor` to rank `peer` while receiving into `out` from rank `source`; return `out`.

        Differentiates with respect to `tensor`: the gradient of `out` goes back to rank `source`.

        Args:
            tensor: The tensor to send.
            peer: The rank that receives it.
            out: The tensor that is overwritten.
            source: The rank whose tensor is received.
            tag: A number that matches sends and receives.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        place = self._place(out)
        return TensorCall(
            self._bridge,
            ranks,
            "send_recv",
            lambda verb, x: verb(x, peer, place.array, source, tag),
            (tensor,),
            place,
            lambda: {"peer": peer, "source": source, "tag": tag},
            operands=(tensor, out),
        )


class ReturningVerbs(Generic[T]):
    """The verbs that receive, for frameworks with read-only tensors."""

    def __init__(self, bridge: Bridge[T]) -> None:
        self._bridge = bridge
        self._room = bridge.room or np.empty_like

    def recv(self, like: T, peer: int, tag: int = 0, *, ranks: Ranks | None = None) -> TensorCall[T]:
        """Return the tensor that rank `peer` sends with this tag, as a new tensor of the shape and dtype of `like`.

        Args:
            like: A tensor of the shape and dtype of the message.
            peer: The rank that sends.
            tag: A number that matches sends and receives.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        room = self._room
        return TensorCall(
            self._bridge, ranks, "recv", lambda verb, x: verb(room(x), peer, tag), (like,), SAME, operands=()
        )

    def send_recv(
        self, tensor: T, peer: int, like: T, source: int, tag: int = 0, *, ranks: Ranks | None = None
    ) -> TensorCall[T]:
        """Send `tensor` to rank `peer`; return the tensor that rank `source` sends, as a new tensor like `like`.

        Differentiates with respect to `tensor`: the gradient of the result goes back to rank `source`.

        Args:
            tensor: The tensor to send.
            peer: The rank that receives it.
            like: A tensor of the shape and dtype of the received message.
            source: The rank whose tensor is received.
            tag: A number that matches sends and receives.
            ranks: The ranks that call it, such as `mesh["dp"]`; None: all.
        """
        room = self._room
        return TensorCall(
            self._bridge,
            ranks,
            "send_recv",
            lambda verb, x, y: verb(x, peer, room(y), source, tag),
            (tensor, like),
            SAME,
            lambda: {"peer": peer, "source": source, "tag": tag},
            (tensor,),
        )


def _count_inputs(
    bridge: Bridge[T], comm: Communicator, verb: str, counts_of: Sequence[Any]
) -> tuple[Callable[[Sequence[Any]], list[Any]], list[T]]:
    """Return a function from the arrays of the counts that are tensors to all counts, and these tensors."""
    count_tensors = [counts for counts in counts_of if isinstance(counts, bridge.tensor)]

    def numbers(counts: Any) -> list[int]:
        if type(counts) is DeviceArray:
            counts = stage_to_host(comm.group.waits, counts, f"{verb}: rows for each rank")
        return counts.tolist()  # type: ignore[no-any-return]

    def rows(arrays: Sequence[Any]) -> list[Any]:
        values = iter(arrays)
        return [numbers(next(values)) if isinstance(counts, bridge.tensor) else counts for counts in counts_of]

    return rows, count_tensors
