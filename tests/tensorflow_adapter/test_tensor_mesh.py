"""Divided Keras models in `fit` match one process, with replicas, clipping, accumulation and loss scales."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Mesh
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Row, Vocabulary
from commlib_tensorflow import DistributedGradientTape, DistributedOptimizer, gather_model, pipeline
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.tensor import gather, parallelize, scatter
from tests.tensorflow_adapter.tensor_oracle import alone

WIDTH, HIDDEN, ROWS = 6, 9, 8
PLAN: Any = {"up*": Column(), "down*": Row()}


@pytest.fixture
def float64() -> Iterator[None]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def make() -> Any:
    """Two blocks with a residual and a norm each."""
    keras.utils.set_random_seed(0)
    x = given = keras.Input((WIDTH,))
    for block in range(2):
        h = keras.layers.LayerNormalization(name=f"norm{block}")(x)
        h = keras.layers.Dense(HIDDEN, activation="tanh", name=f"up{block}")(h)
        x = keras.layers.Add(name=f"add{block}")([x, keras.layers.Dense(WIDTH, name=f"down{block}")(h)])
    return keras.Model(given, x)


def data(batches: int = 4) -> tuple[Any, Any]:
    x, y = np.random.default_rng(1).standard_normal((2, batches * ROWS, WIDTH))
    return x, y


def whole_weights(model: Any) -> list[Any]:
    """Return all weights with whole shapes. Collective."""
    results = []
    for weight in model.weights:
        shard = shard_of(weight)
        results.append(weight.numpy() if shard is None else shard.whole(weight.numpy()))
    return results


def fit(model: Any, x: Any, y: Any, rows: int = ROWS) -> list[float]:
    losses: list[float] = model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


_references: dict[str, Any] = {}


def reference(comm: Any, options: Any) -> Any:
    """Return the losses and weights of one process, trained once for all tests. Collective."""

    def trained() -> Any:
        plain = make()
        plain.compile(keras.optimizers.Adam(0.01, **options), "mse")
        return fit(plain, *data()), plain.get_weights()

    key = str(options)
    if key not in _references:
        _references[key] = alone(comm, trained)
    return _references[key]


OPTIONS: Any = [
    {},
    {"global_clipnorm": 0.05},
    {"clipnorm": 0.02},
    {"clipvalue": 0.01},
    {"gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options), "plain"))
def test_fit(comm: Any, float64: None, options: Any) -> None:
    losses, weights = reference(comm, options)
    divided = parallelize(make(), comm, PLAN)
    divided.compile(keras.optimizers.Adam(0.01, **options), "mse")
    close(fit(divided, *data()), losses)
    for got, expected in zip(whole_weights(divided), weights, strict=True):
        close(got, expected)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize(
    "options", [{}, {"global_clipnorm": 0.05}, {"clipnorm": 0.02}], ids=["plain", "global", "each"]
)
def test_replicas(comm: Any, float64: None, options: Any) -> None:
    if comm.size % 2:
        pytest.skip("two ranks divide the model")
    mesh = Mesh(dp=-1, tp=2)
    _, weights = reference(comm, options)
    divided = parallelize(make(), mesh["tp"], PLAN)
    divided.compile(DistributedOptimizer(keras.optimizers.Adam(0.01, **options), mesh=mesh), "mse")
    replicas, place = mesh.shape.size("dp"), mesh.coordinate("dp")
    own = [part.reshape(-1, replicas, ROWS // replicas, WIDTH)[:, place].reshape(-1, WIDTH) for part in data()]
    x, y = own
    fit(divided, x, y, ROWS // replicas)
    for got, expected in zip(whole_weights(divided), weights, strict=True):
        close(got, expected)


@pytest.mark.ranks(min=2)
def test_tapes_identify_ranks_by_marks(comm: Any, float64: None) -> None:
    """Regression: a tape refused divided variables without a process set, where the optimizer uses their marks."""
    if comm.size % 2:
        pytest.skip("two ranks divide the model")
    mesh = Mesh(dp=-1, tp=2)
    divided, replicas = parallelize(make(), mesh["tp"], PLAN), mesh.shape.size("dp")
    x, y = data(1)

    def gradients(model: Any, tape: Any, rows: Any, targets: Any) -> Any:
        with tape:
            loss = tf.reduce_mean(tf.square(model(rows) - targets))
        return tape.gradient(loss, model.trainable_variables)

    expected = gradients(make(), tf.GradientTape(), x, y)
    own = [part.reshape(replicas, -1, WIDTH)[mesh.coordinate("dp")] for part in (x, y)]
    for _ in range(2):  # each step creates a tape
        result = gradients(divided, DistributedGradientTape(tf.GradientTape()), *own)
    for variable, got, wanted in zip(divided.trainable_variables, result, expected, strict=True):
        shard = shard_of(variable)
        close(got.numpy(), wanted.numpy() if shard is None else shard.own(wanted.numpy()))
    mean = gradients(make(), DistributedGradientTape(tf.GradientTape()), x, y)  # averages whole weights over ranks
    for got, wanted in zip(mean, expected, strict=True):
        close(got.numpy(), wanted.numpy())


def make_with_words() -> Any:
    """A divided and a whole embedding, whose gradients are rows, and dense layers."""
    keras.utils.set_random_seed(0)
    given = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, WIDTH, name="words")(given) + keras.layers.Embedding(7, WIDTH, name="kinds")(given)
    x = keras.layers.Dense(HIDDEN, activation="tanh", name="up")(x)
    return keras.Model(given, keras.layers.Dense(3, name="down")(x))


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("style", [Vocabulary(), Column(gather=True)], ids=["words", "features"])
@pytest.mark.parametrize(
    "options",
    [{"global_clipnorm": 0.05}, {"clipnorm": 0.02}],
    ids=["global", "each"],
)
def test_replicas_with_embeddings(comm: Any, float64: None, style: Any, options: Any) -> None:
    """Words repeat: Keras squares each of their rows, in norms and in Adam's moments."""
    if comm.size % 2:
        pytest.skip("two ranks divide the model")
    mesh = Mesh(dp=-1, tp=2)
    plain = make_with_words()
    divided = parallelize(make_with_words(), mesh["tp"], {**PLAN, "words": style})
    optimizers = [keras.optimizers.Adam(0.01, **options) for _ in range(2)]
    plain.compile(optimizers[0], "mse", run_eagerly=True)
    divided.compile(DistributedOptimizer(optimizers[1], mesh=mesh), "mse")
    x = np.random.default_rng(1).integers(7, size=(2 * ROWS, 5))
    y = np.random.default_rng(2).standard_normal((2 * ROWS, 5, 3))
    replicas, place = mesh.shape.size("dp"), mesh.coordinate("dp")
    own = [part.reshape(2, replicas, -1, *part.shape[1:])[:, place].reshape(-1, *part.shape[1:]) for part in (x, y)]
    plain.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    divided.fit(*own, batch_size=ROWS // replicas, shuffle=False, verbose=0)
    for model, rows, targets in ((plain, x, y), (divided, *own)):  # without fit
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(rows) - targets))
        gradients = tape.gradient(loss, model.trainable_variables)
        assert any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        model.optimizer.apply(gradients, model.trainable_variables)
    for got, expected in zip(whole_weights(divided), plain.weights, strict=True):
        close(got, expected.numpy())


