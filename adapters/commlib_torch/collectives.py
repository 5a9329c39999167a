"""The verbs on torch tensors. Contiguous CPU tensors are read and written where they are.

Every verb is collective unless it names a peer, takes any dtype that the core does (bfloat16 included) and any
strides, and works on `comm`, by default the communicator of all ranks (initialised if need be). Gradients do not flow
through. Every verb has an `_async` twin that returns a `Work` at once; its tensors must not be touched until that is
done. All raise what the core raises: UsageError for a bad argument on this rank, such as a tensor on a GPU,
MismatchError on every rank where ranks call different things, PeerError where a rank is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from commlib.communicator import Communicator
from commlib_torch._call import Call, InPlace, Work, as_is, new, new_or_none, read

Comm = Communicator | None


# Reductions


def _all_reduce(tensor: Tensor, op: str, algorithm: str, comm: Comm) -> Call[Tensor]:
    return Call(comm, "all_reduce", new, read(tensor), op, algorithm=algorithm)


def all_reduce(tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", comm: Comm = None) -> Tensor:
    """Return a new tensor: `tensor` of all ranks combined element by element, the same bits on every rank.

    op: sum, mean, min, max or prod.
    """
    return _all_reduce(tensor, op, algorithm, comm).run()


def all_reduce_async(tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", comm: Comm = None) -> Work[Tensor]:
    """Start `all_reduce`."""
    return _all_reduce(tensor, op, algorithm, comm).start()


def _all_reduce_(tensor: Tensor, op: str, algorithm: str, comm: Comm) -> Call[Tensor]:
    place = InPlace(tensor)
    return Call(comm, "all_reduce", place.finish, place.array, op, out=place.array, algorithm=algorithm)


def all_reduce_(tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", comm: Comm = None) -> Tensor:
    """Combine `tensor` of all ranks in place, and return it."""
    return _all_reduce_(tensor, op, algorithm, comm).run()


def all_reduce_async_(tensor: Tensor, op: str = "sum", *, algorithm: str = "auto", comm: Comm = None) -> Work[Tensor]:
    """Start `all_reduce_`."""
    return _all_reduce_(tensor, op, algorithm, comm).start()


def _reduce_scatter(tensor: Tensor, op: str, comm: Comm) -> Call[Tensor]:
    return Call(comm, "reduce_scatter", new, read(tensor), op)


def reduce_scatter(tensor: Tensor, op: str = "sum", *, comm: Comm = None) -> Tensor:
    """Combine `tensor` of all ranks and return this rank's part of the result along dimension 0.

    If the length of dimension 0 is no multiple of the size, the first ranks get one row more.
    """
    return _reduce_scatter(tensor, op, comm).run()


def reduce_scatter_async(tensor: Tensor, op: str = "sum", *, comm: Comm = None) -> Work[Tensor]:
    """Start `reduce_scatter`."""
    return _reduce_scatter(tensor, op, comm).start()


def _reduce(tensor: Tensor, op: str, root: int, comm: Comm) -> Call[Tensor | None]:
    return Call(comm, "reduce", new_or_none, read(tensor), op, root)


def reduce(tensor: Tensor, op: str = "sum", root: int = 0, *, comm: Comm = None) -> Tensor | None:
    """Combine `tensor` of all ranks; rank `root` gets the result, the others None."""
    return _reduce(tensor, op, root, comm).run()


def reduce_async(tensor: Tensor, op: str = "sum", root: int = 0, *, comm: Comm = None) -> Work[Tensor | None]:
    """Start `reduce`."""
    return _reduce(tensor, op, root, comm).start()


# Movement


def broadcast(tensor: Tensor, root: int = 0, *, comm: Comm = None) -> Tensor:
    """Return a new tensor with the values of rank `root`'s, which has the same shape and dtype."""
    return broadcast_(tensor.detach().clone(), root, comm=comm)


