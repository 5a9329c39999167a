"""A node for graphs in which nothing orders it: it calls a function of the host and keeps no thread of TensorFlow's.

Such a graph's nodes run on few threads, in whatever order. A function that waits for other ranks must not sit on one of
them: ranks may begin different operations, and the threads are used up before there is one that all have begun.
TensorFlow has no node for that which Python could fulfil, except one that is made for input pipelines: taking the one
element of a dataset is asynchronous and happens on a thread of the node's own, and so does, without "inter-op
parallelism", what maps the element. So the tensors become a dataset of one element, which the function maps.

A run of such a node costs about 50 us more than one of `tf.numpy_function`, and a thread while its graph is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def call_aside(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Return what `tf.numpy_function` does, of unknown shapes. In a graph. No gradient flows through."""
    given = list(inputs) or [tf.constant(0)]  # a dataset has elements
    count = len(inputs)

    def node(*tensors: Any) -> Any:
        return tf.numpy_function(function, tensors[:count], list(dtypes))

    signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given]
    mapped = tf.function(node, input_signature=signature, autograph=False)
    outputs: dict[str, Any] = {"output_types": list(dtypes), "output_shapes": [tf.TensorShape(None) for _ in dtypes]}
    with tf.device("cpu:0"):  # there are no datasets elsewhere
        dataset = tf.raw_ops.TensorDataset(components=given, output_shapes=[tensor.shape for tensor in given])
        dataset = tf.raw_ops.MapDataset(
            input_dataset=dataset,
            other_arguments=[],
            f=mapped.get_concrete_function(),
            use_inter_op_parallelism=False,
            **outputs,
        )
        return [tf.stop_gradient(result) for result in tf.raw_ops.DatasetToSingleElement(dataset=dataset, **outputs)]
