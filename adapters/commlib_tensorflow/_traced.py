"""Traced: refuse layers whose forward cannot be computed again, because it reads or changes what nobody hands it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError

# Operations of TensorFlow that give something else when they run again, and those that change a variable.
_RANDOM = frozenset(
    (
        "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "ParameterizedTruncatedNormal", "TruncatedNormal",
        "RandomShuffle", "Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RngReadAndSkip", "RngSkip",
    )
)  # fmt: skip
_ASSIGNING = frozenset(("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterUpdate"))


def check_state(
    stage: int, before: Mapping[int, Any], after: Mapping[int, Any], state: Sequence[Any], shared: Sequence[Any],
    *, again: bool,
) -> None:  # fmt: skip
    """Check what a forward of a stage did, while it is traced or after it ran.

    before, after: the values of variables, by their id, as Keras's StatelessScope has them. state: the variables of
    layers that they may change; shared: the variables of this rank that other ranks have, too. again: it will be done
    again. Raises UsageError.
    """
    if set(after) - set(before):
        raise UsageError(
            f"pipeline: a layer of stage {stage} changes a variable that is not its own, such as the seeds of "
            "keras.random without seed=, which would not be kept: give the layer a keras.random.SeedGenerator, or the "
            "variable, as an attribute"
        )
    ours = {id(variable) for variable in shared}
    for variable in state:
        if id(variable) in ours and after[id(variable)] is not before[id(variable)]:
            raise UsageError(
                f"pipeline: stage {stage} changes {variable.path!r} in training, and so do those of other ranks that "
                "share its layer: use a layer of its own for each, or a split that leaves both on one rank"
            )
    if again and not tf.executing_eagerly():
        _check_operations(stage, tf.compat.v1.get_default_graph())


def _check_operations(stage: int, graph: Any) -> None:
    kinds = {operation.type for operation in graph.get_operations()}
    if any("Function" in kind or kind in ("If", "While", "StatefulPartitionedCall") for kind in kinds):
        library = graph.as_graph_def().library
        kinds |= {node.op for function in library.function for node in function.node_def}
    random, assigning = sorted(kinds & _RANDOM), sorted(kinds & _ASSIGNING)
    if random:
        raise UsageError(
            f"pipeline: a layer of stage {stage} uses {random[0]} of TensorFlow, which gives other numbers when a "
            "backward computes the forward again: use keras.random with a keras.random.SeedGenerator that the layer "
            "has, or keep activations: checkpoint='none', and a schedule that does not split backwards"
        )
    if assigning:
        raise UsageError(
            f"pipeline: a layer of stage {stage} changes a tf.Variable ({assigning[0]}), which a backward would do "
            "again: make it a Keras variable, with add_weight(trainable=False)"
        )