def broadcast_async(tensor: Tensor, root: int = 0, *, comm: Comm = None) -> Work[Tensor]:
    """Start `broadcast`."""
    return broadcast_async_(tensor.detach().clone(), root, comm=comm)


def _broadcast_(tensor: Tensor, root: int, comm: Comm) -> Call[Tensor]:
    place = InPlace(tensor)
    return Call(comm, "broadcast", place.finish, place.array, root)


def broadcast_(tensor: Tensor, root: int = 0, *, comm: Comm = None) -> Tensor:
    """Overwrite `tensor` on every rank by that of rank `root`, and return it."""
    return _broadcast_(tensor, root, comm).run()


def broadcast_async_(tensor: Tensor, root: int = 0, *, comm: Comm = None) -> Work[Tensor]:
    """Start `broadcast_`."""
    return _broadcast_(tensor, root, comm).start()


def _all_gather(tensor: Tensor, comm: Comm) -> Call[Tensor]:
    return Call(comm, "all_gather", new, read(tensor))


def all_gather(tensor: Tensor, *, comm: Comm = None) -> Tensor:
    """Return `tensor` of all ranks, one after another along dimension 0. Shapes must agree."""
    return _all_gather(tensor, comm).run()


def all_gather_async(tensor: Tensor, *, comm: Comm = None) -> Work[Tensor]:
    """Start `all_gather`."""
    return _all_gather(tensor, comm).start()


def _all_gather_v(tensor: Tensor, comm: Comm) -> Call[Tensor]:
    return Call(comm, "all_gather_v", new, read(tensor))


def all_gather_v(tensor: Tensor, *, comm: Comm = None) -> Tensor:
    """Return `tensor` of all ranks, one after another along dimension 0, whose lengths may differ."""
    return _all_gather_v(tensor, comm).run()


def all_gather_v_async(tensor: Tensor, *, comm: Comm = None) -> Work[Tensor]:
    """Start `all_gather_v`."""
    return _all_gather_v(tensor, comm).start()


def _gather(tensor: Tensor, root: int, comm: Comm) -> Call[Tensor | None]:
    return Call(comm, "gather", new_or_none, read(tensor), root)


def gather(tensor: Tensor, root: int = 0, *, comm: Comm = None) -> Tensor | None:
    """Like `all_gather`, but only rank `root` gets the result, the others None."""
    return _gather(tensor, root, comm).run()


def gather_async(tensor: Tensor, root: int = 0, *, comm: Comm = None) -> Work[Tensor | None]:
    """Start `gather`."""
    return _gather(tensor, root, comm).start()


def _scatter(tensor: Tensor | None, root: int, comm: Comm) -> Call[Tensor]:
    return Call(comm, "scatter", new, None if tensor is None else read(tensor), root)


def scatter(tensor: Tensor | None = None, root: int = 0, *, comm: Comm = None) -> Tensor:
    """Return this rank's equal part of rank `root`'s `tensor` along dimension 0; the others' is ignored."""
    return _scatter(tensor, root, comm).run()


def scatter_async(tensor: Tensor | None = None, root: int = 0, *, comm: Comm = None) -> Work[Tensor]:
    """Start `scatter`."""
    return _scatter(tensor, root, comm).start()


def _all_to_all(tensor: Tensor, comm: Comm) -> Call[Tensor]:
    return Call(comm, "all_to_all", new, read(tensor))


def all_to_all(tensor: Tensor, *, comm: Comm = None) -> Tensor:
    """Send the i-th of `size` equal parts of `tensor` along dimension 0 to rank i; return what arrived here."""
    return _all_to_all(tensor, comm).run()


def all_to_all_async(tensor: Tensor, *, comm: Comm = None) -> Work[Tensor]:
    """Start `all_to_all`."""
    return _all_to_all(tensor, comm).start()


