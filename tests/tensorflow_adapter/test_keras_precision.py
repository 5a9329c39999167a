"""Loss scales: on an overflow on one rank, all skip the step and change the scale together."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import horovod as core
from commlib_tensorflow.optimizer import DistributedOptimizer

from .keras_oracle import (
    ROWS,
    Data,
    assert_changed,
    assert_close,
    assert_same_everywhere,
    batch,
    mine,
    network,
    state_of,
    step,
    weights,
)

OVERFLOWS = {1, 2, 5}  # steps in which one rank, a different one each time, has a gradient that is not finite


def overflowing(comm: Any, number: int, value: float = np.inf) -> Data:
    """Return the rows of all ranks; in some steps one of them is too large."""
    x, y = batch(comm, number)
    if number in OVERFLOWS:
        x[number % comm.size * ROWS, 0] = value
    return x, y


def nested(kind: str, inner: Any, **settings: Any) -> Any:
    if kind == "outside":
        return keras.optimizers.LossScaleOptimizer(DistributedOptimizer(inner, **settings), dynamic_growth_steps=2)
    return DistributedOptimizer(keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2), **settings)


@pytest.mark.parametrize(("kind", "passes"), [("outside", 1), ("outside", 2), ("inside", 2)])
def test_overflow_on_one_rank(comm: Any, kind: str, passes: int) -> None:
    model, alone = network(), network()
    own = {} if passes == 1 else {"gradient_accumulation_steps": passes}
    optimizer = nested(kind, keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=passes)
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, **own), dynamic_growth_steps=2)
    if passes > 1:  # Keras averages over passes, and Horovod sums
        plain.inner_optimizer.learning_rate = 0.1 * passes
    scales, before = [], weights(model)
    for number in range(8):
        start = weights(model)
        step(model, optimizer, mine(comm, overflowing(comm, number)))
        step(alone, plain, overflowing(comm, number))
        if number in OVERFLOWS:
            assert_close(model, start, 0)
        scales.append(float(optimizer.dynamic_scale.numpy()))
        assert scales[-1] == float(plain.dynamic_scale.numpy())
    assert len(set(scales)) > 2
    assert_changed(alone, before)
    assert_close(model, alone, 1e-6)  # in float32: the learning rate times the number of passes
    assert_same_everywhere([*weights(model), *state_of(optimizer)])


def test_fit_in_mixed_precision(comm: Any, mixed_float16: None) -> None:
    """compile() itself wraps the optimizer in a LossScaleOptimizer."""
    model, alone = (network(dtype="mixed_float16") for _ in range(2))
    for one in (model, alone):  # small, so that nothing overflows at the initial scale
        one.set_weights([weight * 0.1 for weight in one.get_weights()])
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    data = [(0.1 * x, 0.1 * y) for x, y in (overflowing(comm, number, 1e30) for number in range(4))]
    shares = [np.concatenate(parts) for parts in zip(*(mine(comm, one) for one in data), strict=True)]
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    before = weights(model)
    model.fit(*shares, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    for one in data * 2:
        step(alone, plain, one)
    assert np.abs(weights(alone)[3] - before[3]).max() > 0.05
    assert_close(model, alone, 2e-3)
    scale = float(model.optimizer.dynamic_scale.numpy())
    assert scale == float(plain.dynamic_scale.numpy()) == 2.0 ** (15 - 4)
    assert_same_everywhere([*weights(model), *state_of(model.optimizer)])


def test_other_loss_scale_optimizers_do_not_communicate(monkeypatch: Any) -> None:
    DistributedOptimizer(keras.optimizers.SGD(0.1))
    monkeypatch.setattr(core, "start_allreduce", None)  # any caller fails
    plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
    variable = keras.Variable(np.ones(2), dtype="float32")
    plain.apply([tf.constant([1.0, 2.0]) * 2.0**15], [variable])
    np.testing.assert_allclose(variable.numpy(), [0.5, 0.0])
    plain.apply([tf.constant([1.0, np.inf])], [variable])
    np.testing.assert_allclose(variable.numpy(), [0.5, 0.0])


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_bfloat16"])
def test_fit_in_bfloat16(comm: Any, dtype: str) -> None:
    """Weights of up to 2 round to 2**-8 in each of 8 steps, and so may their gradients: 8 * 2 * 2**-8 = 0.06."""
    model, alone = network(dtype=dtype), network(dtype=dtype)
    data = [batch(comm, number) for number in range(4)]
    shares = [np.concatenate(parts) for parts in zip(*(mine(comm, one) for one in data), strict=True)]
    before = [weight.astype(np.float32) for weight in weights(model)]
    model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(*shares, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    alone.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    alone.fit(*(np.concatenate(parts) for parts in zip(*data, strict=True)),
              batch_size=ROWS * comm.size, epochs=2, shuffle=False, verbose=0)  # fmt: skip
    got, expected = ([weight.astype(np.float32) for weight in weights(one)] for one in (model, alone))
    assert max(np.abs(now - then).max() for now, then in zip(expected, before, strict=True)) > 0.2
    assert_close(got, expected, 0.06)
    assert_same_everywhere(model)
