"""Sparse gradients and arrays of their rows: conversions in both directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commlib.errors import UsageError
from commlib_torch._bridge import read, to_tensor


def rows_of(name: str, gradient: Tensor, wire: str) -> tuple[Any, Any]:
    """Return (row indices, row values in the dtype `wire`) of a sparse gradient, each row once.

    They are arrays of the core, on the gradient's device.

    Raises UsageError for sparse gradients of other kinds than an embedding's.
    """
    if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
        raise UsageError(
            f"the gradient of {name} has layout {gradient.layout} with {gradient.sparse_dim()} sparse dimensions; "
            "only rows, as of an embedding, are supported: pass sparse_as_dense=True"
        )
    gradient = gradient.coalesce()
    return read(gradient.indices()[0]), read(gradient.values().detach().to(getattr(torch, wire)))


def sparse_of(parameter: Tensor, numbers: Any, rows: Any) -> Tensor:
    """Return a sparse gradient of `parameter` from rows; rows with equal indices are summed."""
    values = to_tensor(rows).to(parameter.device, parameter.dtype)
    indices = to_tensor(numbers).to(parameter.device).unsqueeze(0)
    return torch.sparse_coo_tensor(indices, values, tuple(parameter.shape), check_invariants=True).coalesce()
