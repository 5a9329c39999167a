"""DistributedOptimizer: any Keras optimizer, stepping with gradients reduced over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from commlib import horovod as core
from commlib.arguments import read_flag
from commlib.data_parallel.buckets import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.data_parallel.options import read_passes
from commlib.errors import UsageError
from commlib.horovod.mesh_sets import process_set_along, process_set_over
from commlib.horovod.reductions import ReduceOp
from commlib.literals import AveragingOp
from commlib.mesh_groups import Mesh
from commlib.ranks import Ranks, check_one_choice
from commlib.sharding.data_axes import data_axes
from commlib_tensorflow._keras_reduction import KerasGradients, WrappedOptimizer, check_momentum
from commlib_tensorflow.compression import Compression


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | AveragingOp = core.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = core.global_process_set,
    scale_local_gradients: bool = True,
    *,
    bucket_cap_mib: float = BUCKET_CAP_MIB,
    first_bucket_mib: float = FIRST_BUCKET_MIB,
    overlap: bool | None = None,
    compress_within_node: bool = False,
    ranks: Ranks | None = None,
    mesh: Mesh | None = None,
) -> WrappedOptimizer:
    """Make `optimizer` step with gradients that are reduced over all ranks, and return it.

    The same object is returned, as an instance of a subclass of its own class, with all its state. `fit`, a custom
    `train_step` and `apply` or `apply_gradients` in a custom loop work as before; a saved model names the plain
    optimizer and can be loaded without commlib. Gradients are reduced after Keras has accumulated them and before it
    clips them. With a LossScaleOptimizer, inside or outside of it, ranks agree whether to take a step.

    Make an optimizer distributed before a tf.function that uses it is traced, and compile models without
    `jit_compile=True`.

    `register_local_var(variable)` of the result keeps a gradient on this rank. The compression error is added to the
    next step's gradients; `compression_state()` of the result returns it, and `load_compression_state(state)` restores
    it, on each rank separately. `report` of the result shows the communication cost of the last step, `statistics`,
    `exposed_seconds` and `compression_choice` the rest. A `global_clipnorm` of Keras 3's optimizers has the same bits
    on all ranks.

    Ranks along "tp" have the same data, or shards of a variable: nothing is reduced over them. Variables that are
    sharded along an axis of a mesh record the mesh: then none of `process_set`, `ranks` and `mesh` is needed, and the
    first step is collective over all ranks.

    A gradient that is None only on some ranks counts as zeros there; if it is sparse, or with Keras 2 in a graph, it
    raises MismatchError on all ranks.

    Further instances of the result's class reduce in the same way: `type(optimizer).from_config(config)`,
    `type(optimizer)(...)`, and in Keras 3 `copy.deepcopy(optimizer)`. Keras writes a plain optimizer, and reading gives
    a plain one: a pickle, a file, `keras.optimizers.serialize`, a copy of a model. Make that one distributed again, or
    use `commlib_tensorflow.keras.load_model`.

    Args:
        optimizer: An optimizer of Keras 3 or tf_keras, or of `tf.compat.v1.train`.
        name: Matches messages with those of the other ranks; None: the name of the class.
        use_locking: Unused; Horovod has it.
        device_dense: Unused; Horovod has it.
        device_sparse: Unused; Horovod has it.
        compression: A cast of Horovod; or "int8", "topk:ratio=0.01", "powersgd:rank=4", "auto", or a codec or scheme of
            `commlib.compress`: fewer bytes between nodes.
        sparse_as_dense: Whether sparse gradients are reduced as dense ones; otherwise they are gathered.
        backward_passes_per_step: Only every k-th step reduces and updates. Keras 3 does that by the optimizer's own
            `gradient_accumulation_steps`, which may be set instead and averages.
        op: Average or Sum.
        gradient_predivide_factor: The factor f: divide by f before the sum, and multiply by f / size afterwards.
        average_aggregated_gradients: Whether gradients of the k passes are averaged; otherwise they are summed.
        num_groups: The older name of `groups`.
        groups: A number of messages, or lists of variables that travel together; None: buckets.
        process_set: The ranks to reduce over; other ranks step without reduction. None: all.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        bucket_cap_mib: The size of a bucket, MiB.
        first_bucket_mib: The size of the first bucket, MiB.
        overlap: Whether buckets are sent while backward runs, otherwise at its end; None: if the group spans several
            nodes, or if each rank has more cores than the framework has threads.
        compress_within_node: Whether gradients are compressed between the ranks of a node, too.
        ranks: The ranks to reduce over, such as `mesh["dp"]`.
        mesh: A mesh of any number of axes, to reduce over its axes "dp" and "cp" (and "edp", "ep"); the call is then
            collective over all ranks.

    Raises:
        UsageError: If it is not such an optimizer, is already distributed, or cannot be reduced with these settings.
        MismatchError: On all ranks, in a step, for a missing gradient that is sparse, or with Keras 2 in a graph.
    """
    del use_locking, device_dense, device_sparse
    return distribute(
        optimizer,
        name=name,
        op=op,
        compression=compression,
        compress_within_node=compress_within_node,
        overlap=overlap,
        bucket_cap_mib=bucket_cap_mib,
        first_bucket_mib=first_bucket_mib,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups if groups is not None else num_groups or None,
        process_set=process_set,
        ranks=ranks,
        mesh=mesh,
        scale_local_gradients=scale_local_gradients,
        local_layers=(),
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )


def distribute(
    optimizer: Any,
    *,
    name: str | None,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    op: Any,
    process_set: Any,
    ranks: Ranks | None = None,
    mesh: Mesh | None = None,
    **settings: Any,
) -> WrappedOptimizer:
    """Make `optimizer` reduce its gradients, and return it: the common part of all DistributedOptimizers."""
    op = core.resolve_op(op)
    if op not in (core.Average, core.Sum):
        raise UsageError(f"op must be Average or Sum for a DistributedOptimizer, got {op.name.capitalize()}")
    backward_passes_per_step = read_passes(backward_passes_per_step)
    average_aggregated_gradients = read_flag("average_aggregated_gradients", average_aggregated_gradients)
    inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
    check_momentum(inner, settings["compression"])
    chosen = None if process_set is core.global_process_set else process_set
    check_one_choice("DistributedOptimizer", process_set=chosen, ranks=ranks, mesh=mesh)
    if mesh is not None:
        process_set = process_set_along(mesh, data_axes(mesh), "DistributedOptimizer")
    elif ranks is not None:
        process_set = process_set_over(ranks, "DistributedOptimizer")
    settings["process_set"] = process_set
    keras2 = sys.modules.get("tf_keras")  # a user with an optimizer of Keras 2 or 3 has imported it
    keras3 = sys.modules.get("keras")
    name = name or f"Distributed{type(inner).__name__}"
    if keras3 is not None and isinstance(optimizer, keras3.optimizers.Optimizer):
        if keras3.backend.backend() != "tensorflow":
            raise UsageError(f"Keras runs on {keras3.backend.backend()} here: commlib_tensorflow needs TensorFlow")
        from commlib_tensorflow import _keras3

        undo = 1 if average_aggregated_gradients else backward_passes_per_step
        reduction = KerasGradients(name, op=op, undo_division=undo, **settings)
        _keras3.distribute(optimizer, reduction, backward_passes_per_step)
    elif isinstance(optimizer, tf.compat.v1.train.Optimizer) or (
        keras2 is not None and isinstance(optimizer, (keras2.optimizers.Optimizer, keras2.optimizers.legacy.Optimizer))
    ):
        from commlib_tensorflow import _keras2

        reduction = KerasGradients(name, op=op, undo_division=1, **settings)
        _keras2.distribute(optimizer, reduction, backward_passes_per_step, average=average_aggregated_gradients)
    else:
        raise UsageError(
            f"expected an optimizer of Keras 3, tf_keras or tf.compat.v1.train, got {type(optimizer).__name__}"
        )
    return cast(WrappedOptimizer, optimizer)
