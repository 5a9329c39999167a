"""Gradients that travel outside the buckets: sparse ones, and those that a user's compressor packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.errors import UsageError
from commlib_torch._call import new, read
from commlib_torch._named import Reduction, start_allreduce
from commlib_torch._options import Options


def rows_of(name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return (numbers of rows, their values) of a sparse gradient, each row once."""
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise UsageError(
            f"the gradient of {name} has layout {gradient.layout} with {gradient.sparse_dim()} sparse dimensions; only "
            "rows, as of an embedding, are supported: pass sparse_as_dense=True"
        )
    gradient = gradient.coalesce()
    return gradient.indices()[0], gradient.values()


def gather_rows(comm: Any, name: str, parameter: Tensor, gradient: Tensor | None, *, wire: torch.dtype) -> Tensor:
    """Return the sum of the sparse gradients of all ranks, on every rank. Collective.

    A rank without one gives no rows. Values travel as `wire`.
    """
    if gradient is None:
        indices = torch.empty(0, dtype=torch.int64)
        values = torch.empty(0, *parameter.shape[1:], dtype=wire)
    else:
        indices, values = rows_of(name, gradient)
    numbers = new(comm.all_gather_v(read(indices.cpu())))
    rows = new(comm.all_gather_v(read(values.detach().cpu().to(wire)))).to(parameter.device, parameter.dtype)
    numbers = numbers.to(parameter.device).unsqueeze(0)
    return torch.sparse_coo_tensor(numbers, rows, tuple(parameter.shape), check_invariants=True).coalesce()


def reduce_compressed(options: Options, named: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """Return the gradients of (name, parameter) pairs, reduced as the user's compressor packs them. By name.

    A parameter without a gradient on this rank counts as zeros.
    """
    compressor = options.compressor
    assert compressor is not None
    packed: list[Tensor] = []
    contexts = []
    for _, parameter in named:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        tensor, context = compressor.compress(gradient)
        # What it returns may be the gradient itself, and a failed operation must not have changed that.
        packed.append(tensor.clone() if tensor is gradient else tensor)
        contexts.append(context)
    how = Reduction(
        core.resolve_op(options.op),
        f"gradients of {named[0][0]} and {len(named) - 1} more",
        prescale_factor=1 / options.predivide,
        postscale_factor=options.predivide,
        process_set=options.process_set,
    )
    results = start_allreduce(packed, how, in_place=True, blocking=True).wait()
    return [compressor.decompress(result, context) for result, context in zip(results, contexts, strict=True)]
