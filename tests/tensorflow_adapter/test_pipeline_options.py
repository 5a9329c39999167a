"""Options of a Keras pipeline: kept activations, statistics of whole batches, and cuts by measured time."""

from __future__ import annotations

import copy
import math
import pickle
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow
from commlib.errors import UsageError
from commlib_tensorflow import SyncBatchNormalization, pipeline
from commlib_tensorflow.pipelines import _stage_functions
from commlib_tensorflow.pipelines._selective_recompute import current_products, without_products
from tests.inputs.keras_pipelines import (
    WIDTH,
    SingleProcess,
    assert_gradients,
    assert_weights,
    batch,
    filled,
    in_float64,
    layers,
    near,
)

__all__ = ["in_float64"]  # a fixture


# checkpoint="selective"


def net(x: tf.Tensor, w: tf.Tensor, v: tf.Tensor) -> tf.Tensor:
    # silu has its own gradient, which reads the forward's input; relu's reads its result.
    return tf.nn.relu(tf.matmul(tf.nn.silu(tf.matmul(x, w)), v))


def gradients(x: tf.Tensor, w: tf.Tensor, v: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        tape.watch([x, w, v])
        loss = tf.reduce_sum(net(x, w, v) ** 2)
    return {"of": tape.gradient(loss, [x, w, v]), "none": None}


def test_recomputation_skips_products() -> None:
    generator = np.random.default_rng(0)
    x, w, v = (tf.constant(generator.normal(size=(5, 5))) for _ in range(3))

    @tf.function
    def forward(*arguments: Any) -> Any:
        return net(*arguments), current_products()

    again = tf.function(lambda kept, *arguments: without_products(gradients, kept, *arguments), autograph=False)
    _, kept = forward(x, w, v)
    assert len(kept) == 2
    result = again(kept, x, w, v)
    assert result["none"] is None
    for got, expected in zip(result["of"], gradients(x, w, v)["of"], strict=True):
        near(got, expected)
    graph = again.get_concrete_function(kept, x, w, v).graph
    operations = [one for one in graph.get_operations() if one.type == "MatMul"]
    unread = [one for one in operations if not one.outputs[0].consumers()]
    assert len(operations) == 6, "two products, and the gradients of both factors of each"
    assert len(unread) == 2, "nobody reads the two products"
    with pytest.raises(UsageError, match="different ones when its forward was recomputed"):
        again([*kept, *kept, *kept, *kept], x, w, v)


def products() -> Any:
    """A model with products in dense layers, convolutions, attention and a loop."""
    image = keras.Input((4, 4, 2))
    x = keras.layers.Conv2D(4, 2, activation="silu", name="c0")(image)
    x = keras.layers.DepthwiseConv2D(2, padding="same", activation="gelu", name="c1")(x)
    x = keras.layers.Conv2DTranspose(4, 2, activation="relu", name="c2")(x)
    x = keras.layers.Reshape((16, 4), name="r")(x)
    x = keras.layers.MultiHeadAttention(2, 3, dropout=0.2, seed=4, name="a")(x, x)
    x = keras.layers.LayerNormalization(name="n")(x)
    x = keras.layers.GRU(3, return_sequences=True, name="g")(x)
    x = keras.layers.EinsumDense("abc,cd->ad", 3, activation="swish", name="e")(x)
    return filled(keras.Model(image, keras.layers.Dense(2, activation="softplus", name="d")(x)))


@pytest.mark.parametrize(("name", "eager"), [("1f1b", False), ("1f1b", True), ("zb_h1", False), ("zb_h1", True)])
def test_products_are_kept(comm: Any, name: Any, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []

    def noting(function: Any, kept: Any, *arguments: Any) -> Any:
        traced.append(len(kept))
        return without_products(function, kept, *arguments)

    monkeypatch.setattr(_stage_functions, "without_products", noting)
    generator = np.random.default_rng(5)
    x, y = generator.normal(size=(6, 4, 4, 2)), generator.normal(size=(6, 2))
    alone = SingleProcess(products())
    pipe = pipeline(products(), comm, schedule=name, microbatches=3, checkpoint="selective")
    pipe.compile(optimizer="sgd", loss="mse", run_eagerly=eager)
    near(pipe.step(x, y), alone.step(x, y, microbatches=3))  # dropout draws for each microbatch
    assert_gradients(pipe, alone.gradients, 1e-10)
    assert (len(traced) > 0) is not eager, "a function that is not compiled keeps none"
    pipe.close()


# batch_norm="batch"


def normalized() -> Any:
    """Its first batch norm has the same input as in one process: no earlier layer depends on a microbatch's rows."""
    first = [keras.layers.Dense(WIDTH, activation="tanh", name="d0"), keras.layers.BatchNormalization(name="n0")]
    rest = [keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}") for number in range(1, 6)]
    second = keras.layers.BatchNormalization(momentum=0.5, name="n1")
    return filled(keras.Sequential([keras.Input((WIDTH,)), *first, *rest, second]))


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("1f1b", "none"),
        ("1f1b", "selective"),
        ("zb_h1", "none"),
        ("interleaved", "full"),
        ("pipedream", "none"),
    ],
)
def test_statistics_of_whole_batches(comm: Any, name: Any, checkpoint: Any) -> None:
    whole = normalized()
    updates: dict[str, Any] = {"optimizer": keras.optimizers.SGD(0.0)} if name == "pipedream" else {}
    pipe = pipeline(
        normalized(), comm, schedule=name, microbatches=5, loss="mse", checkpoint=checkpoint, batch_norm="batch",
        **updates,
    )  # fmt: skip
    alone = SingleProcess(normalized())
    inputs = keras.Model(whole.inputs, whole.get_layer("d5").output)
    n1 = whole.get_layer("n1")
    for step, rows in enumerate((13, 3)):  # one leaves microbatches empty
        x, y = batch(rows, step)
        if name != "pipedream":
            near(pipe.step(x, y), alone.step(x, y, microbatches=5))  # values are still normalised by microbatches
            assert_gradients(pipe, alone.gradients)
        else:
            pipe.step(x, y)
        # The second one's input is normalised by microbatches in the first one: so process these together.
        parts = [part for part in np.array_split(x, 5) if len(part)]
        seen = np.concatenate([normalized_by(whole, inputs, part) for part in parts])
        n1(seen, training=True)
        whole.get_layer("n0")(whole.get_layer("d0")(x), training=True)
        expected = {layer.name: layer for layer in (n1, whole.get_layer("n0"))}
        for variable in pipe.non_trainable_variables:
            layer, kind = variable.path.split("/")[-2:]
            near(variable, getattr(expected[layer], kind), 1e-10)
    pipe.close()


