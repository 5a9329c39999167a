"""Losses that layers add, and settings that ranks must share: they match one process or are refused on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest

from commlib.errors import MismatchError, PeerError, UsageError
from commlib_tensorflow import pipeline
from tests.inputs.keras_pipelines import EXACT, WIDTH, batch, filled, in_float64, layers, near

__all__ = ["in_float64"]


class Adds(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Adds a loss of its input."""

    def __init__(self, kind: str, *, in_training: bool = False) -> None:
        super().__init__()
        self.kind, self.in_training = kind, in_training

    def call(self, x: Any, training: bool = False) -> Any:
        ops = keras.ops
        if training or not self.in_training:
            square = ops.square(x)
            built = {
                "mean": lambda: ops.mean(square),
                "sum": lambda: ops.sum(square),
                "both": lambda: ops.mean(square) + ops.sum(square),
                "positive": lambda: ops.sum(square * ops.cast(x > 0, x.dtype)) / ops.sum(ops.cast(x > 0, x.dtype)),
            }
            self.add_loss(0.1 * built[self.kind]())
        return x


def adding(*kinds: str, in_training: bool = False) -> Any:
    """A model in which each kind of loss is added between two layers."""
    own: list[Any] = [keras.Input((WIDTH,))]
    for kind in kinds:
        own += [keras.layers.Dense(WIDTH, "tanh"), Adds(kind, in_training=in_training)]
    return filled(keras.Sequential([*own, keras.layers.Dense(WIDTH)]))


def assert_matches_one_process(
    comm: Any, make: Any, *given: Any, loss: Any, eager: bool = True, **options: Any
) -> None:
    whole = make()
    whole.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    text: dict[str, Any] = {"batch_size": 7, "verbose": 0}
    fitted: dict[str, Any] = {"epochs": 2, "shuffle": False, **text}
    expected = whole.fit(*given, **fitted).history["loss"]
    pipe = pipeline(make(), comm, microbatches=4, **options)
    try:
        pipe.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=eager)
        near(pipe.fit(*given, **fitted).history["loss"], expected)
        for got, value in zip(pipe.gather_weights(), whole.get_weights(), strict=True):
            near(got, value, EXACT)
        near(pipe.evaluate(*given, **text), whole.evaluate(*given, **text))
    finally:
        pipe.close()


def test_a_model_with_added_losses_only(comm: Any) -> None:
    """Regression: models with losses of their own, such as a variational autoencoder, needed a loss and y."""
    x, y = batch(13)
    assert_matches_one_process(comm, lambda: adding("mean", "mean"), x, loss=None)
    pipe = pipeline(layers(4), comm, microbatches=2)
    pipe.compile("sgd")
    for _ in range(2):
        with pytest.raises(UsageError, match="there is no loss"):
            pipe.fit(x, y, verbose=0)
    pipe.close()


def test_a_mean_over_unmasked_values(comm: Any) -> None:
    """Regression: the last stage refused it in the first batch, and other ranks only reported a lost peer."""

    def make() -> Any:
        x = keras.Input((5,), dtype="int32")
        hidden = keras.layers.Embedding(WIDTH, WIDTH, mask_zero=True)(x)
        return filled(keras.Model(x, keras.layers.Dense(WIDTH)(keras.layers.Dense(WIDTH, "tanh")(hidden))))

    generator = np.random.default_rng(1)
    x, y = generator.integers(0, WIDTH, (13, 5)), generator.normal(size=(13, 5, WIDTH))
    pipe = pipeline(make(), comm, microbatches=4)
    with pytest.raises(UsageError, match="has a mask"):
        pipe.compile("sgd", "mse")
    pipe.close()
    assert_matches_one_process(comm, make, x, y, loss=keras.losses.MeanSquaredError(reduction="sum"))

    def weigh(target: Any, inputs: Any) -> Any:
        return keras.ops.sum(keras.ops.cast(inputs != 0, "int32"))

    assert_matches_one_process(comm, make, x, y, loss="mse", weigh=weigh)


