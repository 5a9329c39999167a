"""Operations by name, on tensors: what the core is given, and how its answer becomes tensors again.

A list of tensors is one group: it runs as a whole, once every rank has submitted it. Tensors on GPUs are staged through
the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from commlib import horovod as core
from commlib_torch._bridge import Array, check_dense, device_kind, on_host, to_array, to_tensor
from commlib_torch._call import InPlace, Work

R = TypeVar("R")
S = TypeVar("S")

ProcessSets = core.ProcessSet | None
Splits = Tensor | Sequence[int] | Array


@dataclass(frozen=True, slots=True)
class Reduction:
    """How values are combined, under which name, and by whom. None as `process_set` is all ranks."""

    op: core.ReduceOp
    name: str | None
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: ProcessSets = None

    @classmethod
    def of(
        cls,
        op: Any,
        average: bool | None,
        name: str | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSets,
    ) -> Reduction:
        """Return it for the arguments of a verb, of which `average` is the old form of `op`."""
        return cls(core.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)

    def for_gradient(self) -> Reduction:
        """Return it for the gradient of the operation, under a name of its own."""
        return replace(self, name=gradient_name(self.name))


def gradient_name(name: str | None) -> str | None:
    """Return the name of the operation that backward runs: derived, so that it fits whatever order ranks are in."""
    return None if name is None else f"{name}.gradient"


def first(results: Sequence[R]) -> R:
    """Return the only result of a group of one."""
    return results[0]


def then(work: Work[R], finish: Callable[[R], S]) -> Work[S]:
    """Return a handle whose result is that of `work`, passed through `finish`."""
    return Work(work, finish)


def start_allreduce(
    tensors: Sequence[Tensor], how: Reduction, *, in_place: bool = False, blocking: bool = False
) -> Work[list[Tensor]]:
    """Combine tensors of equal shapes and dtypes element by element, in place or into new ones."""
    device = _check(tensors)
    places: list[InPlace] = []
    if in_place:
        places = [InPlace(tensor, on_host) for tensor in tensors]
        inputs = outputs = [place.array for place in places]
    else:
        inputs = _arrays(tensors)
        outputs = [np.empty_like(array) for array in inputs]
    pending = core.start_allreduce(
        inputs,
        outputs,
        how.name,
        op=how.op,
        prescale_factor=how.prescale_factor,
        postscale_factor=how.postscale_factor,
        process_set=how.process_set,
        device=device,
        blocking=blocking,
    )
    if in_place:
        return Work(pending, lambda _: [place.finish(None) for place in places])
    return Work(pending, _back_to(tensors))


def start_reducescatter(tensors: Sequence[Tensor], how: Reduction, *, blocking: bool = False) -> Work[list[Tensor]]:
    """Combine tensors and give each rank its part along dimension 0."""
    device = _check(tensors)
    pending = core.start_reducescatter(
        _arrays(tensors),
        how.name,
        op=how.op,
        prescale_factor=how.prescale_factor,
        postscale_factor=how.postscale_factor,
        process_set=how.process_set,
        device=device,
        blocking=blocking,
    )
    return Work(pending, _back_to(tensors))


def start_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSets, *, blocking: bool = False
) -> Work[list[Tensor]]:
    """Join each tensor with those of the other ranks along dimension 0, whose lengths may differ."""
    device = _check(tensors)
    pending = core.start_allgather(_arrays(tensors), name, process_set=process_set, device=device, blocking=blocking)
    return Work(pending, _back_to(tensors))


def start_broadcast(
    tensor: Tensor, root: int, name: str | None, process_set: ProcessSets, *, blocking: bool = False
) -> Work[Tensor]:
    """Overwrite `tensor` by that of the global rank `root`."""
    device = _check([tensor])
    place = InPlace(tensor, on_host)
    pending = core.start_broadcast([place.array], root, name, process_set=process_set, device=device, blocking=blocking)
    return Work(pending, place.finish)


def start_alltoall(
    tensor: Tensor, splits: Splits | None, name: str | None, process_set: ProcessSets, *, blocking: bool = False
) -> Work[tuple[Tensor, Tensor]]:
    """Send `splits[i]` rows to the i-th rank; the result is (the rows that arrived, how many from each rank)."""
    device = _check([tensor])
    counts = splits.detach().cpu().numpy() if isinstance(splits, Tensor) else splits
    pending = core.start_alltoall(
        on_host_array(tensor), counts, name, process_set=process_set, device=device, blocking=blocking
    )
    kind = splits.dtype if isinstance(splits, Tensor) else torch.int64

    def finish(answer: tuple[Array, Array]) -> tuple[Tensor, Tensor]:
        return to_tensor(answer[0]).to(tensor.device), to_tensor(answer[1]).to(kind)

    return Work(pending, finish)


def on_host_array(tensor: Tensor) -> Array:
    """Return an array with the values of a tensor: its memory, if that is contiguous and on the host."""
    return to_array(on_host(tensor))


def _check(tensors: Sequence[Tensor]) -> str:
    for tensor in tensors:
        check_dense(tensor)
    return device_kind(tensors)


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    return [on_host_array(tensor) for tensor in tensors]


def _back_to(tensors: Sequence[Tensor]) -> Callable[[Sequence[Array]], list[Tensor]]:
    devices = [tensor.device for tensor in tensors]

    def finish(arrays: Sequence[Array]) -> list[Tensor]:
        return [to_tensor(array).to(device) for array, device in zip(arrays, devices, strict=True)]

    return finish