def normalized_by(whole: Any, inputs: Any, part: Any) -> Any:
    """Return the second batch norm's input for a microbatch, without side effects."""
    before = [np.array(v) for v in whole.non_trainable_variables]
    model = np.array(inputs(part, training=True))
    for variable, value in zip(whole.non_trainable_variables, before, strict=True):
        variable.assign(value)
    return model


def test_frozen_statistics_do_not_change(comm: Any) -> None:
    model = normalized()
    model.get_layer("n0").trainable = False
    before = [np.array(v) for v in model.get_layer("n0").weights]
    pipe = pipeline(model, comm, microbatches=2, loss="mse", batch_norm="batch")
    pipe.step(*batch(8))
    for variable, value in zip(model.get_layer("n0").weights, before, strict=True):
        near(variable, value)
    pipe.close()


@pytest.mark.ranks(max=2)  # models of two layers
def test_unsupported_statistics_are_refused(comm: Any) -> None:
    x = keras.Input((WIDTH,))
    norm = keras.layers.BatchNormalization(name="twice")
    y = norm(keras.layers.Dense(WIDTH)(norm(x)))
    words = keras.Input((3,), dtype="int32")
    masked = keras.layers.BatchNormalization(name="masked")(keras.layers.Embedding(3, 2, mask_zero=True)(words))
    inner = keras.layers.BatchNormalization(name="inner")
    within = keras.Model(x, inner(keras.layers.Dense(WIDTH)(inner(x))))
    for model, text in (
        (keras.Model(x, keras.layers.Dense(2)(y)), "twice.* is called 2 times"),
        (keras.Model(x, keras.layers.Dense(2)(within(x))), "inner.* is called 2 times"),
        (keras.Model(words, keras.layers.GRU(2)(masked)), "masked.* has a mask"),
    ):
        with pytest.raises(UsageError, match=text):
            pipeline(model, comm, microbatches=2, batch_norm="batch")
    once = keras.Model(x, keras.layers.BatchNormalization()(keras.layers.Dense(WIDTH)(x)))
    pipeline(
        keras.Model(x, keras.layers.Dense(WIDTH)(once(x))), comm.split(comm.rank), microbatches=2, batch_norm="batch"
    ).close()
    with pytest.raises(UsageError, match="batch_norm is 'never', expected one of microbatch, batch"):
        pipeline(layers(4), comm, microbatches=2, batch_norm="never")  # type: ignore[arg-type]


