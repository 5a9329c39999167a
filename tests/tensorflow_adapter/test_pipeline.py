"""A Keras model in stages trains as it does in one process, under every schedule."""

from __future__ import annotations

from itertools import chain
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import commlib_tensorflow as ct
from commlib.errors import MismatchError, PeerError, UsageError
from commlib.pipeline.pipe import Split
from commlib.pipeline.schedule import Kind, make, simulate, table
from commlib.pipeline.schedule.versions import versions
from commlib_tensorflow import pipeline
from tests.bodies.pipelines import assert_a_failing_loss_is_reported
from tests.inputs.keras_pipelines import (
    WIDTH,
    SingleProcess,
    assert_gradients,
    assert_weights,
    batch,
    filled,
    in_float64,
    key,
    layers,
    near,
)

__all__ = ["in_float64"]  # a fixture

FLUSHING = [name for name, plan in table.items() if not plan.updates]


@pytest.mark.parametrize("microbatches", [3, 8])
@pytest.mark.parametrize("name", FLUSHING)
def test_gradients_and_weights_are_those_of_one_process(comm: Any, name: Any, microbatches: int) -> None:
    """Two batches are accumulated, one of which leaves microbatches uneven or empty; then the weights are updated."""
    alone = SingleProcess(layers(6 if comm.size < 3 else 12), keras.optimizers.Adam(0.1))
    model = layers(6 if comm.size < 3 else 12)
    pipe = pipeline(
        model, comm, schedule=name, microbatches=microbatches, loss="mse", optimizer=keras.optimizers.Adam(0.1)
    )
    for step in range(2):
        for x, y in (batch(16, step), batch(7, step + 10)):
            first, last = comm.rank == pipe.pipe.first, comm.rank == pipe.pipe.last
            got = pipe.step(x if first else None, y if last else None)
            near(got, alone.step(x, y))
        assert_gradients(pipe, alone.gradients)
        pipe.apply_gradients()
        alone.update()
        assert_weights(pipe, alone.model, 1e-9)  # Adam divides by gradients: values near 0 amplify the difference
        assert pipe.gradients == [None] * len(pipe.trainable_variables)
    for got, expected in zip(ct.gather_weights(pipe), pipe.gather_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(pipe.gather_weights(), alone.model.get_weights(), strict=True):
        near(got, expected, 1e-9)
    pipe.close()


def test_activations_held_match_the_simulator(comm: Any) -> None:
    pipe = pipeline(layers(4), comm, microbatches=8, loss="mse")
    pipe.step(*batch(8))
    assert pipe.pipe.runner.peak == simulate(pipe.pipe.lowered).peak[comm.rank]
    pipe.close()


def skipping() -> Any:
    """A model with skips over several stages, integer and other inputs, a mask, and a layer used twice."""
    words, weights = keras.Input((5,), dtype="int32", name="words"), keras.Input((), name="weights")
    embed = keras.layers.Embedding(10, WIDTH, mask_zero=True, name="embed")
    early = embed(words)
    x = keras.layers.Dense(WIDTH, activation="tanh", name="first")(early)
    even = keras.ops.cast(words % 2 == 0, "float64")
    y = keras.layers.Dense(WIDTH, activation="tanh", name="second")(x)
    z = keras.layers.Add(name="skip")([y, early])
    z = keras.layers.GRU(WIDTH, name="gru")(z)  # it skips masked words
    z = keras.layers.Dense(WIDTH, name="third")(z) * keras.ops.expand_dims(weights, -1)
    z = z + keras.ops.sum(keras.ops.expand_dims(even, -1) * x, 1) + keras.ops.sum(embed(words), 1)
    return filled(keras.Model([words, weights], keras.layers.Dense(3, name="head")(z)))


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("1f1b", "auto"),
        ("gpipe", "names"),
        ("zb_h1", "names"),
        ("interleaved", "auto"),
    ],
)
def test_skips_ties_masks_and_integers(comm: Any, name: Any, split: str) -> None:
    chunks = 2 if name == "interleaved" and comm.size < 3 else 1
    places: Split = ["second", "third", "head"][: comm.size * chunks - 1] if split == "names" else "auto"
    alone = SingleProcess(skipping(), keras.optimizers.SGD(0.1, global_clipnorm=0.5))
    pipe = pipeline(
        skipping(), comm, schedule=name, microbatches=3, loss="mse", split=places, stages=comm.size * chunks,
        optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    )  # fmt: skip
    generator = np.random.default_rng(5)
    for _ in range(2):
        x = [generator.integers(0, 10, size=(7, 5)), generator.normal(size=(7,))]
        y = generator.normal(size=(7, 3))
        near(pipe.step(x if comm.rank == 0 else None, y), alone.step(x, y))
    assert_gradients(pipe, alone.gradients)
    norm = float(tf.linalg.global_norm(list(alone.gradients.values())))
    before: list[Any] = list(pipe.gradients)
    near(pipe.clip_grad_norm(norm / 2), norm)
    for gradient, halved in zip(before, pipe.gradients, strict=True):
        near(halved, gradient / 2)
    pipe.gradients = before
    pipe.apply_gradients()  # it clips by the norm over all stages
    alone.update()
    assert_weights(pipe, alone.model)
    pipe.close()


