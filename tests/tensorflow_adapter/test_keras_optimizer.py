"""Training with Keras over all ranks matches one process on the whole batch, in every mode of training."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as hvd
import commlib_tensorflow.keras as hvd_keras
from commlib import horovod as core
from commlib.errors import UsageError
from commlib_tensorflow import _keras3
from commlib_tensorflow.optimizer import DistributedOptimizer

from .keras_oracle import (
    ROWS,
    assert_changed,
    assert_close,
    assert_same_everywhere,
    batch,
    counted_reductions,
    error,
    mine,
    network,
    step,
    weights,
)

MSE = keras.losses.MeanSquaredError(dtype="float64")
MAKERS: dict[str, Any] = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.05),
}


class OwnStep(keras.Model):  # type: ignore[misc]
    """A model with a user-defined train_step."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = error(self(x, training=True), y)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def train(comm: Any, make: Any, *, steps: int = 3, **settings: Any) -> None:
    """Train with a distributed and with a plain `make()`, and compare."""
    model, alone = network(), network()
    optimizer, plain = DistributedOptimizer(make(), **settings), make()
    before = weights(model)
    for number in range(steps):
        step(model, optimizer, mine(comm, batch(comm, number)))
        step(alone, plain, batch(comm, number))
    assert_changed(alone, before)
    assert_close(model, alone)
    assert_same_everywhere(model)