# schedule="auto", split="time"


@pytest.mark.long
def test_chosen_by_measured_costs(comm: Any) -> None:
    """Every choice trains alike, and measuring the model does not change it."""
    x, y = batch(8)
    example = x[:2] if comm.rank == 0 else None
    for options in ({"schedule": "auto"}, {"schedule": "auto", "memory": 10**6}, {"schedule": "1f1b", "split": "time"}):
        alone = SingleProcess(normalized(), "sgd")
        pipe = pipeline(normalized(), comm, microbatches=4, loss="mse", example=example, **options)
        assert ("simulated" in pipe.why) == (options["schedule"] == "auto")
        assert_weights(pipe, alone.model)
        near(pipe.step(x, y), alone.step(x, y, microbatches=4))
        assert_gradients(pipe, alone.gradients)
        pipe.close()
    if comm.size > 1:  # a first stage keeps the batch
        with pytest.raises(UsageError, match="no schedule holds at most 1 bytes"):
            pipeline(layers(8), comm, schedule="auto", microbatches=4, example=example, memory=1)
    with pytest.raises(UsageError, match="pass example= on rank 0"):
        pipeline(layers(8), comm, schedule="auto", microbatches=4)
    with pytest.raises(UsageError, match="x has shape" if comm.rank == 0 else "rank 0 could not measure.*x has shape"):
        pipeline(layers(8), comm, schedule="auto", microbatches=4, example=np.zeros((2, 3, WIDTH)))
    with pytest.raises(UsageError, match="memory= is only for"):
        pipeline(layers(8), comm, microbatches=4, memory=10)
    with pytest.raises(UsageError, match="omit stages="):
        pipeline(layers(8), comm, schedule="auto", microbatches=4, stages=2 * comm.size, example=example)


class Slow(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(self.late, [x], x.dtype), x.shape)

    def late(self, x: Any) -> Any:
        time.sleep(0.02)
        return x


def test_slow_layers_get_stages_of_their_own(comm: Any) -> None:
    quick = [keras.layers.Dense(WIDTH) for _ in range(3 * comm.size)]
    model = [keras.Input((WIDTH,)), Slow(), *quick]
    pipe = pipeline(model, comm, split="time", microbatches=2, example=batch(2)[0])
    if comm.size > 1:
        assert (comm.rank == 0) == (not pipe.variables)
    pipe.close()


def test_the_memory_of_a_unit() -> None:
    """In bytes: tanh's result, from which its gradient is computed, and a product's input, used for its weights'."""
    from commlib_tensorflow.pipelines._layer_costs import layer_costs
    from commlib_tensorflow.pipelines._parts import cut, to_functional
    from commlib_tensorflow.pipelines._split import Nodes

    model = [
        keras.Input((WIDTH,)), keras.layers.Dense(100, activation="tanh"), keras.layers.Activation("linear"),
        keras.layers.Dense(WIDTH),
    ]  # fmt: skip
    graph = to_functional(model)
    costs = layer_costs(cut(graph, Nodes(graph), [1, 1, 1]), [tf.constant(batch(2)[0])])
    assert costs.activations == (8 * 2 * (WIDTH + 100), 0, 8 * 2 * 100)
    assert costs.outputs == (8 * 2 * 100, 8 * 2 * 100, 8 * 2 * WIDTH)
    assert costs.input[0] == 0, "nobody wants the gradient of the batch"
    assert costs.again


# codec=, by stages


@pytest.mark.ranks(min=2)
def test_a_codec_for_each_direction(comm: Any) -> None:
    x, y = batch(8)
    model = 2 * comm.size
    plain = pipeline(layers(model), comm, microbatches=2, loss="mse")
    exact = plain.step(x, y)
    for codec, is_exact in (({(0, 1): "int8"}, False), ({(1, 0): "int8", (0, 1): None}, True)):
        pipe = pipeline(layers(model), comm, microbatches=2, loss="mse", codec=codec)
        loss = pipe.step(x, y)
        assert (float(loss) == float(exact)) == is_exact
        pairs = zip(pipe.gradients, plain.gradients, strict=True)
        same = all(np.array_equal(np.array(a), np.array(b)) for a, b in pairs)
        assert same == (is_exact and comm.rank > 0), "gradients come back with errors from stage 1 to stage 0 alone"
        pipe.close()
    plain.close()
    with pytest.raises(UsageError, match=r"no link connects the stages \(0, 7\); expected some of \(0, 1\)"):
        pipeline(layers(model), comm, microbatches=2, codec={(0, 7): "int8"})


