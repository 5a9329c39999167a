"""Call a host function from a graph without ordering, in a node that keeps no TensorFlow thread.

The nodes of such a graph run on few threads, in any order. A function that waits for other ranks must not occupy one of
these threads: ranks may start different operations, and the threads may run out before all ranks have started the same
one.

TensorFlow has only one node for this that Python can implement, and it is meant for input pipelines: taking the single
element of a dataset is asynchronous and runs on the node's own thread. Without "inter-op parallelism" the function that
maps the element runs on that thread too. So the tensors become a dataset of one element, and the host function maps it.

Such a node costs about 50 us more per run than `tf.numpy_function`, and one thread while its graph is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def call_on_host_thread(function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Return the results of `tf.numpy_function`, with unknown shapes. For graphs. No gradient flows through."""
    given = list(inputs) or [tf.constant(0)]  # a dataset needs an element
    count = len(inputs)

    def node(*tensors: Any) -> Any:
        return tf.numpy_function(function, tensors[:count], list(dtypes))

    signature = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given]
    mapped = tf.function(node, input_signature=signature, autograph=False)
    outputs: dict[str, Any] = {"output_types": list(dtypes), "output_shapes": [tf.TensorShape(None) for _ in dtypes]}
    with tf.device("cpu:0"):  # datasets exist on the CPU only
        dataset = tf.raw_ops.TensorDataset(components=given, output_shapes=[tensor.shape for tensor in given])
        dataset = tf.raw_ops.MapDataset(
            input_dataset=dataset,
            other_arguments=[],
            f=mapped.get_concrete_function(),
            use_inter_op_parallelism=False,
            **outputs,
        )
        return [tf.stop_gradient(result) for result in tf.raw_ops.DatasetToSingleElement(dataset=dataset, **outputs)]