# The ways to train


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("adam", {"steps_per_execution": 2}), ("sgd", {"run_eagerly": True, "model": OwnStep})],
    ids=["steps_per_execution", "train_step-eagerly"],
)
def test_fit_equals_one_process(comm: Any, kind: str, settings: dict[str, Any]) -> None:
    model = network(model=settings.pop("model", keras.Model))
    model.compile(DistributedOptimizer(MAKERS[kind]()), MSE, **settings)
    alone, plain = network(), MAKERS[kind]()
    before = weights(model)
    data = [batch(comm, number) for number in range(4)]
    shares = [np.concatenate(parts) for parts in zip(*(mine(comm, one) for one in data), strict=True)]
    model.fit(*shares, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    for one in data * 2:
        step(alone, plain, one)
    assert_changed(alone, before)
    assert_close(model, alone)
    assert_same_everywhere(model)
    assert int(model.optimizer.iterations) == 8


def test_own_loop_in_a_graph(comm: Any) -> None:
    model, alone = network(), network()
    optimizer, plain = DistributedOptimizer(MAKERS["sgd"]()), MAKERS["sgd"]()
    optimizer.build(model.trainable_variables)
    traced = tf.function(step)
    for number in range(3):
        x, y = mine(comm, batch(comm, number))
        traced(model, optimizer, (tf.constant(x), tf.constant(y)))
        step(alone, plain, batch(comm, number))
    assert_close(model, alone)
    assert_same_everywhere(model)


def test_apply_without_variables(comm: Any) -> None:
    model, alone = network(), network()
    for trained, optimizer, data in (
        (model, DistributedOptimizer(MAKERS["adam"]()), mine(comm, batch(comm))),
        (alone, MAKERS["adam"](), batch(comm)),
    ):
        optimizer.build(trained.trainable_variables)
        with tf.GradientTape() as tape:
            loss = error(trained(data[0]), data[1])
        optimizer.apply(tape.gradient(loss, trained.trainable_variables))
    assert_close(model, alone)


# Clipping, accumulation, and kinds of gradients


@pytest.mark.parametrize("clip", [{"global_clipnorm": 0.1}, {"clipvalue": 0.01}])
def test_clipping_sees_reduced_gradients(comm: Any, clip: dict[str, float]) -> None:
    model, alone = network(), network()
    optimizer, plain = DistributedOptimizer(keras.optimizers.SGD(1.0, **clip)), keras.optimizers.SGD(1.0, **clip)
    for number in range(2):
        step(model, optimizer, mine(comm, batch(comm, number)))
        step(alone, plain, batch(comm, number))
    assert_close(model, alone)
    assert np.abs(weights(alone)[0] - weights(network())[0]).max() < 0.21  # it did clip


@pytest.mark.parametrize(
    ("own", "settings", "scale", "graph"),
    [
        ({}, {"backward_passes_per_step": 3}, 3.0, True),
        ({}, {"backward_passes_per_step": 3, "average_aggregated_gradients": True}, 1.0, False),
        ({"gradient_accumulation_steps": 3}, {}, 1.0, False),
        ({"gradient_accumulation_steps": 3}, {"backward_passes_per_step": 3}, 3.0, False),
    ],
    ids=["sum", "average", "of-keras", "both"],
)
def test_accumulation(
    comm: Any, monkeypatch: Any, own: dict[str, int], settings: dict[str, Any], scale: float, graph: bool
) -> None:
    """Each update needs one reduction, of the sum over passes as in Horovod, or of their average."""
    model, alone = network(), network()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=2.0, **own), **settings)
    plain = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=2.0)
    optimizer.build(model.trainable_variables)
    take = tf.function(step) if graph else step
    with counted_reductions(monkeypatch) as begun:
        for update in range(2):
            start = weights(model)
            for number in range(3):
                assert_close(weights(model), start, 0)
                data = mine(comm, batch(comm, 3 * update + number))
                take(model, optimizer, tuple(map(tf.constant, data)))
            whole = [np.concatenate(x) for x in zip(*(batch(comm, 3 * update + n) for n in range(3)), strict=True)]
            step(alone, plain, (whole[0], whole[1]), scale)
            assert_close(model, alone)
    assert len(begun) == (2 if comm.size > 1 else 0)
    assert_same_everywhere(model)
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("sparse_as_dense", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_embedding(comm: Any, kind: str, sparse_as_dense: bool) -> None:
    """Sparse gradients update the rows that any rank used; rows of several ranks are summed."""
    table, alone = tf.Variable(tf.ones((7, 2), tf.float64)), tf.Variable(tf.ones((7, 2), tf.float64))
    optimizer = DistributedOptimizer(MAKERS[kind](), sparse_as_dense=sparse_as_dense)
    plain = MAKERS[kind]()
    everyone = [[rank, 5, 5] for rank in range(comm.size)]
    for variable, stepper, rows in (
        (table, optimizer, everyone[comm.rank]),
        (alone, plain, [row for one in everyone for row in one]),
    ):
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(tf.gather(variable, rows)) * [1.0, 2.0])
            (gradient,) = tape.gradient(loss, [variable])
            assert isinstance(gradient, tf.IndexedSlices)
            if sparse_as_dense:
                gradient = gradient if stepper is optimizer else tf.convert_to_tensor(gradient)
            stepper.apply([gradient], [variable])
    assert_close([table.numpy()], [alone.numpy()])
    assert abs(alone.numpy()[:5] - 1).max() > 1e-3
    assert_same_everywhere([table.numpy()])


def test_sum(comm: Any) -> None:
    model, alone = network(), network()
    step(model, DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum), mine(comm, batch(comm)))
    step(alone, keras.optimizers.SGD(0.1), batch(comm), scale=comm.size)
    assert_close(model, alone)


def test_groups_and_predivide(comm: Any) -> None:
    train(comm, MAKERS["sgd"], num_groups=2, gradient_predivide_factor=2.0, steps=2)
    model, alone = network(), network()
    variables = model.trainable_variables
    groups = [[variables[0], variables[3]], [variables[1]]]
    step(model, DistributedOptimizer(MAKERS["sgd"](), groups=groups), mine(comm, batch(comm)))
    step(alone, MAKERS["sgd"](), batch(comm))
    assert_close(model, alone)