def test_sample_weights_of_different_rows_are_refused(comm: Any) -> None:
    """Regression: if y is the same in all rows, weights in one order were paired with x in another."""
    pipe = pipeline(layers(4), comm, microbatches=2, loss="mse", optimizer="sgd")
    x, y = batch(8)[0], np.zeros((8, WIDTH))
    weights = np.arange(8.0) + comm.rank
    if comm.size > 1:
        with pytest.raises(UsageError, match="different sample_weight"):
            pipe.step(x, y, weights)
        with pytest.raises(UsageError, match="different sample_weight"):
            pipe.step(x, y, weights if comm.rank == pipe.pipe.first else None)  # those of the last rank count
    pipe.step(x, y, weights if comm.rank == pipe.pipe.last else None)
    pipe.close()


def test_a_shared_weight_frozen_on_one_rank_is_refused(comm: Any) -> None:
    """Regression: the other rank waited for it in the first batch."""
    shared = keras.layers.Dense(WIDTH, "tanh")
    x = keras.Input((WIDTH,))
    model = keras.Model(x, shared(keras.layers.Dense(WIDTH)(keras.layers.Dense(WIDTH)(shared(x)))))
    pipe = pipeline(filled(model), comm, microbatches=2, loss="mse", optimizer="sgd")
    if comm.size > 1:
        shared.trainable = comm.rank > 0
        with pytest.raises(MismatchError, match=f"frozen on rank 0 and trainable on rank {pipe.pipe.last}"):
            pipe.compile("sgd", "mse")  # also on the ranks between them, which do not have it
    shared.trainable = False
    pipe.compile("sgd", "mse")
    pipe.step(*batch(8))
    pipe.close()


@pytest.mark.parametrize("in_training", [False, True])
def test_losses_that_layers_add(comm: Any, in_training: bool) -> None:
    """Regression: a sum over rows counted 1 / microbatches: 2.16 instead of 4.95."""

    def make() -> Any:
        return adding("sum", "mean", "sum", in_training=in_training)

    schedule = "1f1b" if in_training else "zb_h1"
    assert_matches_one_process(comm, make, *batch(13), loss="mse", eager=False, schedule=schedule)


@pytest.mark.parametrize("kind", ["both", "positive"])
def test_added_losses_that_are_neither_mean_nor_sum(comm: Any, kind: str) -> None:
    pipe = pipeline(adding("mean", kind), comm, microbatches=4, loss="mse", optimizer="sgd")
    for _ in range(2):
        with pytest.raises(UsageError, match="a loss added by a layer of stage"):
            pipe.fit(*batch(8, seed=8), shuffle=False, verbose=0)  # of 7 and 4 positive elements
    pipe.close()
    assert_matches_one_process(comm, lambda: adding("sum", "mean"), *batch(13), loss="mse", weigh="rows")


class Centred(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Subtracts the mean of all rows."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, 0, keepdims=True)


def test_a_layer_that_mixes_rows(comm: Any) -> None:
    """Regression: it silently saw a microbatch instead of the batch."""
    own = [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "tanh"), Centred(), keras.layers.Dense(WIDTH)]
    pipe = pipeline(filled(keras.Sequential(own)), comm, microbatches=4, loss="mse", optimizer="sgd")
    for _ in range(2):
        with pytest.raises(UsageError, match="mixes the rows of a batch"):
            pipe.fit(*batch(8), verbose=0)
    pipe.close()
    pipe = pipeline(filled(keras.Sequential(own)), comm, microbatches=4, loss="mse", optimizer="sgd", weigh="rows")
    pipe.fit(*batch(8), verbose=0)
    pipe.close()


def test_compile_arguments_are_compared(comm: Any) -> None:
    """Regression: another learning rate or optimizer on one rank silently changed the training of its stages."""
    if comm.size == 1:
        return
    pipe, last = pipeline(layers(4), comm, microbatches=2), comm.rank == comm.size - 1
    sgd = keras.optimizers.SGD
    for optimizer, metrics, what in (
        (sgd(0.1 + last), None, "optimizer's learning_rate"),
        (sgd(0.1, gradient_accumulation_steps=2 if last else None), None, "optimizer's gradient_accumulation_steps"),
        (sgd(0.1, global_clipnorm=1.0 if last else None), None, "optimizer's global_clipnorm"),
        (keras.optimizers.Adam() if last else sgd(), None, "optimizer"),
        (sgd(), ["mae"] if last else ["mse"], "metric mae"),
    ):
        pipe.compile(optimizer, "mse", metrics=metrics)
        with pytest.raises(MismatchError, match=what):
            pipe.fit(*batch(8), verbose=0)
    pipe.compile(sgd(0.1), "mse", metrics=["mae"])
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    with pytest.raises(MismatchError, match="different learning rates after an epoch of fit"):
        pipe.fit(*batch(8), verbose=0, callbacks=[halve] if comm.rank == 1 else None)
    pipe.close()