def _all_to_all_v(tensor: Tensor, splits: Sequence[int], comm: Comm) -> Call[tuple[Tensor, Tensor]]:
    def finish(answer: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        return new(answer[0]), new(answer[1])

    return Call(comm, "all_to_all_v", finish, read(tensor), splits)


def all_to_all_v(tensor: Tensor, splits: Sequence[int], *, comm: Comm = None) -> tuple[Tensor, Tensor]:
    """Send `splits[i]` rows of `tensor` to rank i; return (what arrived here, int64 rows from each rank)."""
    return _all_to_all_v(tensor, splits, comm).run()


def all_to_all_v_async(tensor: Tensor, splits: Sequence[int], *, comm: Comm = None) -> Work[tuple[Tensor, Tensor]]:
    """Start `all_to_all_v`."""
    return _all_to_all_v(tensor, splits, comm).start()


# Messages between two ranks


def send(tensor: Tensor, peer: int, tag: int = 0, *, comm: Comm = None) -> None:
    """Send `tensor` to rank `peer`. Returns when `tensor` may be changed."""
    Call(comm, "send", as_is, read(tensor), peer, tag).run()


def send_async(tensor: Tensor, peer: int, tag: int = 0, *, comm: Comm = None) -> Work[None]:
    """Start `send`."""
    return Call(comm, "send", as_is, read(tensor), peer, tag).start()


def _recv(tensor: Tensor, peer: int, tag: int, comm: Comm) -> Call[Tensor]:
    place = InPlace(tensor)
    return Call(comm, "recv", place.finish, place.array, peer, tag)


def recv(tensor: Tensor, peer: int, tag: int = 0, *, comm: Comm = None) -> Tensor:
    """Receive into `tensor` what rank `peer` sends with this tag, and return it."""
    return _recv(tensor, peer, tag, comm).run()


def recv_async(tensor: Tensor, peer: int, tag: int = 0, *, comm: Comm = None) -> Work[Tensor]:
    """Start `recv`."""
    return _recv(tensor, peer, tag, comm).start()


def _send_recv(tensor: Tensor, peer: int, out: Tensor, source: int, tag: int, comm: Comm) -> Call[Tensor]:
    place = InPlace(out)
    return Call(comm, "send_recv", place.finish, read(tensor), peer, place.array, source, tag)


def send_recv(tensor: Tensor, peer: int, out: Tensor, source: int, tag: int = 0, *, comm: Comm = None) -> Tensor:
    """Send `tensor` to rank `peer` while receiving into `out` from rank `source`; return `out`."""
    return _send_recv(tensor, peer, out, source, tag, comm).run()


def send_recv_async(
    tensor: Tensor, peer: int, out: Tensor, source: int, tag: int = 0, *, comm: Comm = None
) -> Work[Tensor]:
    """Start `send_recv`."""
    return _send_recv(tensor, peer, out, source, tag, comm).start()


# Synchronisation and objects


def barrier(*, comm: Comm = None) -> None:
    """Wait until all ranks are here."""
    Call(comm, "barrier", as_is).run()


def barrier_async(*, comm: Comm = None) -> Work[None]:
    """Start `barrier`; the work is done when all ranks have come."""
    return Call(comm, "barrier", as_is).start()


def broadcast_object(value: Any, root: int = 0, *, comm: Comm = None) -> Any:
    """Return rank `root`'s picklable object on all ranks."""
    return Call(comm, "broadcast_object", as_is, value, root).run()


def broadcast_object_async(value: Any, root: int = 0, *, comm: Comm = None) -> Work[Any]:
    """Start `broadcast_object`."""
    return Call(comm, "broadcast_object", as_is, value, root).start()


def all_gather_object(value: Any, *, comm: Comm = None) -> list[Any]:
    """Return the picklable objects of all ranks, in rank order."""
    return Call[list[Any]](comm, "all_gather_object", as_is, value).run()


def all_gather_object_async(value: Any, *, comm: Comm = None) -> Work[list[Any]]:
    """Start `all_gather_object`."""
    return Call[list[Any]](comm, "all_gather_object", as_is, value).start()
