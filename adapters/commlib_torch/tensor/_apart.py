"""Apart: of a call with parts of sequences make that of the whole, and of one with the whole that of this rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from commlib.sharding.axis import Axis
from commlib_torch._unnoticed import mapped
from commlib_torch.tensor._alike import has_numbers
from commlib_torch.tensor.moves import gather, scatter
from commlib_torch.tensor.tracing import tensors_in


def apart(axis: Axis, call: Any, dims: Mapping[int, int], *, is_part: bool) -> tuple[Any, Any] | None:
    """Return calls (see `commlib.tensor_parallel.checks.numbers.Runs`); None for tensors in objects. Collective."""
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

    changed = mapped((tuple(args), dict(options)), change)
    return (changed, call) if is_part else (call, changed)


def _are_within(call: Any, tensors: Mapping[int, Tensor]) -> bool:
    """Return whether tensors have numbers, and are in tuples, lists and dicts."""
    found = set[int]()

    args, options = call
    mapped((tuple(args), dict(options)), lambda one: found.add(id(one)))
    return found.issuperset(tensors) and all(map(has_numbers, tensors.values()))