def stateful() -> Any:
    return filled(
        keras.Sequential(
            [
                keras.Input((WIDTH,)),
                keras.layers.Dense(WIDTH, name="d0", kernel_regularizer=keras.regularizers.L2(0.1)),
                keras.layers.BatchNormalization(name="n0"),
                keras.layers.Dropout(0.5, seed=1, name="p0"),
                keras.layers.Dense(WIDTH, name="d1", activity_regularizer=keras.regularizers.L2(0.1)),
                keras.layers.Dropout(0.5, seed=2, name="p1"),
                keras.layers.Dense(WIDTH, name="d2", bias_regularizer="l1"),
                keras.layers.BatchNormalization(name="n1"),
            ]
        )
    )


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("1f1b", "none"),
        ("1f1b", "full"),
        ("1f1b", "selective"),
        ("zb_h1", "none"),
        ("zb_h1", "selective"),
        ("interleaved", "full"),
    ],
)
def test_dropout_statistics_and_regularisers(comm: Any, name: Any, checkpoint: Any) -> None:
    """Recomputation has the masks and statistics of the first forward, and changes nothing.

    Results match one process that processes the microbatches in turn and weights regularisers by their share.
    """
    alone = SingleProcess(stateful(), "sgd")
    pipe = pipeline(stateful(), comm, schedule=name, microbatches=3, loss="mse", optimizer="sgd", checkpoint=checkpoint)
    weight = np.random.default_rng(3).uniform(size=8)
    for step in range(2):
        x, y = batch(8, step)
        near(pipe.step(x, y, weight), alone.step(x, y, weight, microbatches=3))
        assert_gradients(pipe, alone.gradients)
        assert_weights(pipe, alone.model)  # including moving statistics and seeds
        pipe.apply_gradients()
        alone.update()
        assert_weights(pipe, alone.model)
    seeds = [[v.numpy().tolist() for v in m.non_trainable_variables if "seed" in v.path] for m in (pipe, alone.model)]
    drawn = sorted(chain.from_iterable(comm.all_gather_object(seeds[0])))
    assert drawn == sorted(seeds[1]), "a seed is drawn once for each microbatch"
    pipe.close()


