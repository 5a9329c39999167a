"""Reduction of sparse tensors by gathering their indices and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.errors import MismatchError, UsageError
from commlib_torch.named_verbs._named_operations import ProcessSets, start_allgather


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: Any = core.Average, process_set: ProcessSets = None
) -> Callable[[], Tensor]:
    """Start to sum (or average) a sparse COO tensor over the ranks. Returns a callable that waits for the result.

    Elements of the result may occur several times: it is not coalesced.

    Args:
        tensor: A sparse COO tensor.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        op: Average or Sum.
        process_set: The participating ranks; None: all.

    Raises:
        UsageError: For other layouts and operations.
        MismatchError: From the callable, on every rank, if shapes differ.

    Examples:
        >>> wait = ct.sparse_allreduce_async(torch.eye(2).to_sparse(), "eye", op=ct.Sum)
        >>> wait().to_dense()
        tensor([[2., 0.],
                [0., 2.]])
    """
    operation = core.resolve_op(op)
    if operation not in (core.Average, core.Sum):
        raise UsageError(f"sparse_allreduce_async: op must be Average or Sum, got {operation.name.title()}")
    if tensor.layout != torch.sparse_coo:
        raise UsageError(f"sparse_allreduce_async: expected a sparse COO tensor, got layout {tensor.layout}")
    local = tensor.detach().coalesce()
    shape = torch.tensor([[*local.shape]], device=local.device)
    # One group, which arrives together; the shape is sent for comparison, because indices and values alone always fit.
    work = start_allgather([local.indices().t(), local.values(), shape], name, process_set)
    size = core.process_set_of(process_set).size()
    assert size is not None

    def finish() -> Tensor:
        indices, values, shapes = work.wait()
        if not bool((shapes == shape).all()):
            raise MismatchError(f"sparse_allreduce_async {name or ''}: the shapes of the ranks are {shapes.tolist()}")
        if operation == core.Average:
            values = values / size
        return torch.sparse_coo_tensor(indices.t(), values, tuple(local.shape), check_invariants=True)

    return finish
