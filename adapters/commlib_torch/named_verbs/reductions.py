"""allreduce and reducescatter by name, with Horovod's arguments: in any order on any rank.

An operation is identified by its `name` (by default a counter per verb) and runs when every rank of its process set has
submitted it. `op` is Average, Sum, Min, Max, Product or Adasum; `average=` is its old form. Values are multiplied by
`prescale_factor` before and by `postscale_factor` after. `process_set=None` is all ranks.

`_async` verbs return a handle for `synchronize` and `poll`; do not touch their tensors until it is done. Verbs that end
in an underscore write to their tensors, others return new ones; blocking verbs without an underscore are
differentiable. A grouped verb runs on all its tensors at once or on none.

All raise UsageError for errors of this rank, such as a name that is already pending; MismatchError on every rank if
ranks submit different operations under one name, after which the job continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from commlib import horovod as core
from commlib.arguments import list_of
from commlib.compress.casts import Compressors, check_compressor
from commlib.horovod import Reduction
from commlib_torch._bridge import check_dense
from commlib_torch._call import verb_maker
from commlib_torch.compression import Compression
from commlib_torch.named_verbs import _autograd
from commlib_torch.named_verbs._named_operations import (
    NamedAllreduce,
    NamedOperation,
    ProcessSets,
    first,
    make_in_place,
    start_reducescatter,
)

__all__ = (
    "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "reducescatter", "reducescatter_async",
)  # fmt: skip

_verb = verb_maker(__name__)


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
    """Return a new tensor: the mean over all ranks by default (`all_reduce` sums). Differentiable: Average and Sum.

    Args:
        tensor: A tensor of any dtype of the core, of the same shape and dtype on all ranks.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.
        process_set: The participating ranks; None: all.

    Examples:
        >>> ct.allreduce(torch.tensor([float(comm.rank)]), name="mean")
        tensor([0.5000])
    """
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return first(_compressed(compression, [tensor], lambda tensors: _autograd.allreduce(tensors, how)))


def _allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> NamedAllreduce[Tensor]:
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    return NamedAllreduce([tensor], how, first)


allreduce_async = _verb.starting(_allreduce)
allreduce_, allreduce_async_ = _verb(
    make_in_place(
        _allreduce,
        "Combine `tensor` of all ranks in place, the mean by default; return it. Arguments are those of `allreduce`.",
    )
)


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
    """Return new tensors: each of `tensors` combined over the ranks. Differentiable for Average and Sum.

    Args:
        tensors: Tensors, as many on all ranks.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.
        process_set: The participating ranks; None: all.
    """
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    given = list_of("grouped_allreduce", "a list of tensors", tensors)
    return _compressed(compression, given, lambda tensors: _autograd.allreduce(tensors, how))


def _grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSets = None,
) -> NamedAllreduce[list[Tensor]]:
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, process_set)
    given = list_of("grouped_allreduce", "a list of tensors", tensors)
    return NamedAllreduce(given, how, lambda results: results)


grouped_allreduce_async = _verb.starting(_grouped_allreduce)
grouped_allreduce_, grouped_allreduce_async_ = _verb(
    make_in_place(
        _grouped_allreduce,
        "Combine each of `tensors` in place, and return them. Arguments are those of `grouped_allreduce`.",
    )
)


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

    If the length of dimension 0 is not a multiple of the number of ranks, the first ranks get one row more.

    Args:
        tensor: A tensor of any dtype of the core, of the same shape and dtype on all ranks.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        process_set: The participating ranks; None: all.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.

    Examples:
        >>> ct.reducescatter(torch.ones(4), op=ct.Sum)
        tensor([2., 2.])
    """
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, process_set)
    return first(_compressed(compression, [tensor], lambda tensors: _autograd.reducescatter(tensors, how)))


def _reducescatter(
    tensor: Tensor,
    name: str | None = None,
    op: Any = core.Average,
    process_set: ProcessSets = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NamedOperation[Tensor]:
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, process_set)
    return NamedOperation(lambda blocking: start_reducescatter([tensor], how, blocking=blocking).then(first))


reducescatter_async = _verb.starting(_reducescatter)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Compressors = Compression.none,
    op: Any = core.Average,
    process_set: ProcessSets = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's part of each of `tensors`, combined over the ranks. Differentiable.

    Args:
        tensors: Tensors, as many on all ranks.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        process_set: The participating ranks; None: all.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.

    Examples:
        >>> (part,) = ct.grouped_reducescatter([torch.ones(4)], op=ct.Sum)
        >>> part
        tensor([2., 2.])
    """
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, process_set)
    given = list_of("grouped_reducescatter", "a list of tensors", tensors)
    return _compressed(compression, given, lambda tensors: _autograd.reducescatter(tensors, how))


def _grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = core.Average,
    process_set: ProcessSets = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> NamedOperation[list[Tensor]]:
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, process_set)
    given = list_of("grouped_reducescatter", "a list of tensors", tensors)
    return NamedOperation(lambda blocking: start_reducescatter(given, how, blocking=blocking))


grouped_reducescatter_async = _verb.starting(_grouped_reducescatter)


def _compressed(
    compression: Compressors, tensors: Sequence[Tensor], verb: Callable[[Sequence[Tensor]], Sequence[Tensor]]
) -> list[Tensor]:
    """Run a verb on compressed tensors; return the results, decompressed."""
    check_compressor(compression)
    for tensor in tensors:
        check_dense(tensor)
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = verb([tensor for tensor, _ in pairs])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]