class Shift(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Adds a weight, whose gradient is the result's gradient itself if there is one row."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=shape[1:], name="shift")

    def call(self, x: Any) -> Any:
        return x + self.shift


@pytest.mark.parametrize("rows", [1, 12])
def test_gradients_do_not_share_memory_with_messages(comm: Any, rows: int) -> None:
    """Regression: after a backward the next message reused the memory of a kept gradient."""

    def shifts() -> Any:
        own = [layer for n in range(comm.size) for layer in (Shift(name=f"s{n}"), keras.layers.Flatten(name=f"f{n}"))]
        return filled(keras.Sequential([keras.Input((64,)), *own, keras.layers.Dense(2, name="d")]))

    alone = SingleProcess(shifts())
    pipe = pipeline(shifts(), comm, microbatches=rows, loss="mse")
    generator = np.random.default_rng(0)
    for _ in range(2):
        x, y = generator.normal(size=(rows, 64)), generator.normal(size=(rows, 2))
        near(pipe.step(x, y), alone.step(x, y))
        near(pipe.predict_on_batch(x), alone.model(x))
    assert_gradients(pipe, alone.gradients)
    pipe.close()


def test_a_mask_of_the_output(comm: Any) -> None:
    """weigh= defines the weights of a microbatch's loss; metrics skip masked values, too."""

    def masked() -> Any:
        x = keras.Input((6,), dtype="int32")
        value = keras.layers.Embedding(10, WIDTH, mask_zero=True, name="embed")(x)
        for number in range(3):
            value = keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}")(value)
        return filled(keras.Model(x, value))

    words = np.random.default_rng(0).integers(0, 4, size=(8, 6))
    target = np.where(words[..., None] != 0, np.random.default_rng(1).normal(size=(8, 6, WIDTH)), 100.0)
    whole = masked()
    pipe = pipeline(masked(), comm, microbatches=3, weigh=lambda y: float(np.sum(y[..., 0] != 100.0)))
    for model in (whole, pipe):
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=model is pipe)
    for call in ("train_on_batch", "test_on_batch"):
        expected, got = (getattr(model, call)(words, target, return_dict=True) for model in (whole, pipe))
        assert got.keys() == expected.keys() and max(got.values()) < 10
        for name in got:
            near(got[name], expected[name])
    assert_weights(pipe, whole)
    pipe.close()
    with pytest.raises(UsageError, match=r"has a mask.*give weigh= to pipeline"):
        pipeline(masked(), comm, microbatches=3, loss="mse")


# Keras


def compiled(model: Any, **options: Any) -> Any:
    model.compile(
        optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae", keras.metrics.R2Score()], **options
    )
    return model


def test_fit_matches_one_process(comm: Any) -> None:
    """In the order of the data, history, weights, evaluate and predict match; the last batch has fewer rows."""
    x, y = batch(21)
    whole = compiled(layers(4))
    pipe = compiled(pipeline(layers(4), comm, microbatches=3))
    callbacks = [[keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=10.0)] for _ in range(2)]
    options: dict[str, Any] = {
        "epochs": 3, "batch_size": 8, "shuffle": False, "verbose": 0, "validation_split": 0.2,
        "sample_weight": np.linspace(0.5, 1.5, 21),
    }  # fmt: skip
    expected = whole.fit(x, y, callbacks=callbacks[0], **options).history
    got = pipe.fit(x, y, callbacks=callbacks[1], **options).history
    assert got.keys() == expected.keys()
    for name in got:
        near(got[name], expected[name], 1e-9)
    assert_weights(pipe, whole, 1e-9)
    near(pipe.evaluate(x, y, batch_size=8, verbose=0), whole.evaluate(x, y, batch_size=8, verbose=0), 1e-9)
    near(pipe.predict(x, batch_size=8, verbose=0), whole.predict(x, batch_size=8, verbose=0), 1e-9)
    near(pipe.train_on_batch(x, y), whole.train_on_batch(x, y), 1e-9)
    assert comm.all_gather_object(got) == [got] * comm.size
    pipe.close()


def test_arrays_are_shuffled_equally_on_all_ranks(comm: Any) -> None:
    """If rows of x and y were shuffled differently, nothing could be learnt."""
    x = np.random.default_rng(0).normal(size=(32, WIDTH))
    pipe = pipeline(layers(3), comm, microbatches=2)
    pipe.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    np.random.seed(comm.rank)  # each rank would have its own order
    stop = keras.callbacks.EarlyStopping("loss", min_delta=0.1, patience=0)
    losses = pipe.fit(x, np.tanh(x), batch_size=8, epochs=20, verbose=0, callbacks=[stop]).history["loss"]
    assert len(losses) < 20, "nothing was stopped early"
    assert losses[-1] < losses[0] / 2
    assert comm.all_gather_object(losses) == [losses] * comm.size
    pipe.close()


