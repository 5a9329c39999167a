"""1-bit Adam and 1-bit LAMB as optimizers of Keras. Tests in tests/unit/optim cover the arithmetic."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import MismatchError, UsageError
from commlib_tensorflow import DistributedOptimizer
from commlib_tensorflow.one_bit import OneBitAdam, OneBitLAMB

from .keras_oracle import (
    ROWS,
    assert_changed,
    assert_close,
    assert_same_everywhere,
    batch,
    mine,
    network,
    step,
    weights,
)


def make(kind: Any = OneBitAdam, freeze_step: int = 3, **options: Any) -> tuple[Any, Any]:
    options = {"learning_rate": 0.01, "compress_within_node": True, **options}
    return network(dtype="float32"), kind(freeze_step=freeze_step, **options)


def train(comm: Any, model: Any, optimizer: Any, first: int, last: int, *, traced: bool = False) -> None:
    function = tf.function(lambda *data: step(model, optimizer, data)) if traced else None
    for number in range(first, last):
        data = mine(comm, batch(comm, number))
        step(model, optimizer, data) if function is None else function(*map(tf.constant, data))


def test_before_the_freeze_it_matches_adam_on_the_whole_batch(comm: Any) -> None:
    options = {"learning_rate": 0.01, "weight_decay": 0.1, "epsilon": 1e-7}
    model, optimizer = make(freeze_step=100, **options)
    alone, reference = network(dtype="float32"), keras.optimizers.Adam(**options)
    train(comm, model, optimizer, 0, 5)
    for number in range(5):
        step(alone, reference, batch(comm, number))
    # Keras adds epsilon before it corrects the second moment, which matters less than 1e-5 of a step of 0.01 here;
    # otherwise a few roundings, of numbers up to 3, in each of 5 steps.
    assert_close(model, alone, 5 * (1e-5 * 0.01 + 20 * 2.0**-24))
    assert int(optimizer.iterations) == 5
    assert_same_everywhere(model)


@pytest.mark.parametrize(("kind", "traced"), [(OneBitAdam, False), (OneBitLAMB, True)])
def test_after_the_freeze_all_ranks_stay_equal(comm: Any, kind: Any, traced: bool) -> None:
    model, optimizer = make(kind)
    train(comm, model, optimizer, 0, 8, traced=traced)
    assert_same_everywhere(model)
    assert_same_everywhere([variable.numpy() for variable in optimizer.variables])
    assert all(np.isfinite(weight).all() for weight in weights(model))


def test_fit_with_accumulation_and_clipping(comm: Any) -> None:
    model, optimizer = make(gradient_accumulation_steps=2, clipnorm=1.0)
    model.compile(optimizer, "mse")
    before = weights(model)
    inputs, targets = mine(comm, batch(comm))
    model.fit(np.tile(inputs, (12, 1)), np.tile(targets, (12, 1)), batch_size=ROWS, epochs=1, verbose=0)
    assert int(optimizer.iterations) == 6
    assert_changed(model, before)
    assert_same_everywhere(model)


def test_ranks_agree_on_a_step_under_loss_scaling(comm: Any) -> None:
    model, inner = make(freeze_step=2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    for number in range(5):
        before = weights(model)
        overflow = number == 3 and comm.rank == comm.size - 1
        step(model, optimizer, mine(comm, batch(comm, number)), np.inf if overflow else 1.0)
        assert all(map(np.array_equal, before, weights(model))) == (number == 3)
    assert_same_everywhere(model)


def test_a_saved_model_continues_training(comm: Any, tmp_path: Any) -> None:
    """It is exact before the freeze, when all state is in variables; later it lacks the compression residuals."""
    model, optimizer = make(OneBitLAMB)
    model.compile(optimizer, "mse")
    train(comm, model, optimizer, 0, 2)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.optimizer) is OneBitLAMB and again.optimizer.get_config() == optimizer.get_config()
    for one in (model, again):
        train(comm, one, one.optimizer, 2, 3)
    assert_close(again, model, 0)
    train(comm, again, again.optimizer, 3, 6)
    again.save(tmp_path / "later.keras")
    later = keras.saving.load_model(tmp_path / "later.keras")
    assert_close([v.numpy() for v in later.optimizer.variables], [v.numpy() for v in again.optimizer.variables], 0)
    train(comm, later, later.optimizer, 6, 8)
    assert_same_everywhere(later)


def test_invalid_uses_are_refused(comm: Any) -> None:
    with pytest.raises(UsageError, match="freeze_step"):
        make(freeze_step=0)
    model, optimizer = make()
    with pytest.raises(UsageError, match="already"):
        DistributedOptimizer(optimizer)
    with pytest.raises(UsageError, match="float64"):
        train(comm, network(), optimizer, 0, 1)
    with pytest.raises(UsageError, match="none can stay on one rank"):
        optimizer.register_local_var(model.trainable_variables[0])


@pytest.mark.ranks(min=2)
def test_ranks_with_different_options_are_refused(comm: Any) -> None:
    model, optimizer = make(freeze_step=2 + comm.rank)
    with pytest.raises(MismatchError, match=r"OneBitAdam.*freeze_step"):
        train(comm, model, optimizer, 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variance_floor": 1.0}, "OneBitAdam: variance_floor"),
        ({"learning_rate": -1.0}, "OneBitAdam: expected lr >= 0"),
        ({"epsilon": 0.0}, "eps > 0"),
        ({"beta_2": 1.0}, "betas"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_invalid_options_are_refused_at_construction(comm: Any, options: dict[str, Any], message: str) -> None:
    """Regression: the error came in the first step, after communication, or never."""
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_the_learning_rate_may_be_a_schedule(comm: Any) -> None:
    model, optimizer = make(learning_rate=keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.5))
    before = weights(model)
    train(comm, model, optimizer, 0, 1)
    assert_changed(model, before)


def test_late_gradients_are_warned_of(comm: Any) -> None:
    """Regression: only PyTorch's optimizer warned."""
    variables = [keras.Variable(np.ones(2), dtype="float32") for _ in range(2)]
    _, optimizer = make(freeze_step=2)
    optimizer.build(variables)
    for late in (0.0, 0.0, 0.0):
        optimizer.apply([tf.ones(2), tf.fill(2, late)], variables)
    with pytest.warns(UserWarning, match="larger freeze_step"):
        optimizer.apply([tf.ones(2), tf.ones(2)], variables)
    np.testing.assert_array_equal(variables[1].numpy(), [1.0, 1.0])