@pytest.mark.parametrize("what", ["layer", "weight"])
def test_freezing_without_compile(comm: Any, what: str) -> None:
    """Regression: one process keeps compiled settings, but a pipeline adopted some changes: weights differed."""
    model, whole = layers(4), layers(4)
    pipe = pipeline(model, comm, microbatches=2)
    x, y = batch(8)
    for one in (pipe, whole):
        one.compile(keras.optimizers.SGD(0.1), "mse")
        one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for one in (model, whole):
        frozen = one.layers[2] if what == "layer" else one.layers[2].kernel
        frozen.trainable = False
    with pytest.raises(UsageError, match=r"trainable of .*d2.* was set to False after compile.*call compile\(\) again"):
        pipe.fit(x, y, verbose=0)
    pipe.evaluate(x, y, verbose=0)
    for one in (pipe, whole):
        one.compile(keras.optimizers.SGD(0.1), "mse")
        one.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    for got, expected in zip(pipe.gather_weights(), whole.get_weights(), strict=True):
        near(got, expected)
    pipe.close()


def test_freezing_on_one_rank_only(comm: Any) -> None:
    """Regression: only the setting on the rank of the layer's stage counted, and others were ignored."""
    if comm.size == 1:
        return
    model = layers(4)
    pipe = pipeline(model, comm, microbatches=2)
    model.layers[3].trainable = comm.rank == 0
    pipe.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(MismatchError, match=r"layer .* of the stages is frozen"):
        pipe.fit(*batch(8), verbose=0)
    pipe.close()


def test_a_frozen_model_with_an_unfrozen_layer(comm: Any) -> None:
    """Regression: Keras trains none of its layers, but a pipeline trained this one."""
    model = layers(4)
    pipe = pipeline(model, comm, microbatches=2)
    model.trainable = False
    pipe.compile(keras.optimizers.SGD(0.1), "mse")
    before = pipe.gather_weights()
    pipe.fit(*batch(8), verbose=0)
    for got, expected in zip(pipe.gather_weights(), before, strict=True):
        near(got, expected)
    model.layers[-1].trainable = True
    with pytest.raises(UsageError, match=r"model .* has trainable=False, but .* has trainable=True"):
        pipe.compile(keras.optimizers.SGD(0.1), "mse")
    pipe.close()


AFTER_THE_CUT = {
    "quantize": (
        lambda model: model.quantize("int8"),
        r"layer 'd0' has a new variable, .*d0/kernel, of shape \(4, 4\)",
    ),
    "quantize one": (lambda model: model.layers[3].quantize("int8"), r"layer 'd3' has a new variable, .*d3/kernel"),
    "lora": (lambda model: model.layers[1].enable_lora(2), r"layer 'd1' has a new variable, .*lora_kernel_a"),
    "lost": (lambda model: delattr(model.layers[2], "bias"), r"layer 'd2' has lost its variable, .*d2/bias"),
    "add": (lambda model: model.add(keras.layers.Dense(WIDTH, name="d4")), r"model '.*' has a new layer 'd4'"),
    "pop": (lambda model: model.pop(), r"model '.*' has lost its layer 'd3'"),
}


