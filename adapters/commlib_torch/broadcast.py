"""Give every rank the parameters and the optimizer state of one of them: after start-up, or after a restart.

With `comm=` in order, among that group's ranks; without it by name, so it fits in between other operations by name, and
`root_rank` is a number among all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from commlib import horovod as core
from commlib.communicator import Communicator
from commlib.data_parallel import check_agreement
from commlib.errors import UsageError
from commlib.tensors import check_ordered, choose_root
from commlib_torch._bridge import check_dense, on_host, to_array
from commlib_torch.horovod._start import ProcessSets

Parameters = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Iterable[Tensor]

PACK_BYTES = 8 * 2**20
"""Smaller tensors travel together in messages of up to this size."""


class Ranks(Protocol):
    """Those that get the tensors, and what is done among them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def broadcast_object(self, obj: Any, root: int = 0) -> Any: ...

    def broadcast(self, x: Any, root: int = 0) -> Any: ...


class NamedRanks:
    """The ranks of a process set, and operations by name; roots are numbers among all ranks."""

    def __init__(self, name: str, process_set: ProcessSets) -> None:
        self._name, self._process_set = name, core.process_set_of(process_set)
        self._process_set.coordinator(name)  # raises on ranks that are not in it
        self.rank: int = core.rank()
        self.size: int = self._process_set.size() or 1

    def all_gather_object(self, obj: Any) -> list[Any]:
        return core.allgather_object(obj, f"{self._name}.agreement", self._process_set)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return core.broadcast_object(obj, root, f"{self._name}.object", self._process_set)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        name = f"{self._name}.values"
        return core.start_broadcast([x], root, name, process_set=self._process_set, blocking=True).wait()


def broadcast_parameters(
    params: Parameters,
    root_rank: int | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    comm: Communicator | None = None,
) -> None:
    """Overwrite tensors on every rank by those of `root_rank`, in place. Collective.

    `params` is `model.state_dict()`, `model.named_parameters()`, or an iterable of tensors; any shapes and dtypes.
    Raises MismatchError on every rank if ranks give different names, shapes or dtypes; UsageError for what is no
    tensor.
    """
    ranks, source = _ranks("broadcast_parameters", root_rank, root, process_set, comm)
    tensors: list[Tensor] = []
    lines: list[str] = []
    for name, tensor in _named(params):
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{name} is no tensor but a {type(tensor).__name__}: use broadcast_object for it")
        try:
            check_dense(tensor)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
        tensors.append(tensor)
        lines.append(f"{name}: {tensor.dtype}{list(tensor.shape)}")
    check_agreement(ranks, "tensors to broadcast", [f"root {source}", *lines])
    _broadcast_tensors(tensors, source, ranks)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int | None = None,
    model: torch.nn.Module | None = None,
    process_set: ProcessSets = None,
    *,
    root: int | None = None,
    comm: Communicator | None = None,
) -> None:
    """Give every rank the state and the hyperparameters of the optimizer of `root_rank`. Collective.

    Works whether or not an optimizer has stepped yet: ranks without state take the root's, and if it has none all end
    up without. No step is run, so `model`, which Horovod wants for some optimizers, is not used. Raises MismatchError
    on every rank if parameter groups differ.
    """
    ranks, source = _ranks("broadcast_optimizer_state", root_rank, root, process_set, comm)
    groups = [str([str(list(p.shape)) for p in group["params"]]) for group in optimizer.param_groups]
    check_agreement(ranks, "optimizer parameter groups", [f"root {source}", *groups])
    tensors: list[Tensor] = []
    structure = _extract(optimizer.state_dict(), tensors) if ranks.rank == source else None
    structure = ranks.broadcast_object(structure, source)
    if ranks.rank != source:
        tensors = [torch.empty(place.shape, dtype=place.dtype) for place in _places(structure)]
    _broadcast_tensors(tensors, source, ranks)
    # The root loads its own state too: what loading does to it (casts, say) must happen on every rank.
    optimizer.load_state_dict(_insert(structure, iter(tensors)))


def _ranks(
    what: str, root_rank: int | None, root: int | None, process_set: ProcessSets, comm: Communicator | None
) -> tuple[Ranks, int]:
    source = choose_root(root_rank, root)
    if comm is None:
        return NamedRanks(what, process_set), source
    check_ordered(None, process_set)
    return comm, source


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
        tensor = on_host(value)
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


def _broadcast_tensors(tensors: Sequence[Tensor], root: int, comm: Ranks) -> None:
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


def _broadcast_pack(pack: Sequence[Tensor], root: int, comm: Ranks) -> None:
    sources = [on_host(tensor) for tensor in pack]
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
            if source.data_ptr() == tensor.data_ptr() and source.device == tensor.device:
                torch.autograd.graph.increment_version(tensor)  # autograd did not see the write
            else:
                tensor.copy_(source)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