def test_groups_travel_together(comm: Any, monkeypatch: Any) -> None:
    model = network()
    with counted_reductions(monkeypatch) as begun:
        optimizer = DistributedOptimizer(MAKERS["sgd"](), num_groups=2, name="two")
        step(model, optimizer, mine(comm, batch(comm)))
    assert len(begun) == (2 if comm.size > 1 else 0)
    assert optimizer.reducer.name == "two"


def test_compression(comm: Any) -> None:
    """The transmitted values have 16 bits, so the result is close, but not equal."""
    model, alone = network(), network()
    before = weights(model)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd_keras.Compression.fp16)
    step(model, optimizer, mine(comm, batch(comm)))
    step(alone, keras.optimizers.SGD(0.1), batch(comm))
    assert_close(model, alone, 2e-3)
    assert_changed(alone, before)
    assert_same_everywhere(model)
    if comm.size > 1:
        assert any((a != b).any() for a, b in zip(weights(model), weights(alone), strict=True))


def test_a_variable_without_gradient(comm: Any) -> None:
    model, alone = network(), network()
    plain, optimizer = MAKERS["sgd"](), DistributedOptimizer(MAKERS["sgd"]())
    for trained, stepper, data in ((model, optimizer, mine(comm, batch(comm))), (alone, plain, batch(comm))):
        with tf.GradientTape() as tape:
            loss = error(trained(data[0]), data[1])
        gradients = tape.gradient(loss, trained.trainable_variables)
        gradients[1] = None
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            stepper.apply(gradients, trained.trainable_variables)
    assert_close(model, alone)


@pytest.mark.ranks(min=3)
def test_process_set(comm: Any) -> None:
    pair = core.add_process_set([0, 1])
    try:
        if comm.rank < 2:
            model, alone = network(), network()
            optimizer = DistributedOptimizer(MAKERS["sgd"](), process_set=pair)
            x, y = batch(comm)
            step(model, optimizer, mine(comm, (x, y)))
            step(alone, MAKERS["sgd"](), (x[: 2 * ROWS], y[: 2 * ROWS]))
            assert_close(model, alone)
    finally:
        core.remove_process_set(pair)


@pytest.mark.parametrize("scale", [True, False])
def test_local_layers(comm: Any, scale: bool) -> None:
    """Gradients of local layers stay on their rank, divided by the number of ranks if requested."""
    model, alone, local = network(), network(), network()
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.layers[1], scale_local_gradients=scale
    )
    optimizer.register_local_var(model.trainable_variables[3])
    step(model, optimizer, mine(comm, batch(comm)))
    step(alone, keras.optimizers.SGD(0.1), batch(comm))
    step(local, keras.optimizers.SGD(0.1 / comm.size if scale else 0.1), mine(comm, batch(comm)))
    expected = [*weights(local)[:2], weights(alone)[2], weights(local)[3]]
    assert_close(weights(model), expected, 1e-8)  # 0.1 / size is not exact


# Hooks in Keras' optimizers


def test_it_is_the_same_object_of_the_same_class() -> None:
    optimizer = keras.optimizers.AdamW(0.25)
    wrapped = DistributedOptimizer(optimizer)
    assert wrapped is optimizer
    assert isinstance(wrapped, keras.optimizers.AdamW)
    assert wrapped.__class__ is keras.optimizers.AdamW  # the class that Keras writes into files
    assert type(wrapped).__name__ == "AdamW"
    assert wrapped.get_config()["learning_rate"] == 0.25


def test_the_expected_hook_is_used() -> None:
    """`_clip_gradients` is private: this test fails if Keras no longer has it, and reduces in each pass instead."""
    assert _keras3.hook_of(keras.optimizers.SGD) is _keras3.ClipHook
    assert _keras3.hook_of(object) is _keras3.ApplyHook


