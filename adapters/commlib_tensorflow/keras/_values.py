"""Operations on values, such as numbers and arrays, like those of `horovod.keras`. Results are tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.errors import UsageError
from commlib_tensorflow.broadcast import broadcast_global_variables
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.named_verbs import operations

__all__ = ("allgather", "allreduce", "broadcast", "broadcast_global_variables", "reducescatter")


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
    process_set: Any = core.global_process_set,
) -> Any:
    """Return the mean of the tensor-like `value` over all ranks by default (`commlib_tensorflow.all_reduce` sums).

    Args:
        value: A tensor, variable, array or number.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        process_set: The participating ranks; None: all.
    """
    _require_eager("allreduce")
    return operations.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )


def allgather(value: Any, name: str | None = None, process_set: Any = core.global_process_set) -> Any:
    """Return the tensor-like `value` of all ranks, concatenated along dimension 0.

    Args:
        value: A tensor, variable, array or number.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
    """
    _require_eager("allgather")
    return operations.allgather(tf.convert_to_tensor(value), name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: Any = core.global_process_set) -> Any:
    """Return the tensor-like `value` of rank `root_rank`.

    Args:
        value: A tensor, variable, array or number.
        root_rank: The global rank whose values the others get.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.

    Examples:
        >>> hvd.broadcast(np.array([comm.rank]), root_rank=1).numpy()
        array([1])
    """
    _require_eager("broadcast")
    return operations.broadcast(tf.convert_to_tensor(value), root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: Any = core.Average, process_set: Any = core.global_process_set
) -> Any:
    """Return this rank's part, along dimension 0, of `value` reduced over all ranks.

    Args:
        value: A tensor, variable, array or number.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        process_set: The participating ranks; None: all.

    Examples:
        >>> hvd.reducescatter(np.ones(4), op=hvd.Sum).numpy()
        array([2., 2.])
    """
    _require_eager("reducescatter")
    return operations.reducescatter(tf.convert_to_tensor(value), op=op, name=name, process_set=process_set)


def _require_eager(verb: str) -> None:
    if not tf.executing_eagerly():
        raise UsageError(
            f"commlib_tensorflow.keras.{verb} takes and returns values, which a traced function does not have: use "
            f"commlib_tensorflow.{verb} instead"
        )
