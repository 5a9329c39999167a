"""What ranks have to agree on, and losses that layers add: those of one process, or refused on all ranks."""

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
    """Adds a loss of what it is given."""

    def __init__(self, kind: str, *, in_training: bool = False) -> None:
        super().__init__()
        self.kind, self.in_training = kind, in_training

    def call(self, x: Any, training: bool = False) -> Any:
        ops = keras.ops
        if training or not self.in_training:
            square = ops.square(x)
            made = {
                "mean": lambda: ops.mean(square),
                "sum": lambda: ops.sum(square),
                "both": lambda: ops.mean(square) + ops.sum(square),
                "positive": lambda: ops.sum(square * ops.cast(x > 0, x.dtype)) / ops.sum(ops.cast(x > 0, x.dtype)),
            }
            self.add_loss(0.1 * made[self.kind]())
        return x


def adding(*kinds: str, in_training: bool = False) -> Any:
    """A model in which each kind of loss is added between two layers."""
    own: list[Any] = [keras.Input((WIDTH,))]
    for kind in kinds:
        own += [keras.layers.Dense(WIDTH, "tanh"), Adds(kind, in_training=in_training)]
    return filled(keras.Sequential([*own, keras.layers.Dense(WIDTH)]))


def assert_is_that_of_one_process(
    comm: Any, make: Any, *given: Any, loss: Any, eager: bool = True, **options: Any
) -> None:
    whole = make()
    whole.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=True)
    told: dict[str, Any] = {"batch_size": 7, "verbose": 0}
    fitted: dict[str, Any] = {"epochs": 2, "shuffle": False, **told}
    expected = whole.fit(*given, **fitted).history["loss"]
    pipe = pipeline(make(), comm, microbatches=4, **options)
    try:
        pipe.compile(keras.optimizers.SGD(0.1), loss, run_eagerly=eager)
        near(pipe.fit(*given, **fitted).history["loss"], expected)
        for got, value in zip(pipe.gather_weights(), whole.get_weights(), strict=True):
            near(got, value, EXACT)
        near(pipe.evaluate(*given, **told), whole.evaluate(*given, **told))
    finally:
        pipe.close()


def test_a_model_whose_layers_add_all_losses(comm: Any) -> None:
    """A loss and y were wanted of a model that has losses of its own, such as a variational autoencoder."""
    x, y = batch(13)
    assert_is_that_of_one_process(comm, lambda: adding("mean", "mean"), x, loss=None)
    pipe = pipeline(layers(4), comm, microbatches=2)
    pipe.compile("sgd")
    for _ in range(2):
        with pytest.raises(UsageError, match="there is no loss"):
            pipe.fit(x, y, verbose=0)
    pipe.close()


@pytest.mark.long
def test_a_mean_over_what_is_not_masked(comm: Any) -> None:
    """It was refused in the first batch, where the last stage is; other ranks were told that a peer was gone."""

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
    assert_is_that_of_one_process(comm, make, x, y, loss=keras.losses.MeanSquaredError(reduction="sum"))

    def weigh(target: Any, inputs: Any) -> Any:
        return keras.ops.sum(keras.ops.cast(inputs != 0, "int32"))

    assert_is_that_of_one_process(comm, make, x, y, loss="mse", weigh=weigh)


def test_sample_weights_of_other_rows(comm: Any) -> None:
    """Where y is the same in all rows, weights of one order were paired with x of another."""
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


def test_a_shared_weight_that_one_rank_freezes(comm: Any) -> None:
    """The other waited for it in the first batch."""
    shared = keras.layers.Dense(WIDTH, "tanh")
    x = keras.Input((WIDTH,))
    model = keras.Model(x, shared(keras.layers.Dense(WIDTH)(keras.layers.Dense(WIDTH)(shared(x)))))
    pipe = pipeline(filled(model), comm, microbatches=2, loss="mse", optimizer="sgd")
    if comm.size > 1:
        shared.trainable = comm.rank > 0
        with pytest.raises(MismatchError, match=f"frozen on rank 0 and trainable on rank {pipe.pipe.last}"):
            pipe.compile("sgd", "mse")  # on the ranks between them, too, which do not have it
    shared.trainable = False
    pipe.compile("sgd", "mse")
    pipe.step(*batch(8))
    pipe.close()


