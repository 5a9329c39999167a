"""allreduce and reducescatter by name, with Horovod's arguments: in any order on any rank.

An operation is known by its `name` (by default a number that is counted per verb) and runs when every rank of its
process set has submitted it. `op` is Average, Sum, Min, Max, Product or Adasum; `average=` is its old form. Values are
multiplied by `prescale_factor` before and by `postscale_factor` after. `process_set=None` is all ranks.

`_async` verbs return a handle for `synchronize` and `poll`; their tensors must not be touched until it is done. Verbs
that end in an underscore write to their tensors, others return new ones; those that do neither and wait can be
differentiated. A grouped verb runs on all its tensors at once or on none.

All raise UsageError for what is wrong on this rank, such as a name that is pending already; MismatchError on every rank
where ranks submit different things under one name, after which the job goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from commlib import horovod as core
from commlib_torch import functions
from commlib_torch._bridge import check_dense
from commlib_torch._call import Work
from commlib_torch._named import ProcessSets, Reduction, first, start_allreduce, start_reducescatter, then
from commlib_torch.compression import Compression, Compressors


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressors = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> Tensor:
    """Return a new tensor: `tensor` of all ranks combined, by default averaged. Differentiable for Average and Sum."""
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return first(_compressed(compression, [tensor], lambda tensors: functions.allreduce(tensors, how)))


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> Work[Tensor]:
    """Start `allreduce`."""
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return then(start_allreduce([tensor], how), first)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> Tensor:
    """Combine `tensor` of all ranks in place, by default averaging, and return it."""
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return first(start_allreduce([tensor], how, in_place=True, blocking=True).wait())


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> Work[Tensor]:
    """Start `allreduce_`."""
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return then(start_allreduce([tensor], how, in_place=True), first)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressors = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> list[Tensor]:
    """Return new tensors: each of `tensors` combined over the ranks. Differentiable for Average and Sum."""
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return _compressed(compression, tensors, lambda tensors: functions.allreduce(tensors, how))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> Work[list[Tensor]]:
    """Start `grouped_allreduce`."""
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return start_allreduce(tensors, how)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> list[Tensor]:
    """Combine each of `tensors` over the ranks in place, and return them."""
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return start_allreduce(tensors, how, in_place=True, blocking=True).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> Work[list[Tensor]]:
    """Start `grouped_allreduce_`."""
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return start_allreduce(tensors, how, in_place=True)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressors = Compression.none,
    op: Any = core.Average,
    process_set: ProcessSets = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Combine `tensor` of all ranks and return this rank's part along dimension 0. Differentiable.

    If the length of dimension 0 is no multiple of the number of ranks, the first ranks get one row more.
    """
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, process_set)
    return first(_compressed(compression, [tensor], lambda tensors: functions.reducescatter(tensors, how)))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Any = core.Average,
    process_set: ProcessSets = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Work[Tensor]:
    """Start `reducescatter`."""
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, process_set)
    return then(start_reducescatter([tensor], how), first)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressors = Compression.none,
    op: Any = core.Average,
    process_set: ProcessSets = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's part of each of `tensors`, combined over the ranks. Differentiable."""
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, process_set)
    return _compressed(compression, tensors, lambda tensors: functions.reducescatter(tensors, how))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = core.Average,
    process_set: ProcessSets = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Work[list[Tensor]]:
    """Start `grouped_reducescatter`."""
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, process_set)
    return start_reducescatter(tensors, how)


def _compressed(
    compression: Compressors, tensors: Sequence[Tensor], verb: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> list[Tensor]:
    """Run a verb on compressed tensors; return the results, decompressed."""
    for tensor in tensors:
        check_dense(tensor)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = verb([tensor for tensor, _ in pairs])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]
