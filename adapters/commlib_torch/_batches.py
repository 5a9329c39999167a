"""Batches: cut what a user gives a pipeline into microbatches."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from commlib.errors import UsageError
from commlib.pipeline.batch import rows_of


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what a model is called with: a dict by name, several one after another, else the one."""
    if isinstance(x, dict):
        return (), x
    return (tuple(x), {}) if isinstance(x, tuple | list) else ((x,), {})


def rows_in(value: Any, microbatches: int, what: str) -> list[slice]:
    """Return the rows of each microbatch. Raises UsageError if tensors have different numbers of rows, or none has."""
    if isinstance(value, Tensor) and value.ndim:
        return rows_of(value.shape[0], microbatches)
    counts = {leaf.shape[0] for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(counts) != 1:
        got = (
            f"{len(counts)} different ones: {', '.join(map(str, sorted(counts)))}" if counts else "no tensor with rows"
        )
        raise UsageError(f"pipeline: {what}: expected tensors of one number of rows (first dimension), got {got}")
    return rows_of(counts.pop(), microbatches)


def taken(value: Any, rows: slice) -> Any:
    """Return the rows of a tensor, or of those in a nest of containers; what has no rows is for all."""
    if isinstance(value, Tensor):
        return value[rows] if value.ndim else value
    if type(value) is tuple:
        return tuple(taken(one, rows) for one in value)
    if not value:
        return value
    return pytree.tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim else leaf, value)