def test_several_outputs(comm: Any) -> None:
    def two() -> Any:
        x = keras.Input((WIDTH,), name="x")
        hidden = keras.layers.Dense(WIDTH, activation="tanh", name="hidden")(x)
        early = keras.layers.Dense(2, name="early")(hidden)
        late = keras.layers.Dense(3, activation="softmax", name="late")(keras.layers.Dense(WIDTH, name="more")(hidden))
        model = filled(keras.Model({"x": x}, [early, late]))
        return model

    options: dict[str, Any] = {
        "loss": ["mse", "sparse_categorical_crossentropy"], "loss_weights": [0.3, 1.0],
        "metrics": [["mae"], ["accuracy"]],
    }  # fmt: skip
    generator = np.random.default_rng(2)
    x, y = (
        {"x": generator.normal(size=(10, WIDTH))},
        [generator.normal(size=(10, 2)), generator.integers(0, 3, size=10)],
    )
    whole, pipe = two(), pipeline(two(), comm, microbatches=2, split="auto")
    for model in (whole, pipe):
        model.compile(optimizer="sgd", **options)
    expected = whole.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    got = pipe.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    assert got.keys() == expected.keys()
    for name in got:
        near(got[name], expected[name], 1e-9)
    for one, other in zip(pipe.predict(x, verbose=0), whole.predict(x, verbose=0), strict=True):
        near(one, other, 1e-9)
    pipe.close()


def test_datasets_weights_of_classes_and_checkpoints(comm: Any, tmp_path: Any) -> None:
    """Callbacks that save run on all ranks together, and write the whole model."""

    def classes() -> Any:
        dense = [keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}") for number in range(3)]
        return filled(keras.Sequential([keras.Input((WIDTH,)), *dense, keras.layers.Dense(3, "softmax", name="out")]))

    path = comm.broadcast_object(str(tmp_path), 0) + "/best.keras"
    # Shuffled by numpy: a dataset's seed combines with TensorFlow's, which earlier tests may have changed.
    rows = np.random.default_rng(0).normal(size=(18, WIDTH)), np.random.default_rng(1).permutation(18) % 3
    data = tf.data.Dataset.from_tensor_slices(rows).batch(5)
    whole, pipe = classes(), pipeline(classes(), comm, microbatches=2)
    options = {"epochs": 2, "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}, "validation_data": data, "verbose": 0}
    for model in (whole, pipe):
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=2)
    expected = whole.fit(data, **options).history
    save = keras.callbacks.ModelCheckpoint(path, save_best_only=True)
    got = pipe.fit(data, callbacks=[save], **options).history
    assert got.keys() == expected.keys()
    for name in got:
        near(got[name], expected[name], 1e-9)
    loaded = keras.models.load_model(path)
    for one, other in zip(loaded.get_weights(), whole.get_weights(), strict=True):
        near(one, other, 1e-9)
    pipe.close()


