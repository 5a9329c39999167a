"""Named operations on tensors: convert tensors for the core, and convert its results back.

A list of tensors is one group: it runs as a unit once every rank has submitted it. Tensors on GPUs are then reduced
between GPUs, or through the host; the result is ready when the operation is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from commlib import horovod as core
from commlib.horovod import Reduction as Reduction
from commlib_torch._bridge import Array, allocate_like, check_dense, device_kind, read, to_tensor
from commlib_torch._call import OutputTensor, Work

P = ParamSpec("P")
R = TypeVar("R")

ProcessSets = core.ProcessSet | None
Splits = Tensor | Sequence[int] | Array


class NamedOperation(Generic[R]):
    """One named operation. `begin` submits it; `differentiable` waits for it and is differentiable."""

    __slots__ = ("_begin", "_differentiable")

    def __init__(self, begin: Callable[[bool], Work[R]], differentiable: Callable[[], R] | None = None) -> None:
        self._begin, self._differentiable = begin, differentiable

    def run(self) -> R:
        """Submit it and wait."""
        return self._begin(True).wait() if self._differentiable is None else self._differentiable()

    def start(self) -> Work[R]:
        """Submit it."""
        return self._begin(False)


class NamedAllreduce(Generic[R]):
    """An allreduce with its arguments, into new tensors or in place."""

    __slots__ = ("_finish", "_how", "_tensors", "in_place")

    def __init__(self, tensors: Sequence[Tensor], how: Reduction, finish: Callable[[list[Tensor]], R]) -> None:
        self._tensors, self._how, self._finish, self.in_place = tensors, how, finish, False

    def run(self) -> R:
        """Submit it and wait."""
        work = start_allreduce(self._tensors, self._how, in_place=self.in_place, blocking=True)
        return self._finish(work.wait())

    def start(self) -> Work[R]:
        """Submit it."""
        return start_allreduce(self._tensors, self._how, in_place=self.in_place).then(self._finish)


def make_in_place(build: Callable[P, NamedAllreduce[R]], text: str) -> Callable[P, NamedAllreduce[R]]:
    """Return the in-place variant of a builder, for a verb with this docstring."""

    @functools.wraps(build)
    def placed(*arguments: P.args, **options: P.kwargs) -> NamedAllreduce[R]:
        call = build(*arguments, **options)
        call.in_place = True
        return call

    placed.__name__, placed.__doc__ = f"{build.__name__}_", text
    return placed


def first(results: Sequence[R]) -> R:
    """Return the only result of a group of one."""
    return results[0]


def start_allreduce(
    tensors: Sequence[Tensor], how: Reduction, *, in_place: bool = False, blocking: bool = False
) -> Work[list[Tensor]]:
    """Combine tensors of equal shapes and dtypes element by element, in place or into new ones."""
    device = _check(tensors)
    places: list[OutputTensor] = []
    if in_place:
        places = [OutputTensor(tensor) for tensor in tensors]
        inputs = outputs = [place.array for place in places]
    else:
        inputs = _arrays(tensors)
        outputs = [allocate_like(array) for array in inputs]
    pending = core.start_allreduce(inputs, outputs, **how.options(), device=device, blocking=blocking)
    if in_place:
        return Work(pending, lambda _: [place.finish() for place in places])
    return Work(pending, _tensors)


def start_reducescatter(tensors: Sequence[Tensor], how: Reduction, *, blocking: bool = False) -> Work[list[Tensor]]:
    """Combine tensors and give each rank its part along dimension 0."""
    device = _check(tensors)
    pending = core.start_reducescatter(_arrays(tensors), **how.options(), device=device, blocking=blocking)
    return Work(pending, _tensors)


def start_allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSets, *, blocking: bool = False
) -> Work[list[Tensor]]:
    """Join each tensor with those of the other ranks along dimension 0, whose lengths may differ."""
    device = _check(tensors)
    pending = core.start_allgather(_arrays(tensors), name, process_set=process_set, device=device, blocking=blocking)
    return Work(pending, _tensors)


def start_broadcast(
    tensor: Tensor, root: int, name: str | None, process_set: ProcessSets, *, blocking: bool = False
) -> Work[Tensor]:
    """Overwrite `tensor` with that of the global rank `root`."""
    device = _check([tensor])
    place = OutputTensor(tensor)
    pending = core.start_broadcast([place.array], root, name, process_set=process_set, device=device, blocking=blocking)
    return Work(pending, place.finish)


def start_alltoall(
    tensor: Tensor, splits: Splits | None, name: str | None, process_set: ProcessSets, *, blocking: bool = False
) -> Work[tuple[Tensor, Tensor]]:
    """Send `splits[i]` rows to the i-th rank; the result is (received rows, number of rows from each rank)."""
    device = _check([tensor])
    counts = splits.detach().cpu().numpy() if isinstance(splits, Tensor) else splits
    pending = core.start_alltoall(read(tensor), counts, name, process_set=process_set, device=device, blocking=blocking)
    kind = splits.dtype if isinstance(splits, Tensor) else torch.int64

    def finish(answer: tuple[Array, Array]) -> tuple[Tensor, Tensor]:
        return to_tensor(answer[0]), to_tensor(answer[1]).to(kind)

    return Work(pending, finish)


def _check(tensors: Sequence[Tensor]) -> str:
    for tensor in tensors:
        check_dense(tensor)
    return device_kind(tensors)


def _arrays(tensors: Sequence[Tensor]) -> list[Array]:
    return [read(tensor) for tensor in tensors]


def _tensors(arrays: Sequence[Array]) -> list[Tensor]:
    return [to_tensor(array) for array in arrays]
