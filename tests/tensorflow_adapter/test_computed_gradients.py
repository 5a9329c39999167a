"""`compute_gradients` of distributed optimizers and `get_local_and_global_gradients` of tapes, as in Horovod."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import commlib_tensorflow as hvd
from commlib.errors import UsageError
from commlib_tensorflow.optimizer import DistributedOptimizer

from .keras_oracle import assert_close, assert_same_everywhere, batch, counted_reductions, error, mine, network

MAKERS: dict[str, Any] = {
    "keras": (keras, lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5)),
    "tf_keras": (tf_keras, lambda: tf_keras.optimizers.Adam(0.05, global_clipnorm=0.5, jit_compile=False)),
    "legacy": (tf_keras, lambda: tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9)),
}
kinds = pytest.mark.parametrize("kind", MAKERS)


def loss_of(model: Any, data: Any, scale: float = 1.0) -> Any:
    return lambda: error(model(data[0], training=True), data[1]) * scale


def plain_step(model: Any, optimizer: Any, data: Any, scale: float = 1.0) -> list[Any]:
    with tf.GradientTape() as tape:
        loss = loss_of(model, data, scale)()
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return list(gradients)


@kinds
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_computed_gradients_are_reduced_once(comm: Any, monkeypatch: Any, kind: str, op: str, graph: bool) -> None:
    """The returned gradients cover all ranks, and a step with them matches one process."""
    of, make = MAKERS[kind]
    model, alone, plain = network(of), network(of), make()
    optimizer = DistributedOptimizer(make(), op=getattr(hvd, op))
    factor = comm.size if op == "Sum" else 1

    def step(x: Any, y: Any) -> Any:
        pairs = optimizer.compute_gradients(loss_of(model, (x, y)), model.trainable_variables)
        optimizer.apply_gradients(pairs)
        return [gradient for gradient, _ in pairs]

    take = tf.function(step) if graph else step
    with counted_reductions(monkeypatch) as begun:
        for number in range(2):
            gradients = take(*map(tf.constant, mine(comm, batch(comm, number))))
            expected = plain_step(alone, plain, batch(comm, number), factor)
            assert_close([g.numpy() for g in gradients], [g.numpy() for g in expected])
            assert_same_everywhere([g.numpy() for g in gradients])
            assert_close(model, alone)
    assert len(begun) == (2 if comm.size > 1 else 0)


@kinds
def test_a_tape_and_a_tensor(comm: Any, kind: str) -> None:
    of, make = MAKERS[kind]
    model, alone, optimizer = network(of), network(of), DistributedOptimizer(make())
    with tf.GradientTape() as tape:
        loss = loss_of(model, mine(comm, batch(comm)))()
    pairs = optimizer.compute_gradients(loss, model.trainable_variables, tape=tape)
    optimizer.apply_gradients(pairs)
    plain_step(alone, make(), batch(comm))
    assert_close(model, alone)
    with pytest.raises(UsageError, match="tape"):
        optimizer.compute_gradients(loss, model.trainable_variables)


@kinds
def test_gradients_modified_after_reduction(comm: Any, kind: str) -> None:
    """Averaging equal values changes nothing; a sum would be too large, and is refused."""
    of, make = MAKERS[kind]
    model, alone, plain = network(of), network(of), make()
    optimizer = DistributedOptimizer(make())
    pairs = optimizer.compute_gradients(loss_of(model, mine(comm, batch(comm))), model.trainable_variables)
    optimizer.apply_gradients([(gradient * 0.5, variable) for gradient, variable in pairs])
    plain_step(alone, plain, batch(comm), 0.5)
    assert_close(model, alone)

    summing = DistributedOptimizer(make(), op=hvd.Sum)
    pairs = summing.compute_gradients(loss_of(model, mine(comm, batch(comm))), model.trainable_variables)
    with pytest.raises(UsageError, match="another sum would be too large"):
        summing.apply_gradients([(gradient * 0.5, variable) for gradient, variable in pairs])
    plain_step(model, summing, mine(comm, batch(comm, 1)))  # training continues


def test_several_passes_are_refused(comm: Any) -> None:
    for of, optimizer in (
        (keras, DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)),
        (tf_keras, DistributedOptimizer(tf_keras.optimizers.SGD(0.1, jit_compile=False), backward_passes_per_step=2)),
    ):
        model = network(of)
        with pytest.raises(UsageError, match="several passes"):
            optimizer.compute_gradients(loss_of(model, mine(comm, batch(comm))), model.trainable_variables)


@pytest.mark.parametrize("scaled", [False, True])
def test_minimize_reduces_once(comm: Any, monkeypatch: Any, scaled: bool) -> None:
    model, alone, plain = network(tf_keras), network(tf_keras), MAKERS["tf_keras"][1]()
    optimizer: Any = DistributedOptimizer(MAKERS["tf_keras"][1](), op=hvd.Sum)
    if scaled:
        optimizer = tf_keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=8.0)
    with counted_reductions(monkeypatch) as begun:
        optimizer.minimize(loss_of(model, mine(comm, batch(comm))), model.trainable_variables)
    plain_step(alone, plain, batch(comm), comm.size)
    assert_close(model, alone)
    assert len(begun) == (1 if comm.size > 1 else 0)


# The tape


@pytest.mark.parametrize("generic", [False, True])
def test_local_and_global_gradients(comm: Any, generic: bool) -> None:
    names = [f"{name} of {comm.rank}" if generic else name for name in ("shared", "own", "last")]
    shared, own, last = (tf.Variable(1.0, name=name) for name in names)
    factor = comm.rank + 1.0
    with tf.GradientTape() as tape:
        loss = factor * (shared + 2.0 * own + 3.0 * last)
    distributed = hvd.DistributedGradientTape(tape)
    distributed.register_local_source(own)
    local, everywhere = distributed.get_local_and_global_gradients(loss, [shared, own, last], use_generic_names=generic)
    mean = (comm.size + 1) / 2
    assert [source is variable for (source, _), variable in zip(local, [own], strict=True)] == [True]
    assert [source is v for (source, _), v in zip(everywhere, [shared, last], strict=True)] == [True, True]
    np.testing.assert_allclose(local[0][1], 2.0 * factor / comm.size, rtol=1e-6)
    np.testing.assert_allclose([gradient for _, gradient in everywhere], [mean, 3.0 * mean], rtol=1e-6)


def test_generic_names_do_not_find_groups(comm: Any) -> None:
    variable = tf.Variable(1.0, name="one")
    with tf.GradientTape() as tape:
        loss = variable * 2.0
    with pytest.raises(UsageError, match="use_generic_names"):
        hvd.DistributedGradientTape(tape, groups=[[variable]]).gradient(loss, [variable], use_generic_names=True)
