"""Horovod's operations on tensors, eagerly and in traced functions.

Every operation is matched by name with those of the other ranks of its process set, independent of the order of calls.
It takes tensors, variables and anything else that `tf.convert_to_tensor` takes, of any dtype of the core (including
bfloat16). Gradients flow through operations marked as differentiable. The `device_...` arguments exist for
compatibility with Horovod: an operation runs on the device of its tensors, all of them on a GPU or all on the host, and
returns its results on that device; int32 tensors go through the host in a traced function.

Errors are the core's: UsageError (a ValueError) for an invalid call on this rank, MismatchError on every rank if
ranks call different things under one name. Each is one of tf.errors too, eagerly, in traced functions and in sessions:
see `commlib_tensorflow.errors`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.arguments import list_of
from commlib.compress.casts import Compressors, check_compressor
from commlib.errors import UsageError
from commlib.horovod import Reduction
from commlib.horovod.join import join as core_join
from commlib.literals import AlgorithmName
from commlib.named_gradients.gradients import ordered_reducers
from commlib.ranks import Ranks
from commlib.tensor_verbs import check_named, check_ordered, choose_root
from commlib_tensorflow._bridge import Array, as_tensor
from commlib_tensorflow._host_calls import (
    FunctionT,
    Spec,
    call,
    is_ordered,
    no_autograph,
    operation_name,
    refuse_vectorized,
)
from commlib_tensorflow._recorded_verbs import ordered, run
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.named_verbs._autograd import (
    allgather_tensors,
    allreduce_tensors,
    alltoall_tensor,
    broadcast_tensor,
    broadcast_tensors,
    reducescatter_tensors,
)

__all__ = (
    "allgather", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_", "grouped_allgather",
    "grouped_allreduce", "grouped_reducescatter", "join", "reducescatter",
)  # fmt: skip


def _differentiable(verb: FunctionT) -> FunctionT:
    """Decorate a verb that has a gradient: it is refused where the gradient would be lost."""

    @functools.wraps(verb)
    def checked(*args: Any, **options: Any) -> Any:
        first = args[:1] or tuple(options.values())
        if any(tf.is_tensor(one) and (one.dtype.is_floating or one.dtype.is_complex) for one in tf.nest.flatten(first)):
            refuse_vectorized()
        return verb(*args, **options)

    return no_autograph(cast(FunctionT, checked))


@_differentiable
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressors = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: core.ProcessSet | None = None,
    ignore_name_scope: bool = False,
) -> Any:
    """Return a new tensor: the mean over all ranks by default (`all_reduce` sums). Differentiable.

    tf.IndexedSlices are gathered from all ranks, and their values divided for an average, so that their dense sum is
    the reduced one; only Sum and Average exist for them, and no scale factors (NotImplementedError).

    Args:
        tensor: A tensor, variable, array or number.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        device_dense: Unused; Horovod has it.
        device_sparse: Unused; Horovod has it.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
        ignore_name_scope: Whether TensorFlow's name scope is left out of the name.

    Examples:
        >>> ct.allreduce(tf.constant([comm.rank, 1.0])).numpy()
        array([0.5, 1. ], dtype=float32)
    """
    group = core.process_set_of(process_set)
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, group)
    if isinstance(tensor, tf.IndexedSlices):
        name = operation_name("Allreduce", name, tensor.values, ignore_name_scope=ignore_name_scope)
        return _allreduce_slices([tensor], how.called(name))[0]
    tensor = as_tensor(tensor, "allreduce")
    name = operation_name("Allreduce", name, tensor, ignore_name_scope=ignore_name_scope)
    return _reduce_compressed(allreduce_tensors, [tensor], how.called(name), compression)[0]


@_differentiable
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressors = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: core.ProcessSet | None = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return new tensors: `allreduce` of each, in one operation that all ranks start together. Differentiable.

    tf.IndexedSlices among them, with the limits of `allreduce`, are gathered in a second one.

    Args:
        tensors: Tensors, as many on all ranks.
        average: Horovod's older form of `op`: True for Average, False for Sum.
        device_dense: Unused; Horovod has it.
        device_sparse: Unused; Horovod has it.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.
        process_set: The participating ranks; None: all.
        ignore_name_scope: Whether TensorFlow's name scope is left out of the name.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
    """
    group = core.process_set_of(process_set)
    how = Reduction.of(op, average, name, prescale_factor, postscale_factor, group)
    given = list_of("grouped_allreduce", "a list of tensors", tensors)
    slices = [tensor for tensor in given if isinstance(tensor, tf.IndexedSlices)]
    dense = _tensors(given, but=tf.IndexedSlices)
    if not given:
        return []
    first = dense[0] if dense else slices[0].values
    name = operation_name("GroupedAllreduce", name, first, ignore_name_scope=ignore_name_scope)
    gathered = iter(_allreduce_slices(slices, how.called(None if name is None else f"{name}_slices")))
    reduced = iter(_reduce_compressed(allreduce_tensors, dense, how.called(name), compression) if dense else ())
    return [next(gathered if isinstance(tensor, tf.IndexedSlices) else reduced) for tensor in given]


