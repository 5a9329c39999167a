"""Sequence calls: convert a call with sequence shards to the unsharded call, and an unsharded call to this rank's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commlib.sharding.axis import ParallelAxis
from commlib_torch._trial_run import map_leaves
from commlib_torch.tensor._comparison import has_numbers
from commlib_torch.tensor.moves import gather, scatter
from commlib_torch.tensor.tracing import tensors_in


def split_calls(axis: ParallelAxis, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
    """Return calls as `ModelRunner` of `numeric_checks` specifies; None for tensors in objects. Collective."""
    args, options = call
    tensors = tensors_in([*args, *options.values()])
    divided = {id(tensors[at]): tensors[at] for at in dims}
    if not all(axis.comm.all_gather_object(_are_within(call, divided))):
        return None
    move = gather if is_part else scatter
    with torch.no_grad():
        moved = {id(tensors[at]): move(tensors[at].detach(), axis, dim) for at, dim in dims.items()}

    def change(value: Any) -> Any:
        found = moved.get(id(value))
        return value if found is None else found.requires_grad_(value.requires_grad)

    changed = map_leaves((tuple(args), dict(options)), change)
    return (changed, call) if is_part else (call, changed)


def _are_within(call: Any, tensors: Mapping[int, Tensor]) -> bool:
    """Return whether tensors have values, and are in tuples, lists and dicts."""
    found = set[int]()

    args, options = call
    map_leaves((tuple(args), dict(options)), lambda one: found.add(id(one)))
    return found.issuperset(tensors) and all(map(has_numbers, tensors.values()))