@pytest.mark.parametrize("settings", [{}, {"backward_passes_per_step": 2}])
def test_the_other_hook_trains_as_well(comm: Any, monkeypatch: Any, settings: dict[str, Any]) -> None:
    monkeypatch.setattr(_keras3, "hook_of", lambda plain: _keras3.ApplyHook)
    model, alone = network(), network()
    optimizer, plain = DistributedOptimizer(MAKERS["sgd"](), **settings), MAKERS["sgd"]()
    passes = settings.get("backward_passes_per_step", 1)
    for number in range(2):
        for _ in range(passes):
            step(model, optimizer, mine(comm, batch(comm, number)))
        step(alone, plain, batch(comm, number), scale=passes)
    assert_close(model, alone)


class Overrules(keras.optimizers.SGD):  # type: ignore[misc]
    """An optimizer that updates variables by itself."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign_sub(gradient)


def test_an_optimizer_that_does_not_reduce_is_refused() -> None:
    optimizer = DistributedOptimizer(Overrules(0.1))
    with pytest.raises(UsageError, match=r"Overrules\.apply\(\).*DistributedGradientTape"):
        optimizer.apply([tf.ones(2)], [keras.Variable(np.ones(2))])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"op": hvd.Adasum}, "Average or Sum.*Adasum"),
        ({"op": hvd.Max}, "Average or Sum.*Max"),
        ({"backward_passes_per_step": 0}, "at least 1, got 0"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"overlap": "x"}, "overlap is 'x', expected True, False or None"),
        ({"sparse_as_dense": "yes"}, "sparse_as_dense is 'yes', expected True or False"),
        ({"scale_local_gradients": "no"}, "scale_local_gradients is 'no', expected True or False"),
        ({"average_aggregated_gradients": 2}, "average_aggregated_gradients is 2, expected True or False"),
        ({"op": "maen"}, r"op is 'maen'.*did you mean 'mean'\?"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DistributedOptimizer(keras.optimizers.SGD(0.1), **settings)


def test_other_objects_are_refused_as_optimizers() -> None:
    with pytest.raises(UsageError, match="got str"):
        DistributedOptimizer("sgd")
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(UsageError, match="already"):
        DistributedOptimizer(optimizer)
    with pytest.raises(UsageError, match="already"):
        DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))
    with pytest.raises(UsageError, match="make each of those distributed"):
        DistributedOptimizer(keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD())))
    with pytest.raises(UsageError, match="contradicts gradient_accumulation_steps=2"):
        DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=3)


def test_passes_are_counted_from_the_first_step() -> None:
    optimizer, variable = keras.optimizers.SGD(0.1), keras.Variable(np.ones(2), dtype="float32")
    optimizer.build([variable])
    DistributedOptimizer(optimizer, backward_passes_per_step=2)  # built, but it has not run yet
    optimizer.apply([tf.ones(2)], [variable])
    np.testing.assert_array_equal(variable.numpy(), 1)
    optimizer.apply([tf.ones(2)], [variable])
    np.testing.assert_allclose(variable.numpy(), 0.8, rtol=1e-6)
    used = keras.optimizers.SGD(0.1)
    used.apply([tf.ones(2)], [variable])
    with pytest.raises(UsageError, match="taken 1 steps"):
        DistributedOptimizer(used, backward_passes_per_step=2)


# XLA


def test_compiling_with_xla_is_refused() -> None:
    model = network()
    with pytest.raises(UsageError, match="jit_compile=True does not work with a DistributedOptimizer"):
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)  # other optimizers may
    assert model.jit_compile


@pytest.mark.parametrize("scaled", [False, True])
def test_auto_disables_xla_on_a_gpu(monkeypatch: Any, scaled: bool) -> None:
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: [gpu])
    model = network()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    assert model.jit_compile  # so that the optimizer makes the difference
    optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    assert not model.jit_compile


@pytest.mark.ranks(min=2)
def test_a_step_that_xla_compiles_is_refused(comm: Any) -> None:
    model, optimizer = network(), DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    x, y = mine(comm, batch(comm))
    with pytest.raises(UsageError, match="jit_compile"):
        tf.function(step, jit_compile=True, autograph=False)(model, optimizer, (tf.constant(x), tf.constant(y)))
