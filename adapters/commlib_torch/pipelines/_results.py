"""Results: send a batch's results from the rank of the last stage to all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from commlib.pipeline.losses import Details
from commlib.pipeline.pipe import Pipe
from commlib_torch._bridge import array_of
from commlib_torch.pipelines._batches import join_microbatches
from commlib_torch.pipelines._losses import LossWeights
from commlib_torch.pipelines._stages import Batch


def loss_of(
    pipe: Pipe, batch: Batch, rows: Sequence[int], losses: LossWeights, fault: str, *, outside: int = 0
) -> tuple[Tensor, bool]:
    """Return the loss of a batch from the rank of the last stage, on all ranks. Raises UsageError. Collective.

    rows: of each microbatch, if known. fault: the error of this rank's stages, if there is one. outside: the number of
    reducers of outside layers that have gradients of this batch; the result is whether any rank has some.
    """
    total, dtype = 0.0, torch.float32
    if batch.losses is not None:
        values = batch.losses.values
        total = batch.losses.mean({number: float(loss) for number, loss in values.items()})
        dtype = next((loss.dtype for loss in values.values()), dtype)
        fault = fault or losses.fault(batch.losses)
    extra = sum(loss for _, loss in sorted(batch.extras.items()))
    numbers = [total, 0.0, float(dtype is torch.float64)]
    report, reducers, is_double = pipe.broadcast_results(
        numbers, rows=sum(rows) if rows else -1, added=[extra, float(outside)], fault=fault
    )
    return torch.tensor(report, dtype=torch.float64 if is_double else torch.float32), reducers > 0


def details_of(pipe: Pipe, batch: Batch, rows: Sequence[int], where: Any, loss: Tensor) -> Details:
    """Return the details of a batch, other than its loss. where: the rows of outputs. Collective."""
    details: tuple[list[float], dict[str, Any]] = [], {}
    if batch.losses is not None:
        own, metrics = batch.losses, batch.losses.metrics
        details = [float(own.values.get(number, math.nan)) for number in range(len(own.rows))], {}
        for name in next(iter(metrics.values()), {}):
            details[1][name] = own.mean_metric({number: values[name] for number, values in metrics.items()})
    outputs = None
    if batch.keeps_outputs and pipe.comm.rank == pipe.last:
        outputs = _join_outputs(batch, rows, where)
    losses, averages = pipe.comm.broadcast_object(pytree.tree_map_only(Tensor, Tensor.cpu, details), pipe.last)
    return Details(loss, losses, averages, outputs)


def outputs_of(pipe: Pipe, batch: Batch, rows: Sequence[int], where: Any, fault: str) -> Any:
    """Return the outputs of a batch, which the last stage has, on all ranks. fault: as in `loss_of`. Collective."""
    comm, last = pipe.comm, pipe.last
    pipe.broadcast_results([0.0], fault=fault)
    rows = pipe.broadcast_rows(rows)
    whole = _join_outputs(batch, rows, where) if comm.rank == last else None
    leaves, spec = pytree.tree_flatten(pytree.tree_map_only(Tensor, Tensor.cpu, whole))
    # For a tensor its shape and dtype; None, numbers and strings as they are.
    kinds = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
    kinds, shape = comm.broadcast_object((kinds, pytree.treespec_dumps(spec)), last)
    if comm.rank != last:
        leaves = [torch.empty(kind[0], dtype=kind[1]) if len(kind) == 2 else kind[0] for kind in kinds]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            comm.broadcast(array_of(leaf), last)
    return pytree.tree_unflatten(leaves, pytree.treespec_loads(shape))


def _join_outputs(batch: Batch, rows: Sequence[int], where: Any) -> Any:
    """Join the outputs of all microbatches, on the rank of the last stage."""
    numbers = sorted(batch.outputs)
    return join_microbatches([batch.outputs[n] for n in numbers], [rows[n] for n in numbers], where)
