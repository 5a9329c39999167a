"""DistributedOptimizer: any optimizer of Keras, stepping with gradients reduced over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf

from commlib import horovod as core
from commlib.compress import DGC
from commlib.compress.choice import choose
from commlib.data_parallel import BUCKET_CAP_MIB, FIRST_BUCKET_MIB
from commlib.errors import UsageError
from commlib.horovod.mesh_sets import process_set_along
from commlib.mesh_groups import Mesh
from commlib.sharding.data_axes import data_axes
from commlib_tensorflow._keras_reduction import Reduction
from commlib_tensorflow.compression import Compression

OptimizerT = TypeVar("OptimizerT")


def DistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: core.ReduceOp = core.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = core.global_process_set,
    scale_local_gradients: bool = True,
    compress_within_node: bool = False,
    overlap: bool | None = None,
    *,
    bucket_cap_mib: float = BUCKET_CAP_MIB,
    first_bucket_mib: float = FIRST_BUCKET_MIB,
    mesh: Mesh | None = None,
) -> OptimizerT:
    """Make `optimizer` step with gradients that are reduced over all ranks, and return it.

    The same object is returned, as an instance of a subclass of its own class, with everything it had. `fit`, a
    `train_step` of your own and `apply` or `apply_gradients` in a loop of your own work as before; a saved model names
    the plain optimizer and is loaded without commlib. Gradients are reduced after Keras has accumulated them and
    before it clips them. Within a LossScaleOptimizer, on either side of it, ranks agree whether to take a step.
    Works with optimizers of Keras 3 and tf_keras, and with `minimize` of `tf.compat.v1.train`. Make an optimizer
    distributed before a tf.function that uses it is traced, and compile models without `jit_compile=True`.

    `op` is Average or Sum. With `backward_passes_per_step=k` only every k-th step reduces and updates; gradients of the
    k passes are added up, or averaged with `average_aggregated_gradients`. Keras 3 does that by the optimizer's own
    `gradient_accumulation_steps`, which may be given instead and averages. `groups` is a number of messages, or lists
    of variables that travel together. `compression`, `sparse_as_dense` and `gradient_predivide_factor` are those of
    Horovod. `register_local_var(variable)` of the result leaves a gradient on this rank; it is divided by the number
    of ranks unless `scale_local_gradients` is False. `name` is under what messages meet those of the other ranks, by
    default that of the class. `use_locking` and the devices are accepted for Horovod's sake, and mean nothing here.
    `process_set` are the ranks to reduce over, by default all; other ranks step by themselves. Or give `mesh`, whose
    axes "dp" and "cp" it is; then this is collective over all ranks. Ranks along "tp" have the same data, or parts of a
    variable: nothing is reduced. Variables that are divided along an axis of a mesh know it: then nothing needs to be
    given, and the first step is collective over all ranks.

    `compression` may also be a name such as "int8", "topk:ratio=0.01", "powersgd:rank=4" or "auto", or a codec or
    scheme of `commlib.compress`: fewer bytes between nodes, or with `compress_within_node` between all ranks. What is
    lost is added to the next step's gradients; `compression_state()` of the result returns it, and
    `load_compression_state(state)` takes it back, on each rank its own. `overlap` says whether a traced function starts
    to reduce while backward goes on; None decides by where the ranks are and the cores they have. Buckets hold up to
    `bucket_cap_mib` MiB, the first one `first_bucket_mib`. `report` of the result says what communication cost in the
    last step, `statistics`, `exposed_seconds` and `compression_choice` the rest. A `global_clipnorm` of Keras 3's
    optimizers has the same bits on all ranks.

    A gradient that is None on some ranks only is zeros there; that of a sparse one, and with Keras 2 in a graph, raises
    MismatchError on all ranks.

    What is made of the result's own type reduces as it does: `type(optimizer).from_config(config)`,
    `type(optimizer)(...)`, and in Keras 3 `copy.deepcopy(optimizer)`. What Keras writes is plain, and so is what is
    read of it: a pickle, a file, `keras.optimizers.serialize`, a copy of a model. Make that distributed again, or use
    `commlib_tensorflow.keras.load_model`.

    Raises UsageError for what is no such optimizer, is distributed already, or cannot be reduced as told.
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
        mesh=mesh,
        scale_local_gradients=scale_local_gradients,
        local_layers=(),
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
    )


def distribute(
    optimizer: OptimizerT,
    *,
    name: str | None,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    op: Any,
    process_set: Any,
    mesh: Mesh | None = None,
    **settings: Any,
) -> OptimizerT:
    """Make `optimizer` reduce its gradients, and return it: what all DistributedOptimizers come to."""
    op = core.resolve_op(op)
    if op not in (core.Average, core.Sum):
        raise UsageError(f"op must be Average or Sum for a DistributedOptimizer, got {op.name.capitalize()}")
    if backward_passes_per_step < 1:
        raise UsageError(f"backward_passes_per_step must be at least 1, got {backward_passes_per_step}")
    inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(choose(settings["compression"]).scheme, DGC) and getattr(inner, "momentum", None):
        raise UsageError(
            f"compression {settings['compression']!r} carries the momentum, and {type(inner).__name__} has momentum "
            f"{inner.momentum}, too: leave it out there"
        )
    if mesh is not None:
        if not (process_set is None or process_set is core.global_process_set):
            raise UsageError("mesh= says over which ranks to reduce by its axis dp, and cp: give no process_set=")
        process_set = process_set_along(mesh, data_axes(mesh), "DistributedOptimizer")
    settings["process_set"] = process_set
    keras2 = sys.modules.get("tf_keras")  # who has an optimizer of either Keras has imported that
    keras3 = sys.modules.get("keras")
    name = name or f"Distributed{type(inner).__name__}"
    if keras3 is not None and isinstance(optimizer, keras3.optimizers.Optimizer):
        if keras3.backend.backend() != "tensorflow":
            raise UsageError(f"Keras runs on {keras3.backend.backend()} here: commlib_tensorflow needs TensorFlow")
        from commlib_tensorflow import _keras3

        undo = 1 if average_aggregated_gradients else backward_passes_per_step
        reduction = Reduction(name, op=op, undo_division=undo, **settings)
        _keras3.distribute(optimizer, reduction, backward_passes_per_step)
    elif isinstance(optimizer, tf.compat.v1.train.Optimizer) or (
        keras2 is not None and isinstance(optimizer, (keras2.optimizers.Optimizer, keras2.optimizers.legacy.Optimizer))
    ):
        from commlib_tensorflow import _keras2

        reduction = Reduction(name, op=op, undo_division=1, **settings)
        _keras2.distribute(optimizer, reduction, backward_passes_per_step, average=average_aggregated_gradients)
    else:
        raise UsageError(
            f"expected an optimizer of Keras 3, tf_keras or tf.compat.v1.train, got {type(optimizer).__name__}"
        )
    return optimizer
