"""Layer checks: refuse layers that do not support microbatches, or whose forward cannot be recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from commlib.errors import UsageError

# TensorFlow operations whose results change in a second run, and those that change a variable.
_RANDOM = frozenset(
    (
        "RandomUniform", "RandomUniformInt", "RandomStandardNormal", "ParameterizedTruncatedNormal", "TruncatedNormal",
        "RandomShuffle", "Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RngReadAndSkip", "RngSkip",
    )
)  # fmt: skip
_ASSIGNING = frozenset(("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "ResourceScatterUpdate"))


def check_layers(parts: Sequence[Any], microbatches: int) -> None:
    """Refuse stateful layers, which would continue a row's state with rows of another microbatch. Raises UsageError."""
    if microbatches == 1:
        return
    for part in parts:
        for layer in part._flatten_layers():
            if isinstance(layer, keras.layers.RNN) and layer.stateful:
                raise UsageError(
                    f"pipeline: {layer.path!r} is stateful: it keeps a state for each row of a batch, but would get "
                    f"{microbatches} microbatches with different rows: use microbatches=1, or stateful=False"
                )


def check_state(
    stage: int, before: Mapping[int, Any], after: Mapping[int, Any], own: Sequence[Any], shared: Sequence[Any],
    fixed: Sequence[Any], *, again: bool,
) -> None:  # fmt: skip
    """Check the effects of a stage's forward, while it is traced or after it ran.

    before, after: the values of variables, by their id. own: the variables of the stage's layers, which they may write.
    shared: the variables of this rank that other ranks have, too; fixed: variables with several versions at a time.
    again: the forward will be recomputed. Raises UsageError.
    """
    check_own(f"a layer of stage {stage}", before, after)
    ours, versions = {id(variable) for variable in shared}, {id(variable) for variable in fixed}
    for variable in own:
        if after[id(variable)] is before[id(variable)]:
            continue
        if id(variable) in ours:
            raise UsageError(
                f"pipeline: a layer of stage {stage} writes {variable.path!r}, which other ranks share and write too: "
                "use a separate layer for each, or a split that leaves both on one rank"
            )
        if id(variable) in versions:
            raise UsageError(
                f"pipeline: a layer of stage {stage} writes its weight {variable.path!r} in its forward, and the "
                "schedule updates weights while forwards run: use a schedule that updates them at the end of a batch"
            )
    if again and not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        check_operations(f"a layer of stage {stage}", graph, graph.get_operations())


def check_own(what: str, before: Mapping[int, Any], after: Mapping[int, Any]) -> None:
    """Raise UsageError if a forward has written variables that are not the layers' own."""
    if set(after) - set(before):
        raise UsageError(
            f"pipeline: {what} changes a variable that the layer does not own, such as the seeds of "
            "keras.random without seed= or a metric's. The change would be lost: give the layer a "
            "keras.random.SeedGenerator, or the variable, as an attribute, and metrics to compile()"
        )


def check_operations(what: str, graph: Any, operations: Sequence[Any]) -> None:
    """Refuse operations of a graph whose results or effects differ in a second run. Raises UsageError."""
    kinds = {operation.type for operation in operations}
    called = {name for operation in operations for name in _functions_of(operation.node_def)}
    if called:
        library = {function.signature.name: function for function in graph.as_graph_def().library.function}
        seen: set[str] = set()
        while called:
            seen |= called
            nodes = [node for name in called if name in library for node in library[name].node_def]
            kinds |= {node.op for node in nodes}
            called = {name for node in nodes for name in _functions_of(node)} - seen
    random, assigning = sorted(kinds & _RANDOM), sorted(kinds & _ASSIGNING)
    if random:
        raise UsageError(
            f"pipeline: {what} uses TensorFlow's {random[0]}, which returns different numbers when a "
            "backward recomputes the forward: use keras.random with a keras.random.SeedGenerator that the layer "
            "owns, or keep activations: checkpoint='none', and a schedule that does not split backwards"
        )
    if assigning:
        raise UsageError(
            f"pipeline: {what} changes a tf.Variable ({assigning[0]}), which a backward would do a second "
            "time: make it a Keras variable, with add_weight(trainable=False)"
        )


def _functions_of(node: Any) -> Iterator[str]:
    """Yield the names of the functions that a node calls."""
    for value in node.attr.values():
        yield from (function.name for function in (value.func, *value.list.func) if function.name)