def test_files_contain_the_whole_model(comm: Any, tmp_path: Any) -> None:
    """Files need no commlib to be read, and other numbers of stages read them; training continues."""
    path = comm.broadcast_object(str(tmp_path), 0)
    x, y = batch(8)
    pipe = compiled(pipeline(with_statistics(), comm, microbatches=1))  # or statistics would cover parts of the batch
    pipe.fit(x, y, epochs=2, verbose=0, shuffle=False)
    pipe.save(f"{path}/whole.keras")
    pipe.save_weights(f"{path}/whole.weights.h5")
    expected, output = pipe.gather_weights(), pipe.predict(x, verbose=0)
    whole = keras.models.load_model(f"{path}/whole.keras")
    assert [layer.name for layer in whole.layers] == [layer.name for layer in with_statistics().layers]
    for got, value in zip(whole.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(got, value)
    near(whole.predict(x, verbose=0), output)
    more = pipeline(with_statistics(9), comm, microbatches=2, schedule="interleaved", stages=2 * comm.size)
    more.load_weights(f"{path}/whole.weights.h5")
    for got, value in zip(more.gather_weights(), expected, strict=True):
        np.testing.assert_array_equal(got, value)
    whole.fit(x, y, epochs=1, verbose=0, shuffle=False)  # with the optimizer's state
    pipe.fit(x, y, epochs=1, verbose=0, shuffle=False)
    assert_weights(pipe, whole, 1e-9)
    with pytest.raises((OSError, ValueError)):  # on all ranks
        pipe.save(f"{path}/nowhere/at/all.keras")
    more.compile(optimizer=None, loss=lambda target, output: keras.ops.mean(abs(target - output)))
    more.save(f"{path}/more.keras")
    near(keras.models.load_model(f"{path}/more.keras").predict(x, verbose=0), more.predict(x, verbose=0))
    for each in (pipe, more):
        each.close()


def with_statistics(seed: int = 0) -> Any:
    x = keras.Input((WIDTH,), name="x")
    value = x
    for number in range(6):
        value = value + keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}")(value)
    return filled(keras.Model(x, keras.layers.BatchNormalization(name="norm")(value)), seed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_and_codecs(comm: Any, dtype: str) -> None:
    """16-bit values arrive unchanged; int8 rounds transmitted values."""

    def model() -> Any:
        dense = [keras.layers.Dense(WIDTH, dtype=dtype, name=f"d{number}") for number in range(3)]
        return filled(keras.Sequential([keras.Input((WIDTH,), dtype=dtype), *dense]))

    x, y = batch(8)
    alone = SingleProcess(model())
    expected = alone.step(x, y, microbatches=2)
    pipe = pipeline(model(), comm, microbatches=2, loss="mse")
    near(pipe.step(x, y), expected, 0.01)  # TensorFlow fuses operations in graphs, and rounds less
    assert_gradients(pipe, alone.gradients, 0.02)
    coded = pipeline(model(), comm, microbatches=2, loss="mse", codec="int8")
    got = float(coded.step(x, y))
    near(got, expected, 0.1)
    if comm.size > 1:
        assert got != expected, "nothing was encoded"
    for each in (pipe, coded):
        each.close()


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw"])
def test_updates_while_the_pipeline_runs(comm: Any, name: Any) -> None:
    """As in one process that uses, for each microbatch and stage, the weights that the schedule prescribes."""
    microbatches, every = 6, comm.size if name == "pipedream_2bw" else 1
    optimizer = {"class_name": "SGD", "config": {"learning_rate": 0.3, "momentum": 0.9}}
    pipe = pipeline(
        layers(comm.size), comm, schedule=name, microbatches=microbatches, loss="mse",
        optimizer=keras.optimizers.get(optimizer),
    )  # fmt: skip
    schedule = make(name, comm.size, microbatches)
    used = versions(schedule)
    whole = layers(comm.size).layers
    optimizers = [keras.optimizers.get(optimizer) for _ in whole]
    for step in range(2):
        x, y = batch(12, step)
        xs, ys = np.split(x, microbatches), np.split(y, microbatches)
        kept = [[[tf.constant(v) for v in layer.weights]] for layer in whole]
        outs: dict[Any, Any] = {}
        gradients: list[Any] = [None for _ in whole]
        order, losses = simulate(schedule), []
        actions = sorted(
            (span[1], stage, action)
            for stage, program in enumerate(order.lowered.schedule.programs)
            for span, action in zip(order.spans[stage], program, strict=True)
            if action.peer < 0
        )
        for _, stage, action in actions:
            layer, number = whole[stage], action.microbatch
            if action.kind is Kind.F:
                given = tf.constant(xs[number] if stage == 0 else outs[stage - 1, number][1])
                weights = kept[stage][used[stage, number][0]]
                with tf.GradientTape() as tape:
                    tape.watch([given, *weights])
                    out, _ = layer.stateless_call(weights, [], given)
                    count = min(every, microbatches - number // every * every)
                    root = tf.reduce_mean(tf.square(out - ys[number])) / count if stage == comm.size - 1 else out
                if stage == comm.size - 1:
                    losses.append(float(root) * count)
                outs[stage, number] = given, out, weights, tape, root
            elif action.kind is Kind.B:
                given, _, weights, tape, root = outs[stage, number]
                start = None if stage == comm.size - 1 else outs[stage + 1, number]
                result = tape.gradient(root, [given, *weights], output_gradients=start)
                outs[stage, number] = result[0]
                before = gradients[stage]
                gradients[stage] = (
                    result[1:] if before is None else [a + b for a, b in zip(before, result[1:], strict=True)]
                )
            elif action.kind is Kind.STEP:
                optimizers[stage].apply(gradients[stage], layer.trainable_variables)
                gradients[stage] = None
                kept[stage].append([tf.constant(v) for v in layer.weights])
        near(pipe.step(x, y), np.mean(losses))
        expected = {key(variable): variable for layer in whole for variable in layer.weights}
        for variable in pipe.variables:
            near(variable, expected[key(variable)])
    pipe.close()


# Refusals


class Stochastic(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Draws random numbers that a second forward would not repeat."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def call(self, x: Any) -> Any:
        return x + self.draw(tf.shape(x))


@pytest.mark.parametrize(
    ("draw", "text"),
    [
        (lambda shape: tf.random.normal(shape, dtype="float64"), "TensorFlow's RandomStandardNormal"),
        (lambda shape: keras.random.normal(shape, dtype="float64"), "variable that the layer does not own"),
    ],
)
def test_irreproducible_random_numbers_are_refused(comm: Any, draw: Any, text: str) -> None:
    """Each rank has such a layer, and refuses it or receives the error of another rank."""
    stochastic = [layer for number in range(comm.size) for layer in (keras.layers.Dense(WIDTH), Stochastic(draw))]
    pipe = pipeline([keras.Input((WIDTH,)), *stochastic], comm, microbatches=2, loss="mse", checkpoint="full")
    with pytest.raises((UsageError, PeerError), match=text if comm.rank == 0 else None):
        pipe.step(*batch(4))
    pipe.close()


@pytest.mark.ranks(min=2)
def test_ranks_with_different_arguments_are_refused(comm: Any) -> None:
    with pytest.raises(MismatchError, match=r"2 microbatch.*on rank 0 but .*3 microbatch"):
        pipeline(layers(4), comm, microbatches=2 if comm.rank == 0 else 3)
    with pytest.raises(MismatchError, match=r"stage 0: .*kernel"):
        model = [keras.Input((2,)), *(keras.layers.Dense(2) for _ in range(4))]
        pipeline(layers(4) if comm.rank else model, comm, microbatches=2, split=[5 - comm.size] + [1] * (comm.size - 1))
    with pytest.raises(MismatchError, match=r"weigh 'sum'.* on rank 0 but .*weigh None"):
        pipeline(layers(4), comm, microbatches=2, weigh=None if comm.rank else "sum")


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("what", ["activation", "rate", "order"])
def test_layers_with_different_options_are_refused(comm: Any, what: str) -> None:
    """Regression: each rank silently trained its own stages of its own model."""
    is_odd = comm.rank == comm.size - 1
    dense = [keras.layers.Dense(WIDTH, activation="relu" if is_odd and what == "activation" else "tanh")]
    dense += [keras.layers.Dense(WIDTH) for _ in range(comm.size)]
    middle = [
        keras.layers.Activation("tanh"),
        keras.layers.Dropout(0.9 if is_odd and what == "rate" else 0.1),
        keras.layers.Rescaling(2.0),
    ]
    if is_odd and what == "order":
        middle.reverse()
    with pytest.raises(MismatchError, match="a layer of stage"):
        pipeline(keras.Sequential([keras.Input((WIDTH,)), *dense, *middle]), comm, microbatches=2)


@pytest.mark.ranks(min=2)
def test_automatic_names_may_differ(comm: Any, tmp_path: Any) -> None:
    """Keras numbers the layers of a process, so that names depend on earlier layers."""
    others = [keras.layers.Dense(2) for _ in range(3 * comm.rank)]
    model = filled(
        keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(2 * comm.size))])
    )
    names = comm.all_gather_object(model.layers[-1].name)
    assert len(set(names)) > 1, f"this test is of none: {names}, {len(others)}"
    alone = SingleProcess(model)
    pipe = pipeline(model, comm, microbatches=2, loss="mse")
    near(pipe.step(*batch(8)), alone.step(*batch(8)))
    assert_gradients(pipe, alone.gradients)
    path = comm.broadcast_object(str(tmp_path / "model.keras"), 0)
    pipe.save(path)
    loaded = keras.models.load_model(path)
    for got, expected in zip(loaded.get_weights(), pipe.gather_weights(), strict=True):
        near(got, expected)
    pipe.load_weights(path)
    pipe.close()


