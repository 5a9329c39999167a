"""Oracle of the Keras part: train plain Keras in one process on the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from commlib import horovod as core
from commlib.data_parallel.bucket_reducer import BucketReducer
from commlib.data_parallel.buckets import Bucket

ROWS = 4  # of a batch, per rank
FEATURES = 3
Data = tuple[Any, Any]


def network(of: Any = keras, dtype: str = "float64", **arguments: Any) -> Any:
    """A small model of Keras 3 or tf_keras, the same on every rank. `arguments` are for the class of the model."""
    inputs = of.layers.Input((FEATURES,))
    hidden = of.layers.Dense(4, activation="tanh", dtype=dtype)(inputs)
    outputs = of.layers.Dense(2, dtype=dtype)(hidden)
    model = arguments.pop("model", of.Model)(inputs, outputs, **arguments)
    generator = np.random.default_rng(0)
    model.set_weights([generator.normal(size=weight.shape) for weight in model.get_weights()])
    return model


def batch(comm: Any, step: int = 0) -> Data:
    """The rows of all ranks: inputs and targets, in float32, to which `fit` converts them."""
    generator = np.random.default_rng(1000 + step)
    rows = ROWS * comm.size
    return tuple(generator.normal(size=(rows, columns)).astype(np.float32) for columns in (FEATURES, 2))  # type: ignore[return-value]


def mine(comm: Any, data: Data) -> Data:
    """This rank's rows."""
    rows = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    return data[0][rows], data[1][rows]


def error(predicted: Any, expected: Any) -> Any:
    """Return the mean square error in the precision of the prediction; `fit` otherwise computes it in float32."""
    return tf.reduce_mean(tf.square(predicted - tf.cast(expected, predicted.dtype)))


def step(model: Any, optimizer: Any, data: Data, scale: float = 1.0) -> None:
    """Take a step with `scale` times the gradients of the mean square error, as a user-defined loop does."""
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(error(model(data[0], training=True), data[1]) * scale)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def weights(model: Any) -> list[Any]:
    return [np.asarray(weight) for weight in model.get_weights()]


def state_of(optimizer: Any) -> list[Any]:
    """Return the optimizer's variables that are equal on all ranks, without those accumulated between updates."""
    return [variable.numpy() for variable in optimizer.variables if "gradient_accumulator" not in variable.name]


def assert_close(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    """Compare the weights of two models, or lists of arrays."""
    got = got if isinstance(got, list) else weights(got)
    expected = expected if isinstance(expected, list) else weights(expected)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def assert_changed(model: Any, before: list[Any]) -> None:
    assert all(np.abs(now - then).max() > 1e-3 for now, then in zip(weights(model), before, strict=True))


def assert_same_everywhere(values: Any) -> None:
    """Compare arrays (or the weights of a model) bit for bit with those of rank 0."""
    values = values if isinstance(values, list) else weights(values)
    for number, theirs in enumerate(core.allgather_object([np.asarray(value).tobytes() for value in values])):
        assert theirs == [np.asarray(value).tobytes() for value in values], f"rank {number} has others"


@contextmanager
def counted_reductions(monkeypatch: Any) -> Iterator[list[Bucket]]:
    """Yield the list of the buckets that are reduced within the context."""
    begun: list[Bucket] = []
    finish = BucketReducer.finish

    def counting(self: BucketReducer, *remaining: Any) -> None:
        begun.extend(self.buckets)
        finish(self, *remaining)

    with monkeypatch.context() as patch:
        patch.setattr(BucketReducer, "finish", counting)
        yield begun