@pytest.mark.parametrize(
    "what",
    [
        "quantize",
        "lora",
        "add",
        "quantize one",
        "lost",
        "pop",
    ],
)
def test_weights_added_after_the_cut(comm: Any, what: str) -> None:
    """Regression: no stage had them, and without another compile pipelines trained weights that no longer existed."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    change, text = AFTER_THE_CUT[what]
    model, (x, y) = layers(4), batch(4)
    pipe = pipeline(model, comm, microbatches=2)
    pipe.compile("sgd", "mse", run_eagerly=True)
    pipe.fit(x, y, verbose=0)
    change(model)
    for call in (
        lambda: pipe.fit(x, y, verbose=0),
        lambda: pipe.step(x, y),
        lambda: pipe.evaluate(x, y, verbose=0),
        lambda: pipe.predict(x, verbose=0),
        lambda: pipe.compile("sgd", "mse"),
    ):
        with pytest.raises(UsageError, match=f"{text}.*since the model was split into stages.*before pipeline"):
            call()
    pipe.close()


@pytest.mark.ranks(min=2)
def test_changes_on_one_rank_only(comm: Any) -> None:
    """The others receive the layer and the rank."""
    model = layers(4)
    pipe = pipeline(model, comm, microbatches=2, loss="mse")
    if comm.rank == 0:
        model.pop()
    with pytest.raises((UsageError, PeerError), match=r"model '.*' has lost its layer 'd3' .*this is rank 0 of"):
        pipe.step(*batch(4))
    pipe.close()


@pytest.mark.ranks(min=2)
def test_mismatched_x_without_y_on_the_first_stage(comm: Any) -> None:
    """Targets show whether batches match, unless a rank has none."""
    pipe = pipeline(layers(4), comm, microbatches=2, loss="mse", optimizer="sgd")
    x, y = batch(8)
    for _ in range(2):
        with pytest.raises(UsageError, match="got different x, so x and y are not of the same rows"):
            pipe.step(x[::-1] if comm.rank else x, y if comm.rank else None)
        pipe.step(x if comm.rank == 0 else None, y if comm.rank else None)
        pipe.step(x + comm.rank, y)  # augmented on each rank, of the same rows
    pipe.close()


def test_one_of_several_optimizers_with_clipping(comm: Any) -> None:
    """Regression: it clipped by the norm of this rank's gradients."""
    several = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(global_clipnorm=0.3), {".*d1.*": keras.optimizers.SGD(0.1)})
    )
    pipe = pipeline(layers(4), comm, microbatches=2)
    if comm.size > 1:
        with pytest.raises(UsageError, match="contains an optimizer with global_clipnorm"):
            pipe.compile(several, "mse")
    pipe.close()


def test_metrics_with_several_numbers(comm: Any) -> None:
    """Regression: they are no number, and the last stage's rank failed."""
    whole, pipe = layers(4), pipeline(layers(4), comm, microbatches=2)
    x, y = batch(8)[0], np.eye(WIDTH)[np.arange(8) % WIDTH]
    reports = []
    for model in (whole, pipe):
        model.compile("sgd", "mse", metrics=[keras.metrics.F1Score(threshold=0.1), "mae"], run_eagerly=True)
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        reports.append((history, model.evaluate(x, y, verbose=0, return_dict=True)))
    for got, expected in zip(reports[1], reports[0], strict=True):
        assert got.keys() == expected.keys()
        for name in got:
            near(got[name], expected[name])
    pipe.close()


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_an_evaluation_in_short_floats_is_compared(comm: Any, policy: str) -> None:
    """Regression: its rounding was taken for a fault of the cut: the loss is a Python number then."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    own = [keras.layers.Dense(WIDTH, "tanh"), keras.layers.LayerNormalization(), keras.layers.Dense(WIDTH)]
    last = keras.layers.Dense(WIDTH, dtype="float32")
    model = filled(keras.Sequential([keras.Input((WIDTH,)), *own, last]))
    for seed in range(3):
        x, y = (np.asarray(one, np.float32) for one in batch(7, seed))
        pipeline(model, comm, microbatches=3, loss="mse", verify=(x, y)).close()


class Placed(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Adds an input that may be as long as a batch, but has no rows."""

    def call(self, values: Any) -> Any:
        x, places = values
        return x + places[:, None]


@pytest.mark.parametrize("stage", [0, 1])
def test_an_input_as_long_as_the_batch_without_rows(comm: Any, stage: int) -> None:
    """Regression: its single elements broadcast, so that microbatches silently differed.

    This was reported only if the first stage used it.
    """
    x, places = keras.Input((8, WIDTH)), keras.Input(())
    output = x
    for number in range(max(comm.size, 2)):
        output = keras.layers.Dense(WIDTH, name=f"d{number}")(output)
        if number == stage:
            output = Placed()([output, places])
    split = [f"d{number}" for number in range(1, comm.size)]
    pipe = pipeline(filled(keras.Model([x, places], output)), comm, microbatches=8, split=split)
    pipe.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    rows = np.ones((8, 8, WIDTH))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.train_on_batch([rows, np.linspace(0, 1, 8)], rows)
    messages = [str(one.message) for one in caught if "not two together" in str(one.message)]
    assert len(messages) == (comm.rank == min(stage, comm.size - 1))
    assert not messages or f"pipeline: stage {comm.rank} (of " in messages[0]
    pipe.close()