@pytest.mark.ranks(min=2)
def test_scaled_losses_and_rows(comm: Any) -> None:
    """If rows have an infinity on the one rank that has the word, all skip the step. Later rows are clipped."""
    plain, divided = make_with_words(), parallelize(make_with_words(), comm, {**PLAN, "words": Vocabulary()})
    x = np.random.default_rng(1).integers(7, size=(ROWS, 5))
    for model in (plain, divided):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.02), initial_scale=8.0)
        for factor in (np.inf, 8.0, 4.0):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x)))
            gradients = tape.gradient(loss, model.trainable_variables)
            table = gradients[0]
            assert isinstance(table, tf.IndexedSlices)
            scaled = [tf.convert_to_tensor(gradient) * 4.0 for gradient in gradients[1:]]
            values = tf.where(table.values == 0, 0.0, table.values * factor)
            rows = tf.IndexedSlices(values, table.indices, table.dense_shape)
            optimizer.apply([rows, *scaled], model.trainable_variables)
        assert float(optimizer.dynamic_scale) == 4.0
        assert int(optimizer.inner_optimizer.iterations) == 2
    for got, expected in zip(whole_weights(divided), plain.weights, strict=True):
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-4, atol=1e-5)  # float32


def test_float16_training(comm: Any, mixed_float16: None) -> None:
    """Keras scales the loss itself: losses, steps and scales match one process, except for rounding."""
    x = np.random.default_rng(1).integers(7, size=(4 * ROWS, 5))
    y = np.random.default_rng(2).standard_normal((4 * ROWS, 5, 3))

    def trained(model: Any) -> Any:
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
        losses = model.fit(x, y, batch_size=ROWS, epochs=3, shuffle=False, verbose=0).history["loss"]
        return losses, float(model.optimizer.dynamic_scale), int(model.optimizer.inner_optimizer.iterations)

    losses, scale, steps = alone(comm, lambda: trained(make_with_words()))
    divided = parallelize(make_with_words(), comm, {**PLAN, "words": Vocabulary()})
    assert divided(x[:1]).dtype == "float16" and {weight.dtype for weight in divided.weights} == {"float32"}
    result = trained(divided)
    assert result[0] == pytest.approx(losses, rel=3e-3)  # float16 has 11 bits: three roundings
    assert result[0][-1] < 0.98 * result[0][0]
    assert set(comm.all_gather_object(result[1:])) == {(scale, steps)}