@_differentiable
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: core.ProcessSet | None = None,
) -> Any:
    """Return `tensor` of all ranks, concatenated along dimension 0, whose lengths may differ. Differentiable.

    The gradient is this rank's rows of the average over ranks, as in Horovod.

    Args:
        tensor: A tensor, variable, array or number.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        ignore_name_scope: Whether TensorFlow's name scope is left out of the name.
        process_set: The participating ranks; None: all.

    Examples:
        >>> ct.allgather(tf.fill([comm.rank + 1], comm.rank)).numpy()
        array([0, 1, 1], dtype=int32)
    """
    tensor = as_tensor(tensor, "allgather")
    name = operation_name("Allgather", name, tensor, ignore_name_scope=ignore_name_scope)
    return allgather_tensors([tensor], name, core.process_set_of(process_set))[0]


@_differentiable
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: core.ProcessSet | None = None,
) -> list[Any]:
    """Return `allgather` of each tensor, in one operation that all ranks start together. Differentiable.

    Args:
        tensors: Tensors, as many on all ranks.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        ignore_name_scope: Whether TensorFlow's name scope is left out of the name.
        process_set: The participating ranks; None: all.

    Examples:
        >>> [each.numpy().tolist() for each in ct.grouped_allgather([tf.constant([comm.rank])])]
        [[0, 1]]
    """
    given = _tensors(list_of("grouped_allgather", "a list of tensors", tensors))
    if not given:
        return []
    name = operation_name("GroupedAllgather", name, given[0], ignore_name_scope=ignore_name_scope)
    return allgather_tensors(given, name, core.process_set_of(process_set))


@_differentiable
def broadcast(
    tensor: Any,
    root_rank: int | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: core.ProcessSet | None = None,
    *,
    root: int | None = None,
    algorithm: AlgorithmName = "auto",
    ranks: Ranks | None = None,
) -> Any:
    """Return a new tensor with the values of global rank `root_rank`. Differentiable.

    The gradient is the average over ranks on the root and zeros elsewhere, as in Horovod. With `ranks` it is the
    ordered verb on those ranks, `root` is a rank among them, and the gradient on the root is the sum instead.

    Args:
        tensor: A tensor, variable, array or number.
        root_rank: The global rank whose values the others get.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        ignore_name_scope: Whether TensorFlow's name scope is left out of the name.
        process_set: The participating ranks; None: all.
        root: With `ranks`: the rank among them whose values the others get.
        algorithm: With `ranks`: "auto", or the name of a path or schedule.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.

    Examples:
        >>> ct.broadcast(tf.constant([comm.rank]), root_rank=1).numpy()
        array([1], dtype=int32)
    """
    source = choose_root(root_rank, root)
    if ranks is not None:
        check_ordered(name, process_set)
        return run(ordered.broadcast(tensor, source, algorithm=algorithm, ranks=ranks))
    check_named(algorithm)
    tensor = as_tensor(tensor, "broadcast")
    name = operation_name("Broadcast", name, tensor, ignore_name_scope=ignore_name_scope)
    return broadcast_tensor(tensor, source, name, core.process_set_of(process_set))