@pytest.mark.long
@pytest.mark.parametrize("in_training", [False, pytest.param(True, marks=pytest.mark.long)])
def test_losses_that_layers_add(comm: Any, in_training: bool) -> None:
    """A sum over rows counted 1 / microbatches: 2.16 instead of 4.95."""

    def make() -> Any:
        return adding("sum", "mean", "sum", in_training=in_training)

    schedule = "1f1b" if in_training else "zb_h1"
    assert_is_that_of_one_process(comm, make, *batch(13), loss="mse", eager=False, schedule=schedule)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("both", marks=pytest.mark.long), "positive"])
def test_added_losses_that_are_neither_mean_nor_sum(comm: Any, kind: str) -> None:
    pipe = pipeline(adding("mean", kind), comm, microbatches=4, loss="mse", optimizer="sgd")
    for _ in range(2):
        with pytest.raises(UsageError, match="a loss added by a layer of stage"):
            pipe.fit(*batch(8, seed=8), shuffle=False, verbose=0)  # of 7 and 4 positive elements
    pipe.close()
    assert_is_that_of_one_process(comm, lambda: adding("sum", "mean"), *batch(13), loss="mse", weigh="rows")


class Centred(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Subtracts the mean of all rows."""

    def call(self, x: Any) -> Any:
        return x - keras.ops.mean(x, 0, keepdims=True)


def test_a_layer_that_mixes_rows(comm: Any) -> None:
    """It saw a microbatch instead of the batch, without a word."""
    own = [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, "tanh"), Centred(), keras.layers.Dense(WIDTH)]
    pipe = pipeline(filled(keras.Sequential(own)), comm, microbatches=4, loss="mse", optimizer="sgd")
    for _ in range(2):
        with pytest.raises(UsageError, match="mixes the rows of a batch"):
            pipe.fit(*batch(8), verbose=0)
    pipe.close()
    pipe = pipeline(filled(keras.Sequential(own)), comm, microbatches=4, loss="mse", optimizer="sgd", weigh="rows")
    pipe.fit(*batch(8), verbose=0)
    pipe.close()


def test_what_compile_is_given(comm: Any) -> None:
    """Another learning rate, or another optimizer, of the stages of one rank trained them in another way."""
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


@pytest.mark.long
@pytest.mark.parametrize("what", ["layer", "weight"])
def test_what_is_frozen_without_compile(comm: Any, what: str) -> None:
    """One process goes on with what it has compiled, a pipeline took some of it in: weights were other ones."""
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


def test_what_one_rank_alone_freezes(comm: Any) -> None:
    """Only the rank that has the layer's stage trained by its own setting: another one's was nothing."""
    if comm.size == 1:
        return
    model = layers(4)
    pipe = pipeline(model, comm, microbatches=2)
    model.layers[3].trainable = comm.rank == 0
    pipe.compile(keras.optimizers.SGD(0.1), "mse")
    with pytest.raises(MismatchError, match=r"layer .* of the stages is frozen"):
        pipe.fit(*batch(8), verbose=0)
    pipe.close()


def test_a_frozen_model_with_a_layer_that_is_not(comm: Any) -> None:
    """Keras trains nothing of it, a pipeline trained the layer."""
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


@pytest.mark.long
@pytest.mark.parametrize(
    "what",
    [
        "quantize",
        "lora",
        "add",
        *(pytest.param(what, marks=pytest.mark.long) for what in ("quantize one", "lost", "pop")),
    ],
)
def test_weights_that_come_after_the_cut(comm: Any, what: str) -> None:
    """No stage had them, and where nobody called compile again pipelines trained what was no longer there."""
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
def test_what_one_rank_alone_changes(comm: Any) -> None:
    """The others are told which layer of which rank it is."""
    model = layers(4)
    pipe = pipeline(model, comm, microbatches=2, loss="mse")
    if comm.rank == 0:
        model.pop()
    with pytest.raises((UsageError, PeerError), match=r"model '.*' has lost its layer 'd3' .*this is rank 0 of"):
        pipe.step(*batch(4))
    pipe.close()


@pytest.mark.ranks(min=2)
def test_x_of_other_rows_where_the_first_stage_has_no_y(comm: Any) -> None:
    """Targets tell whether batches belong together, but where one rank has none."""
    pipe = pipeline(layers(4), comm, microbatches=2, loss="mse", optimizer="sgd")
    x, y = batch(8)
    for _ in range(2):
        with pytest.raises(UsageError, match="got different x, so x and y are not of the same rows"):
            pipe.step(x[::-1] if comm.rank else x, y if comm.rank else None)
        pipe.step(x if comm.rank == 0 else None, y if comm.rank else None)
        pipe.step(x + comm.rank, y)  # augmented anew on each rank, of the same rows
    pipe.close()


@pytest.mark.long
def test_a_clipped_optimizer_of_several(comm: Any) -> None:
    """It clipped by the norm of this rank's gradients."""
    several = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.Adam(global_clipnorm=0.3), {".*d1.*": keras.optimizers.SGD(0.1)})
    )
    pipe = pipeline(layers(4), comm, microbatches=2)
    if comm.size > 1:
        with pytest.raises(UsageError, match="contains an optimizer with global_clipnorm"):
            pipe.compile(several, "mse")
    pipe.close()


