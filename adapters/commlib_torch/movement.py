"""allgather, broadcast, alltoall, barrier, join and objects by name, with Horovod's arguments: see `reductions`.

Verbs whose name the ordered verbs of `collectives` have, too, take `comm=`: with it they are the ordered verb among
that group's ranks, whose numbers `root` then is; without it they are operations by name, and `root_rank` is a number
among all ranks, whatever the process set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib.errors import UsageError
from commlib_torch import collectives, functions
from commlib_torch._call import Work
from commlib_torch._named import ProcessSets, Splits, first, start_allgather, start_alltoall, start_broadcast, then


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSets = None) -> Tensor:
    """Return `tensor` of all ranks, one after another along dimension 0, whose lengths may differ. Differentiable."""
    return first(functions.allgather([tensor], name, process_set))


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSets = None) -> Work[Tensor]:
    """Start `allgather`."""
    return then(start_allgather([tensor], name, process_set), first)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSets = None
) -> list[Tensor]:
    """Return each of `tensors` of all ranks, one after another along dimension 0. Differentiable."""
    return functions.allgather(tensors, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSets = None
) -> Work[list[Tensor]]:
    """Start `grouped_allgather`."""
    return start_allgather(tensors, name, process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int | None = None,
    name: str | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Return a new tensor with the values of rank `root_rank`'s. Differentiable, unless `comm` is given."""
    source = choose_root(root_rank, root)
    if comm is not None:
        check_ordered(name, process_set)
        return collectives.broadcast(tensor, source, comm=comm)
    return functions.broadcast(tensor, source, name, process_set)


def broadcast_async(
    tensor: Tensor,
    root_rank: int | None = None,
    name: str | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    comm: Communicator | None = None,
) -> Work[Tensor]:
    """Start `broadcast`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set, root=root, comm=comm)


def broadcast_(
    tensor: Tensor,
    root_rank: int | None = None,
    name: str | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    comm: Communicator | None = None,
) -> Tensor:
    """Overwrite `tensor` on every rank by that of rank `root_rank`, and return it."""
    source = choose_root(root_rank, root)
    if comm is not None:
        check_ordered(name, process_set)
        return collectives.broadcast_(tensor, source, comm=comm)
    return start_broadcast(tensor, source, name, process_set, blocking=True).wait()


def broadcast_async_(
    tensor: Tensor,
    root_rank: int | None = None,
    name: str | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    comm: Communicator | None = None,
) -> Work[Tensor]:
    """Start `broadcast_`."""
    source = choose_root(root_rank, root)
    if comm is not None:
        check_ordered(name, process_set)
        return collectives.broadcast_async_(tensor, source, comm=comm)
    return start_broadcast(tensor, source, name, process_set)


def alltoall(
    tensor: Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSets = None
) -> Any:
    """Send rows to every rank; return the rows that arrived here, in rank order. Differentiable.

    Rank i gets `splits[i]` rows, and the result is (rows, how many came from each rank); without splits the rows are
    dealt out equally, and the result is the rows alone.
    """
    out, received = functions.alltoall(tensor, splits, name, process_set)
    return out if splits is None else (out, received)


def alltoall_async(
    tensor: Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSets = None
) -> Work[Any]:
    """Start `alltoall`."""
    work = start_alltoall(tensor, splits, name, process_set)
    return work if splits is not None else then(work, first)


def barrier(process_set: ProcessSets = None, *, comm: Communicator | None = None) -> None:
    """Wait until all ranks are here."""
    if comm is not None:
        check_ordered(None, process_set)
        collectives.barrier(comm=comm)
    else:
        core.start_barrier(process_set, blocking=True).wait()


def broadcast_object(
    obj: Any,
    root_rank: int | None = None,
    name: str | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    comm: Communicator | None = None,
) -> Any:
    """Return rank `root_rank`'s picklable object on all ranks."""
    source = choose_root(root_rank, root)
    if comm is not None:
        check_ordered(name, process_set)
        return collectives.broadcast_object(obj, source, comm=comm)
    return core.broadcast_object(obj, source, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSets = None) -> list[Any]:
    """Return the picklable objects of all ranks, in rank order."""
    return core.allgather_object(obj, name, process_set)


def poll(handle: Work[Any]) -> bool:
    """Return whether the operation of `handle` has ended, so that `synchronize` will not wait."""
    return _handle("poll", handle).done()


def synchronize(handle: Work[Any] | Callable[[], Any]) -> Any:
    """Wait for the operation of `handle` and return its result. Raises what the operation raised."""
    if inspect.isfunction(handle):  # of sparse_allreduce_async
        return handle()
    return _handle("synchronize", handle).wait()


def _handle(verb: str, handle: Any) -> Work[Any]:
    if not isinstance(handle, Work):
        raise UsageError(f"{verb}: expected a handle that an _async verb returned, got {type(handle).__name__}")
    return handle


def choose_root(root_rank: int | None, root: int | None) -> int:
    """Return the root that was given under one of two names, 0 by default."""
    if root_rank is not None and root is not None:
        raise UsageError(f"root_rank={root_rank} and root={root} are two names of one argument: give one of them")
    return root_rank if root_rank is not None else root or 0


def check_ordered(name: str | None, process_set: ProcessSets) -> None:
    """Refuse what only operations by name have."""
    if name is not None or process_set is not None:
        raise UsageError("with comm= this is an ordered verb on that group: give neither name nor process_set")