@pytest.mark.ranks(min=2)
def test_mismatched_batches_are_refused(comm: Any) -> None:
    """All ranks refuse them, and the pipeline stays usable."""
    pipe = pipeline(layers(4), comm, microbatches=2, loss="mse")
    x, y = batch(8)
    with pytest.raises(UsageError, match="got different y"):
        pipe.step(x, y[::-1] if comm.rank else y)
    with pytest.raises(UsageError, match="x has 8 rows on rank 0, y has 6"):
        pipe.step(x, y[:6] if comm.rank else None)
    text = "rank 0 has the first stage: pass x on it" if comm.rank == 0 else "the batch of rank 0 is invalid"
    with pytest.raises(UsageError, match=text):
        pipe.step(None, y)
    near(pipe.step(x, y), SingleProcess(layers(4)).step(x, y))
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_layer_with_statistics_on_several_ranks(comm: Any) -> None:
    """It is not defined which of its statistics would count."""
    norm, x = keras.layers.BatchNormalization(name="norm"), keras.Input((WIDTH,))
    model = keras.Model(x, norm(keras.layers.Dense(WIDTH, name="middle")(norm(x))))
    last = ["middle", "norm"] if comm.size == 3 else ["middle"]
    pipe = pipeline(model, comm, microbatches=2, loss="mse", split=[1] * 3 if comm.size == 3 else last)
    with pytest.raises((UsageError, PeerError), match="use a separate layer for each" if comm.rank == 0 else None):
        pipe.step(*batch(4))
    pipe.close()


