"""Traces of Keras models: equations of operations are correct, and shapes match the results."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from commlib_tensorflow.tensor.tracing import try_trace
from tests.inputs.traces import holds


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize(
    "run",
    [
        lambda x: ops.sum(ops.matmul(ops.transpose(x), x), 0),
        lambda x: ops.einsum("ij,kj->ik", x, x)[:, None, 0],
        lambda x: ops.expand_dims(ops.squeeze(tf.unstack(ops.stack([x, x], 1), axis=1)[0]), -1),
        lambda x: x[1:3, ..., ::2] + x[-1, :2],
        lambda x: ops.max(x, 0) + ops.cast(ops.sum(ops.top_k(x, 2)[1]), x.dtype),
        lambda x: ops.reshape(ops.roll(x, 1, 0), (2, -1)),
        lambda x: ops.take(x, [0, 2], axis=1) + ops.slice(x, (0, 0), (6, 2)),
        lambda x: ops.concatenate([x, *ops.split(x, [1, 3], 1)], 1) + ops.sum(ops.cumsum(x, 1)),
        lambda x: tf.linalg.band_part(tf.matmul(x, x, transpose_b=True), 0, -1),
    ],
)
def test_operations_are_traced(run):
    class Runs(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return run(x)

    x = np.random.default_rng(4).random((6, 4))
    graph, error = try_trace(Runs(), {}, x)
    assert error is None
    assert graph.shapes[graph.outputs[0]] == tuple(run(tf.constant(x)).shape)
    assert all(step.kind not in ("unseen", "unknown") for step in graph.steps)


def operations():
    """Return operations with shapes of their inputs, whose lengths are even, so that halves can be computed."""
    one, heads = ((2, 4, 6),), ((2, 4, 6, 8), (2, 4, 2, 8))
    return {
        "add": (lambda x, y: x + y, ((2, 4, 6), (4, 1))),
        "softmax": (lambda x: tf.nn.softmax(x), one),
        "mean": (lambda x: ops.mean(x, 1), one),
        "max": (lambda x: ops.max(x, -1, keepdims=True), one),
        "cumsum": (lambda x: tf.cumsum(x, 1), one),
        "reverse": (lambda x: tf.reverse(x, (0,)), one),
        "band": (lambda x: tf.linalg.band_part(x, 0, -1), one),
        "transpose": (lambda x: ops.transpose(x, (1, 2, 0)), one),
        "expand": (lambda x: ops.expand_dims(x, -2), one),
        "squeeze": (lambda x: ops.squeeze(x, 1), ((2, 1, 4),)),
        "slices": (lambda x: x[:, tf.newaxis, 1, ..., 2:], one),
        "from the end": (lambda x: x[..., tf.newaxis, 0], one),
        "gather": (lambda x: tf.gather(x, [0, 2, 1], axis=1), one),
        "bias": (lambda x, y: tf.nn.bias_add(x, y), ((2, 4, 6), (6,))),
        "matmul": (lambda x, y: tf.matmul(x, y, transpose_b=True), heads),
        "matmul of the transposed": (lambda x, y: tf.matmul(x, y, transpose_a=True), ((2, 6, 4), (2, 6, 8))),
        "matrix product": (lambda x, y: tf.linalg.matmul(x, y, transpose_a=True), ((6, 4), (6, 8))),
        "einsum": (lambda x, y: tf.einsum("bqhd,bkhd->bhqk", x, y), ((2, 6, 4, 8), (2, 2, 4, 8))),
        "broadcast": (lambda x: tf.broadcast_to(x, (3, *x.shape)), one),
    }


@pytest.mark.ranks(max=1)
@pytest.mark.parametrize("name", operations())
def test_equations_match_the_operations(name):
    """Halves of the inputs along a dimension give the halves of the result along that dimension."""
    run, shapes = operations()[name]

    class Runs(keras.Model):  # type: ignore[misc]
        def call(self, inputs: Any) -> Any:
            return run(*inputs)

    keras.config.set_floatx("float64")
    try:
        inputs = [np.random.default_rng(at).random(shape) for at, shape in enumerate(shapes)]
        graph, error = try_trace(Runs(dtype="float64"), {}, inputs)
    finally:
        keras.config.set_floatx("float32")
    assert error is None
    (equation,) = (step.equation for step in graph.steps if step.equation is not None)
    assert equation is not None
    assert holds(equation, lambda *arrays: run(*map(tf.constant, arrays)).numpy(), *inputs)
