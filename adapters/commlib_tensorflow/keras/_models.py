"""DistributedOptimizer with the arguments of `horovod.keras`, and loading of models with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from commlib import horovod as core
from commlib.horovod.reductions import ReduceOp
from commlib.literals import AveragingOp
from commlib_tensorflow._keras_reduction import WrappedOptimizer
from commlib_tensorflow.compression import Compression
from commlib_tensorflow.gradient_tape import layers_of
from commlib_tensorflow.optimizer import distribute


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | AveragingOp = core.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = core.global_process_set,
    scale_local_gradients: bool = True,
    **more: Any,
) -> WrappedOptimizer:
    """Make `optimizer` step with gradients that are reduced over all ranks, and return it.

    The same as `commlib_tensorflow.DistributedOptimizer`, with the arguments in the order of `horovod.keras`.

    Args:
        optimizer: An optimizer of Keras 3 or tf_keras, or of `tf.compat.v1.train`.
        name: Matches messages with those of the other ranks; None: the name of the class.
        device_dense: Unused; Horovod has it.
        device_sparse: Unused; Horovod has it.
        compression: A cast of Horovod; or "int8", "topk:ratio=0.01", "powersgd:rank=4", "auto", or a codec or scheme of
            `commlib.compress`: fewer bytes between nodes.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones; otherwise they are gathered.
        gradient_predivide_factor: The factor f: divide by f before the sum, and multiply by f / size afterwards.
        op: Average or Sum.
        backward_passes_per_step: Only every k-th step reduces and updates. Keras 3 does that by the optimizer's own
            `gradient_accumulation_steps`, which may be set instead and averages.
        average_aggregated_gradients: Whether gradients of the k passes are averaged; otherwise they are summed.
        num_groups: The older name of `groups`.
        groups: A number of messages, or lists of variables that travel together; None: buckets.
        process_set: The ranks to reduce over; other ranks step without reduction. None: all.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        **more: `bucket_cap_mib`, `first_bucket_mib`, `overlap`, `compress_within_node`, `ranks` and `mesh`: see
            `commlib_tensorflow.DistributedOptimizer`.
    """
    arguments = dict(locals())
    return PartialDistributedOptimizer(**arguments.pop("more"), **arguments)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | AveragingOp = core.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = core.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    **more: Any,
) -> WrappedOptimizer:
    """Make a DistributedOptimizer that keeps gradients of `local_layers` on their rank.

    Args:
        optimizer: An optimizer of Keras 3 or tf_keras, or of `tf.compat.v1.train`.
        name: Matches messages with those of the other ranks; None: the name of the class.
        device_dense: Unused; Horovod has it.
        device_sparse: Unused; Horovod has it.
        compression: A cast of Horovod; or "int8", "topk:ratio=0.01", "powersgd:rank=4", "auto", or a codec or scheme of
            `commlib.compress`: fewer bytes between nodes.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones; otherwise they are gathered.
        gradient_predivide_factor: The factor f: divide by f before the sum, and multiply by f / size afterwards.
        op: Average or Sum.
        backward_passes_per_step: Only every k-th step reduces and updates. Keras 3 does that by the optimizer's own
            `gradient_accumulation_steps`, which may be set instead and averages.
        average_aggregated_gradients: Whether gradients of the k passes are averaged; otherwise they are summed.
        num_groups: The older name of `groups`.
        groups: A number of messages, or lists of variables that travel together; None: buckets.
        process_set: The ranks to reduce over; other ranks step without reduction. None: all.
        local_layers: One or several layers whose gradients stay on their rank.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        **more: `bucket_cap_mib`, `first_bucket_mib`, `overlap`, `compress_within_node`, `ranks` and `mesh`: see
            `commlib_tensorflow.DistributedOptimizer`.

    Examples:
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[model.layers[0]])
    """
    del device_dense, device_sparse
    return distribute(
        optimizer,
        name=name,
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups or None,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        local_layers=layers_of(local_layers),
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        **more,
    )


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model that Keras saved, and make its optimizer, if any, distributed, with its saved state.

    `custom_optimizers` are optimizers that are not Keras' own, `custom_objects` any other names in the file.
    `legacy_opts` exists for compatibility with Horovod: the file determines the kind of its optimizer.

    Args:
        filepath: The file that Keras wrote.
        custom_optimizers: Classes of your own optimizers.
        custom_objects: Your own objects by name, as for Keras' `load_model`.
        compression: The cast of what is sent: `Compression.none`, `.fp16` or `.bf16`.
        legacy_opts: Unused; Horovod has it.
    """
    del legacy_opts
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = tf.keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    return distribute_model(model, compression=compression)


def distribute_model(model: Any, **settings: Any) -> Any:
    """Make the optimizer of a compiled model distributed, and return the model."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        DistributedOptimizer(optimizer, **settings)
        if getattr(model, "jit_compile", False):  # "auto" was resolved, or saved, with a plain optimizer
            model.jit_compile = False
            model.train_function = model.test_function = None
    return model