@pytest.mark.long
def test_metrics_of_several_numbers(comm: Any) -> None:
    """They were no number, and the last stage's rank gave up."""
    whole, pipe = layers(4), pipeline(layers(4), comm, microbatches=2)
    x, y = batch(8)[0], np.eye(WIDTH)[np.arange(8) % WIDTH]
    said = []
    for model in (whole, pipe):
        model.compile("sgd", "mse", metrics=[keras.metrics.F1Score(threshold=0.1), "mae"], run_eagerly=True)
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        said.append((history, model.evaluate(x, y, verbose=0, return_dict=True)))
    for got, expected in zip(said[1], said[0], strict=True):
        assert got.keys() == expected.keys()
        for name in got:
            near(got[name], expected[name])
    pipe.close()


@pytest.mark.long
@pytest.mark.parametrize("policy", [pytest.param("float32", marks=pytest.mark.long), "mixed_bfloat16"])
def test_an_evaluation_in_short_floats_is_compared(comm: Any, policy: str) -> None:
    """Its rounding was taken for a fault of the cut: that of the loss, which is a number of Python then."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(policy)
    own = [keras.layers.Dense(WIDTH, "tanh"), keras.layers.LayerNormalization(), keras.layers.Dense(WIDTH)]
    last = keras.layers.Dense(WIDTH, dtype="float32")
    model = filled(keras.Sequential([keras.Input((WIDTH,)), *own, last]))
    for seed in range(3):
        x, y = (np.asarray(one, np.float32) for one in batch(7, seed))
        pipeline(model, comm, microbatches=3, loss="mse", verify=(x, y)).close()


class Placed(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Adds what is as long as a batch may be, and belongs to no row."""

    def call(self, values: Any) -> Any:
        x, places = values
        return x + places[:, None]


@pytest.mark.parametrize("stage", [0, 1])
def test_an_input_that_looks_as_if_it_had_rows(comm: Any, stage: int) -> None:
    """Single elements of it fit everything, so that microbatches gave something else without a word.

    That was told where the first stage used it, and not of another one.
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
    told = [str(one.message) for one in caught if "not two together" in str(one.message)]
    assert len(told) == (comm.rank == min(stage, comm.size - 1))
    assert not told or f"pipeline: stage {comm.rank} (of " in told[0]
    pipe.close()