@pytest.mark.ranks(min=2)
def test_ranks_agree_on_the_loss_scale(comm: Any) -> None:
    """On an overflow in one rank's part, all skip the step and halve the scale."""
    divided = parallelize(make(), comm, PLAN)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    scaled.build(divided.trainable_variables)
    gradients = [np.ones(variable.shape, np.float32) for variable in divided.trainable_variables]
    before = whole_weights(divided)
    if comm.rank == comm.size - 1:
        place = next(n for n, variable in enumerate(divided.trainable_variables) if shard_of(variable) is not None)
        gradients[place][0] = np.inf
    tensors = [keras.ops.convert_to_tensor(gradient) for gradient in gradients]
    scaled.apply(tensors, divided.trainable_variables)
    assert all(np.array_equal(a, b) for a, b in zip(before, whole_weights(divided), strict=True))
    assert float(scaled.dynamic_scale) == 4.0
    scaled.apply([keras.ops.ones_like(gradient) for gradient in tensors], divided.trainable_variables)
    assert not any(np.array_equal(a, b) for a, b in zip(before, whole_weights(divided), strict=True))


@pytest.mark.ranks(min=2)
def test_optimizers_that_need_whole_weights_are_refused(comm: Any) -> None:
    divided = parallelize(make(), comm, PLAN)
    divided.compile(keras.optimizers.Adafactor(0.01), "mse", run_eagerly=True)
    with pytest.raises(UsageError, match=r"Adafactor needs full weights, but up0/kernel is sharded among ranks"):
        divided.fit(*data(1), verbose=0)
    plain = make()  # other optimizers work as before
    plain.compile(keras.optimizers.Adafactor(0.01), "mse", run_eagerly=True)
    plain.fit(*data(1), verbose=0)