# Updates


class Counting(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
    """Counts Python's calls of an update: one more than TensorFlow's compilations."""

    said = 0

    def update_step(self, *arguments: Any) -> Any:
        self.said += 1
        return super().update_step(*arguments)


@pytest.mark.parametrize("eager", [False, True])
def test_updates_are_compiled(comm: Any, eager: bool) -> None:
    alone = SingleProcess(layers(4), keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer = Counting(0.1, momentum=0.9)
    pipe = pipeline(layers(4), comm, microbatches=2)
    pipe.compile(optimizer=optimizer, loss="mse", run_eagerly=eager)
    for step in range(4):
        if step == 3:
            optimizer.learning_rate = 0.01  # a variable, so that compiled functions see it
            alone.model.optimizer.learning_rate = 0.01
        near(pipe.step(*batch(6, step)), alone.step(*batch(6, step)))
        pipe.apply_gradients()
        alone.update()
        assert_weights(pipe, alone.model)
    weights = len(pipe.trainable_variables)
    assert optimizer.said == (4 * weights if eager else 2 * weights), "once to make its variables, once to compile"
    pipe.close()


# clip_grad_norm


def test_gradients_are_clipped_by_each_norm(comm: Any) -> None:
    """Regression: only the 2-norm was supported, and a NaN norm was ignored."""
    whole, pipe = SingleProcess(layers(4)), pipeline(layers(4), comm, microbatches=2, loss="mse", optimizer="sgd")
    x, y = batch(6)
    whole.step(x, y)
    gradients: dict[str, Any] = whole.gradients
    elements = np.abs(np.concatenate([np.ravel(gradient) for gradient in gradients.values()]))
    for norm_type in (2, 1.0, 3.5, math.inf):
        pipe.zero_gradients()
        pipe.step(x, y)
        expected = elements.max() if norm_type == math.inf else (elements**norm_type).sum() ** (1 / norm_type)
        got = pipe.clip_grad_norm(expected / 4, norm_type)
        near(got, expected)
        assert len(set(comm.all_gather_object(float(got)))) == 1
        assert_gradients(pipe, {name: tf.convert_to_tensor(value) / 4 for name, value in gradients.items()})
    with pytest.raises(UsageError, match="norm_type must be a number above 0"):
        pipe.clip_grad_norm(1.0, 0)
    if comm.rank == comm.size - 1:
        pipe.gradients = [
            tf.fill(one.shape, tf.constant(math.nan, tf.float64)) for one in pipe.gradients if one is not None
        ]
    before = list(pipe.gradients)
    for norm_type in (2, 1.0, math.inf):
        with pytest.raises(UsageError, match="is nan, and error_if_nonfinite is set"):
            pipe.clip_grad_norm(1.0, norm_type, error_if_nonfinite=True)
        for gradient, other in zip(pipe.gradients, before, strict=True):
            np.testing.assert_array_equal(gradient, other)
    assert math.isnan(pipe.clip_grad_norm(1.0, math.inf))
    pipe.close()


# Refusals


def normed(comm: Any, norm: Any) -> keras.Sequential:
    blocks = [layer for _ in range(comm.size) for layer in (keras.layers.Dense(WIDTH), norm())]
    return keras.Sequential([keras.Input((WIDTH,)), *blocks])


@pytest.mark.ranks(min=2)
def test_batch_norm_across_stages_is_refused(comm: Any) -> None:
    """Regression: with its default group of all ranks, the first step never ended."""
    with pytest.raises(
        UsageError, match=r"\(SyncBatchNormalization\) computes statistics over ranks \[0, 1.*process_set="
    ):
        pipeline(normed(comm, SyncBatchNormalization), comm, microbatches=2, loss="mse")
    sets = [commlib_tensorflow.add_process_set([rank]) for rank in range(comm.size)]
    model = normed(comm, lambda: SyncBatchNormalization(process_set=sets[comm.rank]))
    pipeline(model, comm, microbatches=2, loss="mse").close()
    for one in sets:
        commlib_tensorflow.remove_process_set(one)


def test_copies_are_refused_with_advice(comm: Any) -> None:
    """Regression: mpi4py raised an error about a communicator that cannot be serialised."""
    pipe = pipeline(normed(comm, keras.layers.ReLU), comm, microbatches=2, loss="mse")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match=r"cannot be copied or pickled.*gather_weights\(\)"):
            copied(pipe)
    pipe.close()
