"""allgather, broadcast, alltoall, barrier and objects by name, with Horovod's arguments: see `reductions`.

Verbs that also exist as ordered verbs in `collectives` accept `ranks=`: with it they are the ordered verb among those
ranks, and `root` is a rank among them. Without it they are named operations, and `root_rank` is a global
rank, for every process set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from commlib import horovod as core
from commlib.arguments import list_of
from commlib.errors import UsageError
from commlib.literals import AlgorithmName
from commlib.ranks import Ranks
from commlib.tensor_verbs import Startable, check_named, check_ordered, choose_root
from commlib_torch._call import Work
from commlib_torch._recorded_verbs import ordered, ordered_verb_maker, writing
from commlib_torch.named_verbs import _autograd
from commlib_torch.named_verbs._named_operations import (
    NamedOperation,
    ProcessSets,
    Splits,
    first,
    start_allgather,
    start_alltoall,
    start_broadcast,
)

__all__ = (
    "allgather", "allgather_async", "allgather_object", "alltoall", "alltoall_async", "barrier", "broadcast",
    "broadcast_", "broadcast_async", "broadcast_async_", "broadcast_object", "grouped_allgather",
    "grouped_allgather_async", "poll", "synchronize",
)  # fmt: skip

_verb = ordered_verb_maker(__name__)


def _allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSets = None) -> NamedOperation[Tensor]:
    """Concatenate `tensor` of all ranks along dimension 0; their lengths may differ. Differentiable.

    Args:
        tensor: A tensor; the lengths of dimension 0 may differ among ranks, the others not.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.

    Examples:
        >>> ct.allgather(torch.full((comm.rank + 1,), comm.rank))
        tensor([0, 1, 1])
    """
    return NamedOperation(
        lambda blocking: start_allgather([tensor], name, process_set, blocking=blocking).then(first),
        lambda: first(_autograd.allgather([tensor], name, process_set)),
    )


def _grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSets = None
) -> NamedOperation[list[Tensor]]:
    """Concatenate each of `tensors` of all ranks along dimension 0. Differentiable.

    Args:
        tensors: Tensors, as many on all ranks.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.

    Examples:
        >>> ct.grouped_allgather([torch.tensor([comm.rank])])
        [tensor([0, 1])]
    """
    given = list_of("grouped_allgather", "a list of tensors", tensors)
    return NamedOperation(
        lambda blocking: start_allgather(given, name, process_set, blocking=blocking),
        lambda: _autograd.allgather(given, name, process_set),
    )


def _broadcast(
    tensor: Tensor,
    root_rank: int | None = None,
    name: str | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    algorithm: AlgorithmName = "auto",
    ranks: Ranks | None = None,
) -> Startable[Tensor]:
    """Return a new tensor with the values of rank `root_rank`. Differentiable.

    The gradient is the average over ranks on the root and zeros elsewhere, as in Horovod. With `ranks` it is the
    ordered verb on those ranks, `root` is a rank among them, and the gradient on the root is the sum instead.

    Args:
        tensor: A tensor of any dtype of the core, of the same shape and dtype on all ranks.
        root_rank: The global rank whose values the others get.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
        root: With `ranks`: the rank among them whose values the others get.
        algorithm: With `ranks`: "auto", or the name of a path or schedule.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.

    Examples:
        >>> ct.broadcast(torch.tensor([comm.rank]), root_rank=1)
        tensor([1])
    """
    source = choose_root(root_rank, root)
    if ranks is not None:
        check_ordered(name, process_set)
        return ordered.broadcast(tensor, source, algorithm=algorithm, ranks=ranks)
    check_named(algorithm)
    return NamedOperation(
        lambda blocking: start_broadcast(tensor.detach().clone(), source, name, process_set, blocking=blocking),
        lambda: _autograd.broadcast(tensor, source, name, process_set),
    )


def _broadcast_(
    tensor: Tensor,
    root_rank: int | None = None,
    name: str | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    algorithm: AlgorithmName = "auto",
    ranks: Ranks | None = None,
) -> Startable[Tensor]:
    """Overwrite `tensor` on every rank with that of rank `root_rank`, and return it.

    Args:
        tensor: A tensor of any dtype of the core, of the same shape and dtype on all ranks.
        root_rank: The global rank whose values the others get.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
        root: With `ranks`: the rank among them whose values the others get.
        algorithm: With `ranks`: "auto", or the name of a path or schedule.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.

    Examples:
        >>> x = torch.tensor([comm.rank])
        >>> ct.broadcast_(x, root_rank=1)
        tensor([1])
    """
    source = choose_root(root_rank, root)
    if ranks is not None:
        check_ordered(name, process_set)
        return writing.broadcast_(tensor, source, algorithm=algorithm, ranks=ranks)
    check_named(algorithm)
    return NamedOperation(lambda blocking: start_broadcast(tensor, source, name, process_set, blocking=blocking))


def _alltoall(
    tensor: Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSets = None
) -> NamedOperation[Any]:
    """Send rows to every rank; return the received rows, in rank order. Differentiable.

    Rank i gets `splits[i]` rows, and the result is (rows, number of rows from each rank); without splits the rows are
    divided evenly, and the result is the rows only.

    Args:
        tensor: A tensor of any dtype of the core, of the same shape and dtype on all ranks.
        splits: The number of rows for each rank; None: equal parts.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.

    Examples:
        >>> ct.alltoall(torch.tensor([comm.rank, comm.rank]))
        tensor([0, 1])
    """
    finish: Callable[[Any], Any] = first if splits is None else tuple
    return NamedOperation(
        lambda blocking: start_alltoall(tensor, splits, name, process_set, blocking=blocking).then(finish),
        lambda: finish(_autograd.alltoall(tensor, splits, name, process_set)),
    )


allgather, allgather_async = _verb(_allgather)
grouped_allgather, grouped_allgather_async = _verb(_grouped_allgather)
broadcast, broadcast_async = _verb(_broadcast)
broadcast_, broadcast_async_ = _verb(_broadcast_)
alltoall, alltoall_async = _verb(_alltoall)


def barrier(process_set: ProcessSets = None, *, ranks: Ranks | None = None) -> None:
    """Wait until all ranks have called this.

    Args:
        process_set: The participating ranks; None: all.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.
    """
    if ranks is not None:
        check_ordered(None, process_set)
        ordered.barrier(ranks=ranks).run()
    else:
        core.start_barrier(process_set, blocking=True).wait()


def broadcast_object(
    obj: Any,
    root_rank: int | None = None,
    name: str | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    ranks: Ranks | None = None,
) -> Any:
    """Return rank `root_rank`'s picklable object on all ranks.

    Args:
        obj: A picklable object.
        root_rank: The global rank whose values the others get.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
        root: With `ranks`: the rank among them whose values the others get.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.
    """
    source = choose_root(root_rank, root)
    if ranks is not None:
        check_ordered(name, process_set)
        return ordered.broadcast_object(obj, source, ranks=ranks).run()
    return core.broadcast_object(obj, source, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSets = None) -> list[Any]:
    """Return the picklable objects of all ranks, in rank order.

    Args:
        obj: A picklable object.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
    """
    return core.allgather_object(obj, name, process_set)


def poll(handle: Work[Any]) -> bool:
    """Return whether the operation of `handle` is done, so `synchronize` will not wait.

    Args:
        handle: The handle that an `_async` operation returned.

    Examples:
        >>> handle = ct.allreduce_async(torch.ones(1))
        >>> ct.poll(handle) in (True, False)
        True
        >>> ct.synchronize(handle)
        tensor([1.])
    """
    return _handle("poll", handle).done()


def synchronize(handle: Work[Any] | Callable[[], Any]) -> Any:
    """Wait for the operation of `handle` and return its result, or raise what the operation raised.

    Args:
        handle: The handle that an `_async` operation returned.

    Examples:
        >>> ct.synchronize(ct.allreduce_async(torch.ones(2)))
        tensor([1., 1.])
    """
    if inspect.isfunction(handle):  # from sparse_allreduce_async
        return handle()
    return _handle("synchronize", handle).wait()


def _handle(verb: str, handle: Any) -> Work[Any]:
    if not isinstance(handle, Work):
        raise UsageError(f"{verb}: expected a handle that an _async verb returned, got {type(handle).__name__}")
    return handle
