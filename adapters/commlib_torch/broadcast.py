"""Give every rank the parameters and the optimizer state of one of them: after start-up, or after a restart."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import commlib
from commlib.communicator import Communicator
from commlib.data_parallel import check_agreement
from commlib.errors import UsageError
from commlib_torch._bridge import check, packed, to_array

Parameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor]

PACK_BYTES = 8 * 2**20
"""Smaller tensors travel together in messages of up to this size."""


def broadcast_parameters(params: Parameters, root: int = 0, *, comm: Communicator | None = None) -> None:
    """Overwrite tensors on every rank by those of `root`, in place. Collective.

    `params` is `model.state_dict()`, `model.named_parameters()`, or an iterable of tensors; any shapes and dtypes.
    Raises MismatchError on every rank if ranks give different names, shapes or dtypes; UsageError for what is no
    tensor.
    """
    comm = comm or commlib.init()
    tensors: list[Tensor] = []
    lines: list[str] = []
    for name, tensor in _named(params):
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{name} is no tensor but a {type(tensor).__name__}: use broadcast_object for it")
        try:
            check(tensor)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
        tensors.append(tensor)
        lines.append(f"{name}: {tensor.dtype}{list(tensor.shape)}")
    check_agreement(comm, "tensors to broadcast", [f"root {root}", *lines])
    _broadcast_tensors(tensors, root, comm)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root: int = 0, *, comm: Communicator | None = None
) -> None:
    """Give every rank the state and the hyperparameters of `root`'s optimizer. Collective.

    Works whether or not an optimizer has stepped yet: ranks without state take root's, and if root has none all end
    up without. No step is run. Raises MismatchError on every rank if parameter groups differ.
    """
    comm = comm or commlib.init()
    groups = [str([str(list(p.shape)) for p in group["params"]]) for group in optimizer.param_groups]
    check_agreement(comm, "optimizer parameter groups", [f"root {root}", *groups])
    tensors: list[Tensor] = []
    structure = _extract(optimizer.state_dict(), tensors) if comm.rank == root else None
    structure = comm.broadcast_object(structure, root)
    if comm.rank != root:
        tensors = [torch.empty(place.shape, dtype=place.dtype) for place in _places(structure)]
    _broadcast_tensors(tensors, root, comm)
    # Root loads its own state too: what loading does to it (casts, say) must happen on every rank.
    optimizer.load_state_dict(_insert(structure, iter(tensors)))


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor in the structure of a state dict."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _named(params: Parameters) -> Iterable[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return params.items()
    items: list[Any] = list(params)
    return [item if isinstance(item, tuple) else (f"tensor {number}", item) for number, item in enumerate(items)]


def _extract(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` with a `_Place` for each tensor in it; the tensors are appended to `tensors`."""
    if isinstance(value, Tensor):
        tensor = packed(value)
        tensors.append(tensor)
        return _Place(tuple(tensor.shape), tensor.dtype)
    if type(value) is dict:
        return {key: _extract(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_extract(item, tensors) for item in value)
    return value


def _places(value: Any) -> Iterable[_Place]:
    if isinstance(value, _Place):
        yield value
    elif type(value) is dict or type(value) in (list, tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _places(item)


def _insert(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Undo `_extract`."""
    if isinstance(value, _Place):
        return next(tensors)
    if type(value) is dict:
        return {key: _insert(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_insert(item, tensors) for item in value)
    return value


def _broadcast_tensors(tensors: Sequence[Tensor], root: int, comm: Communicator) -> None:
    """Broadcast tensors that have the same shapes and dtypes on every rank, as bytes, many small ones at a time."""
    if comm.size == 1:
        return
    pack: list[Tensor] = []
    nbytes = 0
    for tensor in tensors:
        if pack and nbytes + _nbytes(tensor) > PACK_BYTES:
            _broadcast_pack(pack, root, comm)
            pack, nbytes = [], 0
        pack.append(tensor)
        nbytes += _nbytes(tensor)
    if pack:
        _broadcast_pack(pack, root, comm)


def _broadcast_pack(pack: Sequence[Tensor], root: int, comm: Communicator) -> None:
    sources = [packed(tensor) for tensor in pack]
    views = [to_array(source).reshape(-1).view(np.uint8) for source in sources]
    if len(views) == 1:
        comm.broadcast(views[0], root)
    else:
        message = np.concatenate(views) if comm.rank == root else np.empty(sum(map(len, views)), np.uint8)
        comm.broadcast(message, root)
        bounds = itertools.accumulate(map(len, views), initial=0)
        for view, start in zip(views, bounds, strict=False):
            view[:] = message[start : start + len(view)]
    if comm.rank == root:
        return
    with torch.no_grad():
        for tensor, source in zip(pack, sources, strict=True):
            if source.data_ptr() == tensor.data_ptr():
                torch.autograd.graph.increment_version(tensor)  # autograd did not see the write
            else:
                tensor.copy_(source)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
