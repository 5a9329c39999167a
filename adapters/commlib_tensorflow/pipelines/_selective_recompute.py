"""Selective recomputation: recompute a forward except its products, whose results were kept.

Products (of matrices, and convolutions) take most of a forward's time, and the operations after them make most of its
activations. The graph of a backward that recomputes its forward is changed before use: readers of a product read the
kept result instead. So no operation reads the product itself, and TensorFlow prunes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from commlib.errors import UsageError

_PRODUCTS = frozenset(
    (
        "MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "Conv2D", "Conv3D",
        "DepthwiseConv2dNative", "Conv2DBackpropInput", "Conv3DBackpropInputV2",
    )
)  # fmt: skip


def current_products() -> list[tf.Tensor]:
    """Return the results of the products in the function that is being traced, so far.

    Products within loops and within called functions are not included.
    """
    return products_of(tf.compat.v1.get_default_graph().get_operations())


def products_of(operations: Sequence[Any]) -> list[tf.Tensor]:
    """Return the results of the TensorFlow operations that are products."""
    return [operation.outputs[0] for operation in operations if operation.type in _PRODUCTS]


def without_products(function: Callable[..., Any], saved: Sequence[tf.Tensor], *arguments: Any) -> Any:
    """Call `function` on `arguments` (nested tensors and None) without its products, in the graph being traced.

    `kept` replaces the results of its first products. Raises UsageError if these differ from those that were kept.
    """
    given = [leaf for leaf in tf.nest.flatten(arguments) if leaf is not None]

    def flat(*tensors: tf.Tensor) -> Any:
        rest = iter(tensors)
        return function(*tf.nest.map_structure(lambda leaf: None if leaf is None else next(rest), arguments))

    specs = [tf.TensorSpec.from_tensor(tensor) for tensor in given]
    traced = tf.function(flat, autograph=False).get_concrete_function(*specs)
    operations = _products(traced.graph)[: len(saved)]
    if [operation.outputs[0].dtype for operation in operations] != [tensor.dtype for tensor in saved]:
        raise UsageError(
            f"pipeline: checkpoint='selective': a stage computed {len(saved)} products, but different ones when its "
            "forward was recomputed: use 'full' or 'none' for layers that do not always compute the same"
        )
    definition = traced.graph.as_graph_def()
    names = {operation.name: f"kept/{number}" for number, operation in enumerate(operations)}
    for node in definition.node:
        for place, read in enumerate(node.input):
            node.input[place] = names.get(read.removesuffix(":0"), read)
    for name, tensor in zip(names.values(), saved, strict=True):
        node = definition.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tensor.dtype.as_datatype_enum
    # Captured tensors, too: the graph lists them after its inputs.
    captured = [tf.identity(tensor) for tensor in traced.captured_inputs]
    values = {own.name: value for own, value in zip(traced.inputs, [*given, *captured], strict=True)}
    values |= {f"{name}:0": tensor for name, tensor in zip(names.values(), saved, strict=True)}
    outputs = [leaf for leaf in tf.nest.flatten(traced.structured_outputs) if leaf is not None]
    imported = tf.graph_util.import_graph_def(
        definition, values, [names.get(o.op.name, o.name) for o in outputs], "again"
    )
    rest = iter(_tensor(one) for one in imported)
    return tf.nest.map_structure(lambda leaf: None if leaf is None else next(rest), traced.structured_outputs)


def _tensor(value: Any) -> tf.Tensor:
    """Return the tensor for an imported name, which is an operation if the name has no output index."""
    return value.outputs[0] if isinstance(value, tf.Operation) else value


def _products(graph: Any) -> list[Any]:
    return [operation for operation in graph.get_operations() if operation.type in _PRODUCTS]
