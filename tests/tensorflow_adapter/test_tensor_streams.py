"""Random streams draw equal numbers for whole tensors, and different ones for divided tensors."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Mesh
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row, Sequence
from commlib_tensorflow.tensor import dropout, parallelize, seed
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, sequential, values

__all__ = ["in_float64"]

L = keras.layers


def of_all(comm: Any, x: Any) -> list[Any]:
    return [np.asarray(one) for one in comm.all_gather_object(np.asarray(x).tolist())]


def differ(every: list[Any]) -> bool:
    return all(np.any(one != other) for at, one in enumerate(every) for other in every[:at])


@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_of_divided_tensors(comm: Any, compiled: bool) -> None:
    generator, x = keras.random.SeedGenerator(7), tf.ones((40, 50))

    def draw() -> Any:
        return dropout(x, 0.25, generator, comm)

    run = tf.function(draw) if compiled else draw
    first, second = (run().numpy() for _ in range(2))
    assert np.any(first != second)
    assert differ(of_all(comm, first))
    assert set(np.unique(first)) == {0, np.float64(tf.cast(1 / 0.75, x.dtype))}
    assert abs(np.mean(first == 0) - 0.25) < 0.05
    near(of_all(comm, generator.state)[0], generator.state)
    generator.state.assign([7, 0])
    near(run(), first)
    if comm.size == 1:
        near(first, keras.random.dropout(x, 0.25, seed=keras.random.SeedGenerator(7)))


@pytest.mark.parametrize("compiled", [False, True])
def test_recomputation_repeats_dropout(comm: Any, compiled: bool) -> None:
    generator, x = keras.random.SeedGenerator(7), tf.ones((4, 50))

    def step() -> Any:
        drawn = generator.next()
        inner = tf.recompute_grad(lambda x: dropout(x, 0.5, drawn, comm) * x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = inner(x)
        return out, tape.gradient(out, x)

    out, gradient = (tf.function(step) if compiled else step)()
    near(gradient, 2 * out)
    assert int(generator.state[1]) == 1


def test_layers(comm: Any) -> None:
    """Dropout between divided layers differs among ranks; after them it is the same on all."""
    model = sequential(
        L.Dense(8, name="up"), L.Dropout(0.5, name="inner"), L.Dense(6, name="down"), L.Dropout(0.5), shape=(5,)
    )
    parallelize(model, comm, {"up": Column(), "inner": Sequence(-1), "down": Row()})
    x = tf.constant(values(4, 5))
    for run in (model, tf.function(lambda x, training: model(x, training=training))):
        out = run(x, training=True)
        assert np.any(np.asarray(out) == 0)
        near(of_all(comm, out)[0], out)
        near(of_all(comm, run(x, training=False))[0], run(x, training=False))
    inner = model.get_layer("inner")
    assert differ(of_all(comm, inner(tf.ones((40, 50)), training=True)))
    near(inner(x), x)


def test_noise_on_shards(comm: Any) -> None:
    model = sequential(L.GaussianNoise(1.0, name="noise"), L.Activation("relu", name="act"), shape=(None, 5))
    parallelize(model, comm, {"noise": Sequence(), "act": Sequence()})
    assert differ(of_all(comm, model(tf.zeros((2, 3, 5)), training=True)))


def test_seeds_of_a_divided_model_come_from_rank_0(comm: Any) -> None:
    model = keras.Sequential([keras.Input((5,)), L.Dropout(0.5, seed=100 + comm.rank), L.Dense(4, name="d")])
    parallelize(model, comm, {"d": Column(gather=True)})
    near(model.layers[0].seed_generator.state, [100, 0])


def test_fit_shuffles_equally_on_all_ranks(comm: Any) -> None:
    """Regression: ranks with different seeds, or none, silently trained on different rows."""
    for given in (100 + comm.rank, 5):
        keras.utils.set_random_seed(given)
        model = sequential(L.Dense(8, name="up"), L.Dense(5, name="down"), shape=(5,))
        parallelize(model, comm, {"up": Column(), "down": Row()})
        model.compile(optimizer="sgd", loss="mse")
        losses = model.fit(values(20, 5), values(20, 5, seed=1), batch_size=3, epochs=2, verbose=0).history["loss"]
        near(of_all(comm, losses)[0], np.asarray(losses))
    assert tf.compat.v1.get_seed(1)[0] == 5, "a seed that all ranks have stays"


def test_seed(comm: Any) -> None:
    mesh = Mesh(dp=comm.size, tp=1, ranks=comm)
    assert len(set(comm.all_gather_object(seed(mesh, 5)))) == comm.size
    assert differ(of_all(comm, keras.random.normal((20,))))
    mesh = Mesh(dp=1, tp=comm.size, ranks=comm)
    assert set(comm.all_gather_object(seed(mesh, 5))) == {5}
    drawn = keras.random.normal((20,))
    near(of_all(comm, drawn)[0], drawn)
    with pytest.raises(UsageError, match="non-negative integer"):
        seed(mesh, -1)
