"""Microbatches: cut a user's batch into microbatches, and join their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from commlib.errors import UsageError
from commlib.pipeline.batch import NONE, rows_of, sort_by_key
from commlib.pipeline.batch import digest as digest_of
from commlib.pipeline.rows import REMEDY, WHOLE, check_result, each, number_of_rows, pad_microbatches
from commlib_torch._bridge import host_array


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a model: a dict becomes keyword arguments, a tuple several, other values one."""
    if isinstance(x, dict):
        return (), x
    return (tuple(x), {}) if isinstance(x, tuple | list) else ((x,), {})


def cut_by_rows(value: Any, microbatches: int, what: str, where: Any = 0) -> tuple[list[Any], list[int]]:
    """Return the microbatches of a batch, and the rows of each. where: the dimension of rows, in the form of `Rows`.

    Raises UsageError if tensors have different numbers of rows, or if none has rows.
    """
    if not isinstance(value, Tensor) or not _is_plain(value):
        _refuse_uncut(value, what, where)
    parts = rows_of(count_rows(value, what, where), microbatches)
    return [take_rows(value, part, where) for part in parts], [part.stop - part.start for part in parts]


def kind_of(tensor: Tensor) -> tuple[str, str] | None:
    """Describe a tensor that cannot be cut by rows, and name its conversion to one that can."""
    if tensor.is_nested:
        return "nested tensor", "tensor.to_padded_tensor(0.0)"
    if tensor.layout is not torch.strided:
        return f"tensor of layout {tensor.layout}", "tensor.to_dense()"
    return None


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _refuse_uncut(value: Any, what: str, where: Any) -> None:
    """Raise UsageError for numpy arrays, which would not be cut with the tensors, and for tensors without rows."""

    def look(place: Any, leaf: Any) -> None:
        refused = None
        if isinstance(leaf, np.ndarray) and leaf.ndim:
            refused = f"numpy array of shape {leaf.shape}", "torch.as_tensor(array)"
        elif isinstance(leaf, Tensor):
            refused = kind_of(leaf)
        if refused is not None and place != WHOLE:
            raise UsageError(
                f"pipeline: {what} has a {refused[0]}, which cannot be cut into the rows of microbatches: pass "
                f"{refused[1]}; or, if it is for all microbatches, {REMEDY}"
            )

    if where == 0:
        for leaf in pytree.tree_leaves(value):
            look(0, leaf)
    else:
        each(look, where, value)


def cut_by_user(parts: Any, microbatches: int, what: str, where: Any = 0) -> tuple[list[Any], list[int]]:
    """Return microbatches that a user has cut, and the rows of each; missing ones at the end have none.

    Raises UsageError if they are not a list, or too many.
    """
    return pad_microbatches(parts, microbatches, what, lambda part, name: count_rows(part, name, where))


def count_rows(value: Any, what: str, where: Any = 0) -> int:
    """Return the number of rows of the tensors. Raises UsageError if numbers differ, or if no tensor has rows."""
    if isinstance(value, Tensor) and value.ndim and where == 0:
        return value.shape[0]
    leaves: list[tuple[Any, Any]] = []
    if where == 0:
        leaves = [(0, leaf) for leaf in pytree.tree_leaves(value)]
    else:
        each(lambda place, leaf: leaves.append((place, leaf)), where, value)
    return number_of_rows(((place, leaf.shape) for place, leaf in leaves if isinstance(leaf, Tensor)), what)


def take_rows(value: Any, rows: slice, where: Any = 0) -> Any:
    """Return some rows of a tensor, or of all tensors in a nest of containers; values without rows are shared."""
    if where != 0:
        return each(lambda place, leaf: _take_rows(place, leaf, rows), where, value)
    if isinstance(value, Tensor):
        return value[rows] if value.ndim else value
    if type(value) is tuple:
        return tuple(take_rows(one, rows) for one in value)
    if not value:
        return value
    return pytree.tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) and leaf.ndim else leaf, value)


def _take_rows(place: Any, leaf: Any, rows: slice) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.ndim or place == WHOLE:
        return leaf
    return leaf.narrow(place, rows.start, rows.stop - rows.start)


def join_microbatches(parts: Sequence[Any], rows: Sequence[int], where: Any = 0, *, what: str = "output") -> Any:
    """Join the values of microbatches into those of the batch. Values other than tensors are taken from the first.

    Raises UsageError for a tensor whose rows are not those of its microbatch.
    """

    def one(place: Any, *leaves: Any) -> Any:
        if not isinstance(leaves[0], Tensor) or place == WHOLE or (what == "y" and not leaves[0].ndim):
            return leaves[0]
        for leaf, count in zip(leaves, rows, strict=True):
            check_result(leaf.shape, place, count, what)
        lengths = [[size for at, size in enumerate(leaf.shape) if at != place] for leaf in leaves]
        if other := next((number for number, sizes in enumerate(lengths) if sizes != lengths[0]), 0):
            raise UsageError(
                f"pipeline: the {what}s of microbatches have different lengths, {tuple(leaves[0].shape)} and "
                f"{tuple(leaves[other].shape)}, and cannot be joined: pad them to one length, or use separate calls"
            )
        return torch.cat(leaves, place)

    if where == 0:
        return pytree.tree_map(lambda *leaves: one(0, *leaves), *parts)
    return each(one, where, *parts)


def digest(value: Any) -> int:
    """Return a digest of the tensors in a nest, except sparse and nested ones; NONE for None."""
    if value is None:
        return NONE
    tensors = [leaf.detach() for leaf in pytree.tree_leaves(sort_by_key(value)) if isinstance(leaf, Tensor)]
    plain = [one for one in tensors if one.layout is torch.strided and not one.is_nested]
    flat = [one.resolve_conj().resolve_neg().reshape(-1) for one in plain]
    return digest_of(host_array(one.view(torch.uint8)) for one in flat)