def test_invalid_arguments_are_refused(comm: Any) -> None:
    def refuse(text: str, model: Any = None, **options: Any) -> None:
        with pytest.raises(UsageError, match=text):
            pipeline(layers(4) if model is None else model, comm, **{"microbatches": 2, **options})

    class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
        def train_step(self, data: Any) -> Any:
            return {}

    x = keras.Input((WIDTH,))
    if comm.size > 1:
        refuse("cannot be cut into", layers(comm.size - 1))
    refuse("is neither functional nor Sequential", keras.Model())
    refuse("overrides train_step", Own(x, keras.layers.Dense(2)(x)))
    refuse("is not built", [keras.layers.Dense(2)])
    refuse("expected a Keras model or a list of layers, got int", 3)
    refuse("unknown schedule 'f1b1'", schedule="f1b1")
    refuse("checkpoint is 'some', expected one of none, selective, full", checkpoint="some")
    refuse("split is 'even'", split="even")
    refuse("weigh is a dict, with words: a Keras loss is one number", weigh={"words": "rows"})
    refuse("split is .*; expected", split=[9])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    refuse("a LossScaleOptimizer", optimizer=scaled)
    if comm.size > 1:
        refuse("unknown layer 'nothing'", split=["nothing"] * (comm.size - 1))
        refuse("global_clipnorm", schedule="pipedream", optimizer=keras.optimizers.SGD(global_clipnorm=1.0))
    pipe = pipeline(layers(4), comm, microbatches=2)
    with pytest.raises(UsageError, match="a pipeline cannot be called"):
        pipe(batch(2)[0])
    with pytest.raises(UsageError, match="the reduction of MeanSquaredError is 'none'"):
        pipe.compile("sgd", keras.losses.MeanSquaredError(reduction=None))
    with pytest.raises(UsageError, match="jit_compile=True"):
        pipe.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(UsageError, match="there is no optimizer"):
        pipe.apply_gradients()
    pipe.close()


@pytest.mark.ranks(min=2)
def test_a_loss_that_raises_ends_the_pipeline_everywhere(comm: Any) -> None:
    def loss(target: Any, output: Any) -> Any:
        raise ZeroDivisionError("no rows")

    pipe = pipeline(layers(4), comm, microbatches=4, loss=loss)
    assert_a_failing_loss_is_reported(comm, lambda: pipe.step(*batch(8)))
    pipe.close()


def test_names_are_exported() -> None:
    assert ct.pipeline is pipeline
    assert issubclass(ct.Pipeline, keras.Model)