@no_autograph
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: core.ProcessSet | None = None,
) -> list[Any]:
    """Assign the values of rank `root_rank` to variables (tf.Variable or keras.Variable), and return them.

    All travel in one operation. In a graph of TensorFlow 1 the assignments are returned, and must be run.

    Args:
        variables: Variables of tf or Keras.
        root_rank: The global rank whose values the others get.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.

    Examples:
        >>> weight = tf.Variable([comm.rank])
        >>> values = ct.broadcast_([weight], root_rank=1)
        >>> weight.numpy()
        array([1], dtype=int32)
    """
    variables = list_of("broadcast_", "a list of variables", variables)
    if not variables:
        return []
    for position, variable in enumerate(variables):
        if not hasattr(variable, "assign"):
            raise UsageError(f"broadcast_: entry {position} is a {type(variable).__name__}, expected a variable")
    tensors = _tensors(variables)
    name = operation_name("Broadcast", name)
    values = broadcast_tensors(tensors, root_rank, name, core.process_set_of(process_set))
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    return variables if is_ordered() else assigned


@_differentiable
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: core.ProcessSet | None = None,
) -> Any:
    """Send splits[i] rows of `tensor` to rank i of the process set, and return the received rows. Differentiable.

    Without `splits` each rank gets an equal part. With them the result is (received rows, number of rows from each
    rank).

    Args:
        tensor: A tensor, variable, array or number.
        splits: The number of rows for each rank; None: equal parts.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        ignore_name_scope: Whether TensorFlow's name scope is left out of the name.
        process_set: The participating ranks; None: all.

    Examples:
        >>> ct.alltoall(tf.constant([comm.rank, comm.rank])).numpy()
        array([0, 1], dtype=int32)
    """
    tensor = as_tensor(tensor, "alltoall")
    name = operation_name("Alltoall", name, tensor, ignore_name_scope=ignore_name_scope)
    group = core.process_set_of(process_set)
    if splits is None:
        return alltoall_tensor(tensor, None, name, group)[0]
    splits = tf.convert_to_tensor(splits)
    if not splits.dtype.is_integer:
        raise UsageError(f"alltoall: splits must be integers, got {splits.dtype.name}")
    output, received = alltoall_tensor(tensor, splits, name, group)
    return output, tf.cast(received, splits.dtype)