@pytest.mark.any_ranks
def test_plans_of_pipelined_models_are_checked(comm: Any) -> None:
    """Regression: a pipeline calls parts of the model, so that the check of its first call never ran."""

    class Around(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            dense = [keras.layers.Dense(4, name=f"d{place}") for place in range(2 * comm.size)]
            self.inner = keras.Sequential([keras.Input((4,)), *dense])

        def call(self, x: Any) -> Any:
            return self.inner(x)

    mesh = Mesh(pp=comm.size, tp=1)

    def piped(plan: Any) -> Any:
        model = Around()
        model(np.ones((2, 4)))
        parallelize(model, mesh["tp"], plan)
        return pipeline(model.inner, mesh["pp"], microbatches=2)

    with pytest.raises(UsageError, match="takes all features"):
        piped({"*/d0": Column()})
    piped({"*/d0": Column(), "*/d1": Row()}).close()


@pytest.mark.parametrize(("mode", "sequence"), [("full", None), ("activations", None), ("recompute_grad", 1)])
def test_recomputed_layers(comm: Any, float64: None, mode: str, sequence: int | None) -> None:
    """Their moves run again in backward. Keras' own "full" is only for eager training: plans must be checked, too."""

    def build(scope: Any) -> Any:
        keras.utils.set_random_seed(0)
        with scope:
            layers = [keras.layers.Dense(HIDDEN, activation="tanh", name="up"), keras.layers.Dense(WIDTH, name="down")]
        return keras.Sequential([keras.Input((5, WIDTH)), *layers])

    scope: Any = contextlib.nullcontext() if mode == "recompute_grad" else keras.RematScope(mode=mode)
    style: Any = {"sequence": sequence}
    plan = {"up": Column(**style), "down": Row(**style)}
    plain, divided = build(contextlib.nullcontext()), parallelize(build(scope), comm, plan, divided_output=True)
    again = tf.recompute_grad(divided) if mode == "recompute_grad" else divided
    x, y = np.random.default_rng(1).standard_normal((2, ROWS, 5, WIDTH))

    def of_shards(x: Any) -> Any:
        return again(x) if sequence is None else gather(again(scatter(x, comm, 1)), comm, 1)

    def gradients(call: Any, model: Any) -> Any:
        given = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = tf.reduce_mean(tf.square(call(given) - y))
        return tape.gradient(loss, [given, *model.trainable_variables])

    expected = gradients(plain, plain)
    run = gradients if mode == "full" else tf.function(gradients, autograph=False)
    got = run(of_shards, divided)
    close(got[0], expected[0])
    for one, other, variable in zip(got[1:], expected[1:], divided.trainable_variables, strict=True):
        shard = shard_of(variable)
        close(one, other if shard is None else shard.own(other.numpy()))


def keepers(folder: str) -> list[Any]:
    return [
        keras.callbacks.ModelCheckpoint(folder + "/kept{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore(folder + "/backup"),
    ]


@pytest.mark.ranks(min=4)
def test_callbacks_of_replicas_may_write_one_file(comm: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Regression: rank 0 of each replica wrote it; one found it locked and left fit, and the others waited for ever."""
    mesh = Mesh(dp=comm.size // 2, tp=2)
    folder = comm.broadcast_object(str(tmp_path_factory.mktemp("kept")))
    x, y = (np.random.default_rng(seed).normal(size=(8, 6)).astype(np.float32) for seed in (1, 2))

    def build() -> Any:
        keras.utils.set_random_seed(1)
        given = keras.Input((6,))
        hidden = keras.layers.Dense(8, "relu", name="up")(given)
        model = keras.Model(given, keras.layers.Dense(6, name="down")(hidden))
        parallelize(model, mesh["tp"], {"up": Column(), "down": Row()})
        model.compile(DistributedOptimizer(keras.optimizers.SGD(0.1), mesh=mesh), "mse")
        return model

    model = build()
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=keepers(folder))
    whole = gather_model(model)
    comm.barrier()
    again = build()
    again.load_weights(folder + "/kept2.weights.h5")
    for one, other in zip(gather_model(again).get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(UsageError, match="in several replicas of a sharded model"):
        build().fit(x, y, verbose=0, callbacks=keepers(folder)[mesh["dp"].rank and 1 :])
    assert comm.all_gather_object(1) == [1] * comm.size
