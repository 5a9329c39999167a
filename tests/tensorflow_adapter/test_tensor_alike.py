"""Equal inputs of ranks along an axis: without a whole weight, a difference silently trained different models."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row
from commlib_tensorflow.tensor import parallelize
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, sequential, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Any = {"up": Column(), "down": Row(), "head": Column(gather=True)}
SEQUENCE: Any = {"up": Column(sequence=1), "down": Row(sequence=1)}


def whole(dropout: float = 0.0) -> Any:
    """Two divided layers, dropout of a whole tensor, and a head with gathered output."""
    first = [L.Dropout(dropout)] if dropout else []
    layers = [L.Dense(8, "relu", name="up"), L.Dense(6, use_bias=False, name="down"), L.Dense(4, name="head")]
    return sequential(*first, *layers, shape=(6,))


CASES = {
    "inputs": r"the input of [a-z0-9_/]*up, of shape \[(None|3), 6\]",
    "labels": r"the gradient of the output of [a-z0-9_/]*head, of shape \[(None|3), 4\]",
    "seeds": r"the input of [a-z0-9_/]*up, of shape \[(None|3), 6\]",
}


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_different_inputs_without_whole_weights_are_reported(comm: Any, case: str, eager: bool) -> None:
    """Regression: all weights were divided, so nothing was compared: losses differed, and gradients mixed both."""
    model = parallelize(whole(0.5 if case == "seeds" else 0.0), comm, PLAN)
    model.compile("sgd", "mse", run_eagerly=eager)
    for _ in range(5):
        model.train_on_batch(values(3, 6), values(3, 4))
    if case == "seeds":
        model.layers[0].seed_generator.state.assign([comm.rank, 0])
    own = values(3, 6, seed=comm.rank if case == "inputs" else 0), values(3, 4, seed=comm.rank * (case == "labels"))

    def train() -> None:
        for _ in range(3):  # before its steps 6, 7, 8
            model.train_on_batch(*own)

    if comm.size == 1:
        train()
        return
    with pytest.raises(Exception, match=rf"SGD of Keras on rank {comm.rank} [^$]*{CASES[case]}[^$]*the same batches"):
        train()


def test_a_tensorflow_variable_with_divided_weights(comm: Any) -> None:
    """Regression: the comparison of gradients used a path, which a user's tf.Variable lacks."""

    def trained(model: Any) -> list[float]:
        own, optimizer = tf.Variable(0.5, dtype=tf.float64), keras.optimizers.SGD(0.1)
        results = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(values(3, 6)) ** 2) * tf.exp(own)
            variables = [*model.trainable_variables, own]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            results += [float(loss), float(own)]
        return results

    expected = trained(whole())
    near(trained(parallelize(whole(), comm, PLAN)), expected)


def test_nothing_is_recorded_between_comparisons(comm: Any) -> None:
    """Nothing is recorded without training."""
    model = parallelize(whole(), comm, PLAN)
    model.compile("sgd", "mse", run_eagerly=True)
    watch, results = model.get_layer("up").axis.watch, []
    assert (watch is None) == (comm.size == 1)
    for _ in range(5):
        model(values(3, 6))
        results.append(watch is not None and (watch.on, len(watch.notes)))
        model.train_on_batch(values(3, 6), values(3, 4))
    if watch is not None:
        assert results == [(True, 0), (True, 0), (False, 0), (True, 0), (False, 0)]  # steps 1, 2 and 4 compare


@pytest.mark.parametrize("eager", [True, False])
def test_a_whole_sequence_is_refused_as_a_part(comm: Any, eager: bool) -> None:
    """Regression: a plan with sequence= took the whole for a part: only the weights after a step were wrong."""

    def build() -> Any:
        model = sequential(L.Dense(8, "tanh", name="up"), L.Dense(6, name="down"), shape=(None, 6))
        parallelize(model, comm, SEQUENCE)
        model.compile("sgd", "mse", run_eagerly=eager)
        return model

    model = build()
    uneven = values(2, 3 + (comm.rank == 0), 6, seed=comm.rank)
    for x in (values(2, 3, 6, seed=comm.rank), uneven, values(2, 1, 6).repeat(3, 1)):  # parts; all positions alike
        model.train_on_batch(x, x)
    if comm.size > 1:
        # Eagerly the model's values are compared before a layer's.
        text = (
            "all ranks of world call the model with the same values, but layers with sequence= expect each rank's part"
            if eager
            else r"its part of a sequence, the input of [a-z0-9_/]*up[^$]*is the same on all ranks"
        )
        with pytest.raises(Exception, match=text):
            build().train_on_batch(values(2, 3, 6), values(2, 3, 6))
        with pytest.raises(UsageError, match=r"verify= calls the unsharded model.*each rank's part of a sequence"):
            model = sequential(L.Dense(8, name="up"), L.Dense(6, name="down"), shape=(None, 6))
            parallelize(model, comm, SEQUENCE, verify=values(2, 3, 6))