@_differentiable
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compressors = Compression.none,
    op: Any = core.Average,
    name: str | None = None,
    process_set: core.ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce `tensor` over all ranks and return this rank's part along dimension 0. Differentiable for Average and Sum.

    If the length of dimension 0 is not a multiple of the size, the first ranks get one row more.

    Args:
        tensor: A tensor, variable, array or number.
        device_dense: Unused; Horovod has it.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        process_set: The participating ranks; None: all.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.
        ignore_name_scope: Whether TensorFlow's name scope is left out of the name.

    Examples:
        >>> ct.reducescatter(tf.ones([4]), op=ct.Sum).numpy()
        array([2., 2.], dtype=float32)
    """
    tensor = as_tensor(tensor, "reducescatter")
    name = operation_name("Reducescatter", name, tensor, ignore_name_scope=ignore_name_scope)
    group = core.process_set_of(process_set)
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, group)
    return _reduce_compressed(reducescatter_tensors, [tensor], how, compression)[0]


@_differentiable
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressors = Compression.none,
    op: Any = core.Average,
    process_set: core.ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[Any]:
    """Return `reducescatter` of each tensor, in one operation that all ranks start together. Differentiable, too.

    Args:
        tensors: Tensors, as many on all ranks.
        device_dense: Unused; Horovod has it.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        op: Average, Sum, Min, Max, Product or Adasum; None: Average.
        process_set: The participating ranks; None: all.
        prescale_factor: Factor of the tensor before the reduction.
        postscale_factor: Factor of the result.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        ignore_name_scope: Whether TensorFlow's name scope is left out of the name.

    Examples:
        >>> [each.numpy().tolist() for each in ct.grouped_reducescatter([tf.ones([4])], op=ct.Sum)]
        [[2.0, 2.0]]
    """
    given = _tensors(list_of("grouped_reducescatter", "a list of tensors", tensors))
    if not given:
        return []
    name = operation_name("GroupedReducescatter", name, given[0], ignore_name_scope=ignore_name_scope)
    group = core.process_set_of(process_set)
    how = Reduction.of(op, None, name, prescale_factor, postscale_factor, group)
    return _reduce_compressed(reducescatter_tensors, given, how, compression)


@no_autograph
def join() -> Any:
    """Contribute nothing to the other ranks' operations until all ranks have joined; return the last rank to join.

    For a rank that has run out of data: see `commlib.horovod.join.join`. The result is an int32 tensor.
    """

    def run_join() -> list[Array]:
        if ordered_reducers():
            gc.collect()  # dead optimizers in a reference cycle must not be waited for
        return [np.array(core_join(ordered_reducers()), np.int32)]

    return call(run_join, [], [Spec(tf.int32, ())])[0]


@no_autograph
def barrier(process_set: core.ProcessSet | None = None, name: str | None = None, *, ranks: Ranks | None = None) -> Any:
    """Wait until all ranks of the process set, or of `ranks`, have called this. In a traced function, when it runs.

    With `ranks` it is an ordered verb. Returns an operation in a graph of TensorFlow 1, None otherwise.

    Args:
        process_set: The participating ranks; None: all.
        name: The name of the operation, the same on all ranks; None: numbered automatically.
        ranks: A communicator, mesh or process set: then this is the ordered verb on these ranks.
    """
    if ranks is not None:
        check_ordered(name, process_set)
        return run(ordered.barrier(ranks=ranks))
    group = core.process_set_of(process_set)
    name = operation_name("Barrier", name)

    def run_barrier() -> list[Array]:
        core.start_barrier(group, name, blocking=True).wait()
        return [np.zeros((), np.int32)]

    (done,) = call(run_barrier, [], [Spec(tf.int32, ())])
    return None if is_ordered() else done.op


def _reduce_compressed(
    operation: Callable[[Sequence[Any], Reduction], list[Any]],
    tensors: Sequence[Any],
    how: Reduction,
    compression: Compressors,
) -> list[Any]:
    """Return the results of a reduction of compressed tensors, decompressed."""
    check_compressor(compression)
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    results = operation(compressed, how)
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def _tensors(values: Sequence[Any], but: type | tuple[()] = ()) -> list[Any]:
    """Return values as tensors, except those of the class `but`."""
    tensors = []
    for position, value in enumerate(values):
        if isinstance(value, but):
            continue
        try:
            tensors.append(as_tensor(value))
        except UsageError as error:
            raise UsageError(f"entry {position}: {error}") from error
    return tensors


def _allreduce_slices(slices: Sequence[tf.IndexedSlices], how: Reduction) -> list[tf.IndexedSlices]:
    """Gather the slices of all ranks in one operation, and divide them for an average."""
    if not slices:
        return []
    if how.op not in (core.Average, core.Sum):
        raise NotImplementedError(
            f"op={how.op.name.capitalize()} does not exist for tf.IndexedSlices: make them dense with "
            "tf.convert_to_tensor, or pass sparse_as_dense=True to DistributedOptimizer or DistributedGradientTape"
        )
    if (how.prescale_factor, how.postscale_factor) != (1.0, 1.0):
        raise NotImplementedError("prescale_factor and postscale_factor do not exist for tf.IndexedSlices")
    parts = [as_tensor(part) for one in slices for part in (one.values, one.indices)]
    gathered = allgather_tensors(parts, how.name, how.process_set)
    size = core.process_set_of(how.process_set).size()
    results = []
    for one, values, indices in zip(slices, gathered[::2], gathered[1::2], strict=True):
        mean = values / tf.cast(size, values.dtype) if how.op == core.Average else values
        results.append(tf.IndexedSlices(mean, indices, one.dense_shape))
    return results
