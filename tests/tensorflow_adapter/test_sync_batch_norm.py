"""SyncBatchNormalization over ranks equals BatchNormalization on the whole batch."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
from tests.tensorflow_adapter.oracle import MODES, assert_close, assert_same_everywhere, in_mode

both = pytest.mark.parametrize("mode", MODES)


def data(comm: Any, shape: tuple[int, ...]) -> tuple[Any, slice]:
    """Return the whole batch, far from zero, and this rank's rows, whose number differs among ranks."""
    rows = sum(rank + 2 for rank in range(comm.size))
    before = sum(rank + 2 for rank in range(comm.rank))
    return np.random.default_rng(3).normal(5.0, 2.0, size=(rows, *shape)), slice(before, before + comm.rank + 2)


def run(layer: Any, x: Any, y: Any, mode: str, mask: Any = None) -> list[Any]:
    """Return the output and the gradients for input, gamma and beta of a loss over rows."""

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, training=True, mask=mask)
            loss = tf.reduce_sum(tf.cast(tf.square(output - y), tf.float64))
        return [output, *tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])]

    return list(in_mode(mode, step)(x, y))


@both
@pytest.mark.parametrize(("shape", "axis"), [((3,), -1), ((4, 2, 3), -1), ((3, 4, 2), 1)], ids=str)
def test_equals_the_whole_batch(comm: Any, shape: tuple[int, ...], axis: int, mode: str) -> None:
    x, rows = data(comm, shape)
    x, y = tf.constant(x), tf.constant(np.sin(x))
    alone = keras.layers.BatchNormalization(axis=axis, dtype="float64", momentum=0.7)
    layer = hvd.SyncBatchNormalization(axis=axis, dtype="float64", momentum=0.7)
    for one in (alone, layer):
        one.build((None, *shape))
        one.gamma.assign([0.5, 1.0, 2.0])
    for _ in range(2):
        expected = run(alone, x, y, "eager")
        got = run(layer, x[rows], y[rows], mode)
        assert_close(got[0], expected[0][rows], 1e-9)
        assert_close(got[1], expected[1][rows], 1e-9)
        # Each rank has the gradient of its own loss; those of all ranks sum to that of the whole batch.
        assert_close([hvd.allreduce(g, op=hvd.Sum) for g in got[2:]], expected[2:], 1e-9)
    assert_close(layer.moving_mean.value, alone.moving_mean.value, 1e-12)
    assert_close(layer.moving_variance.value, alone.moving_variance.value, 1e-12)
    assert_same_everywhere(comm, [layer.moving_mean, layer.moving_variance])
    assert_close(layer(x, training=False), alone(x, training=False))  # not collective


def test_mask(comm: Any) -> None:
    x, rows = data(comm, (4, 3))
    mask = np.random.default_rng(4).random(x.shape[:2]) < 0.7
    mask[rows] &= comm.rank != 1  # a rank may have nothing to contribute
    everyone: list[Any] = comm.all_gather_object(mask[rows])
    mask = np.concatenate(everyone)
    x, y = tf.constant(x), tf.constant(np.sin(x))
    layers = keras.layers.BatchNormalization(dtype="float64"), hvd.SyncBatchNormalization(dtype="float64")
    for layer in layers:
        layer.build((None, 4, 3))
    expected = run(layers[0], x, y, "eager", tf.constant(mask))
    got = run(layers[1], x[rows], y[rows], "eager", tf.constant(mask[rows]))
    assert_close(got[:2], [expected[0][rows], expected[1][rows]], 1e-6)  # Keras adds 1e-7 to the number of elements


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(comm: Any, policy: str) -> None:
    x, rows = data(comm, (3,))
    alone, layer = keras.layers.BatchNormalization(dtype=policy), hvd.SyncBatchNormalization(dtype=policy)
    whole = tf.constant(x, alone.compute_dtype)
    expected, got = alone(whole, training=True), layer(whole[rows], training=True)
    assert got.dtype == expected.dtype == layer.compute_dtype
    assert_close(tf.cast(got, tf.float32), tf.cast(expected[rows], tf.float32), 1e-2)
    assert_close(layer.moving_variance.value, alone.moving_variance.value, 1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras and NumPy 2
def test_saved_and_trained_by_keras(comm: Any, tmp_path: Any) -> None:
    model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization(), keras.layers.Dense(1)])
    hvd.broadcast_variables(model.variables, 0)
    model.compile("sgd", "mse")
    assert not model.jit_compile
    x, rows = data(comm, (3,))
    model.train_on_batch(x[rows], x[rows][:, :1])
    assert_same_everywhere(comm, [model.layers[0].moving_mean, model.layers[0].moving_variance])
    path = tmp_path / f"{comm.rank}.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.layers[0]) is hvd.SyncBatchNormalization
    assert_close(tf.constant(loaded.predict(x, verbose=0)), tf.constant(model.predict(x, verbose=0)))
