"""Cross-entropy of divided logits, compared with Keras' own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib.errors import MismatchError, UsageError
from commlib.sharding.axis import ParallelAxis
from commlib.sharding.sharding import Sharding
from commlib.tensor_parallel import Column, Row, Vocabulary
from commlib_tensorflow.tensor import VocabularyCrossEntropy, gather, parallelize, scatter, vocabulary_cross_entropy
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values, words

__all__ = ["in_float64"]

L = keras.layers
VOCABULARY = 11


def oracle(logits: Any, target: Any, ignored: int, smoothing: float) -> Any:
    """Return the loss of each row of whole logits."""
    is_counted = target != ignored
    wanted = tf.one_hot(tf.where(is_counted, target, 0), logits.shape[-1], dtype=logits.dtype)
    wanted = (1 - smoothing) * wanted + smoothing / logits.shape[-1]
    return tf.where(is_counted, -tf.reduce_sum(wanted * tf.nn.log_softmax(logits), -1), 0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_loss_and_gradients(comm: Any, smoothing: float, reduction: Any, compiled: bool) -> None:
    """Second-order gradients match, too."""
    logits = tf.constant(30 * values(2, 5, VOCABULARY))
    target = tf.constant(words(VOCABULARY, 2, 5))
    target = tf.where(target == 3, tf.cast(-100, target.dtype), target)
    weights = tf.constant(values(2, 5, seed=4) if reduction == "none" else values(1, seed=4))
    wanted = tf.constant(values(2, 5, VOCABULARY, seed=6))

    def step(loss_of: Any) -> Any:
        with tf.GradientTape() as second:
            second.watch(logits)
            with tf.GradientTape() as first:
                first.watch(logits)
                loss = loss_of(logits)
                total = tf.reduce_sum(loss * weights)
            gradient = first.gradient(total, logits)
            further = tf.reduce_sum(gradient * wanted)
        return loss, gradient, second.gradient(further, logits)

    def divided(x: Any) -> Any:
        own = scatter(x, comm, -1)
        return vocabulary_cross_entropy(own, target, comm, label_smoothing=smoothing, reduction=reduction)

    def whole(x: Any) -> Any:
        rows = oracle(x, target, -100, smoothing)
        if reduction == "none":
            return rows
        return tf.reduce_sum(rows) / (int(np.sum(target != -100)) if reduction == "mean" else 1)

    run = tf.function(step, autograph=False) if compiled else step
    for what, got, expected in zip(("loss", "gradient", "second"), run(divided), step(whole), strict=True):
        near(got, expected, 1e-11 if what == "second" else 1e-12, what)


def weighted(logits: Any, target: Any, weight: Any, smoothing: float) -> tuple[Any, Any]:
    """Return the loss and weight of each row of whole logits, as defined by PyTorch; 7 is ignored."""
    counted = tf.where(target == 7, tf.zeros((), weight.dtype), tf.gather(weight, target))
    logs = tf.nn.log_softmax(logits)
    losses = -(1 - smoothing) * counted * tf.gather(logs, target, batch_dims=target.shape.rank)
    smooth = -smoothing / logits.shape[-1] * tf.reduce_sum(logs * weight, -1)
    return losses + tf.where(target == 7, tf.zeros_like(smooth), smooth), counted


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_weights_of_words(comm: Any, smoothing: float, compiled: bool) -> None:
    """With smoothing, weights apply to each word's part of the loss, and a mean divides by the targets' weights."""
    logits, target = tf.constant(5 * values(2, 5, VOCABULARY)), tf.constant(words(VOCABULARY, 2, 5))
    target, weight = (
        tf.where(target == 3, tf.cast(7, target.dtype), target),
        tf.constant(values(VOCABULARY, seed=2) ** 2),
    )
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(logits)
        losses, counted = weighted(logits, target, weight, smoothing)
        wanted = {"none": tf.reduce_sum(losses**2), "sum": tf.reduce_sum(losses)}
        wanted["mean"] = wanted["sum"] / tf.reduce_sum(counted)

    def step(own: Any, reduction: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(own)
            loss = vocabulary_cross_entropy(
                own, target, comm, weight=weight, ignore_index=7, label_smoothing=smoothing, reduction=reduction
            )
            loss = tf.reduce_sum(loss**2) if reduction == "none" else loss
        return loss, tape.gradient(loss, own)

    run = tf.function(step) if compiled else step
    for reduction, loss in wanted.items():
        got, gradient = run(scatter(logits, comm, -1), reduction)
        near(got, loss, 1e-12)
        near(gradient, scatter(tape.gradient(loss, logits), comm, -1), 1e-12)
    divided = VocabularyCrossEntropy(comm, weight=weight, vocabulary=VOCABULARY)
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    expected = plain(target, logits, sample_weight=tf.gather(weight, target))
    near(divided(target, scatter(logits, comm, -1)), expected, 1e-6)


@pytest.mark.ranks(min=2)
def test_different_targets_on_ranks_are_refused(comm: Any) -> None:
    """Regression: ranks silently computed the loss of different words."""
    logits, target, weight = scatter(values(4, VOCABULARY), comm, -1), np.arange(4), values(VOCABULARY) ** 2
    for _ in range(2):
        with pytest.raises(MismatchError, match="target, 4 rows"):
            vocabulary_cross_entropy(logits, np.roll(target, comm.rank), comm)
        with pytest.raises(MismatchError, match="weight: "):
            vocabulary_cross_entropy(logits, target, comm, weight=np.roll(weight, comm.rank))
    # Regression: after a caught error, a rank's next call was matched with the failed one.
    is_told = comm.rank == 0
    with pytest.raises(
        MismatchError if is_told else UsageError, match="same call" if is_told else "for a target of shape"
    ):
        vocabulary_cross_entropy(logits, target if is_told else target[1:], comm)
    vocabulary_cross_entropy(logits, target, comm, weight=weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_precision(comm: Any, dtype: str) -> None:
    """It is computed at least in float32, and not in the codec of an axis."""
    logits, target = tf.cast(values(6, VOCABULARY), dtype), words(VOCABULARY, 6)
    expected = tf.reduce_mean(oracle(tf.cast(logits, tf.float64), tf.constant(target), -100, 0))
    result = vocabulary_cross_entropy(scatter(logits, comm, -1), target, ParallelAxis(comm, "int8"))
    assert result.dtype == tf.float32
    near(result, expected, 1e-6)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("compiled", [False, True])
def test_whole_logits_are_refused(comm: Any, compiled: bool) -> None:
    """Regression: gathered logits were taken for a larger vocabulary, with a wrong loss and gradient."""
    whole, target = values(3, VOCABULARY), words(VOCABULARY, 3)

    def loss(logits: Any, target: Any) -> Any:
        gathered = tf.ensure_shape(gather(logits, comm, -1), (None, VOCABULARY))
        return vocabulary_cross_entropy(gathered, target, comm)

    run = tf.function(loss) if compiled else loss
    for rows in (3, 1):
        with pytest.raises((UsageError, tf.errors.OpError), match="the same logits of 11 words, so they are not"):
            run(scatter(whole[:rows], comm, -1), target[:rows])


def test_equal_divided_logits_are_accepted(comm: Any) -> None:
    """A head that starts with zeros makes equal logits on all ranks; `vocabulary` identifies the others."""
    target = words(3 * comm.size, 4)
    for own, total in ((np.zeros((4, 3)), None), (np.full((4, 3), np.nan), None), (values(4, 3), 3 * comm.size)):
        whole = tf.constant(np.tile(own, (1, comm.size)))
        result = vocabulary_cross_entropy(tf.constant(own), target, comm, vocabulary=total)
        expected = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(target, whole, from_logits=True))
        np.testing.assert_allclose(result, expected, 1e-10)


@pytest.mark.ranks(min=2)
def test_different_logits_on_ranks_are_refused(comm: Any) -> None:
    """Regression: the core's error was about a reduction, and named neither logits nor rows."""
    own, target, is_other = scatter(values(4, VOCABULARY), comm, -1), words(VOCABULARY, 4), comm.rank == 1
    with pytest.raises(MismatchError, match=f"logits of {3 if is_other else 4} rows, and other ranks have others"):
        vocabulary_cross_entropy(own[1:] if is_other else own, target[1:] if is_other else target, comm)
    with pytest.raises(MismatchError, match=f"{'float32' if is_other else 'float64'} logits of 4 rows"):
        vocabulary_cross_entropy(tf.cast(own, "float32") if is_other else own, target, comm)
    with pytest.raises(UsageError if is_other else MismatchError, match="have no tokens" if is_other else "same call"):
        vocabulary_cross_entropy(own[:, :0] if is_other else own, target, comm)


def test_ignored_rows_only(comm: Any) -> None:
    logits, target = scatter(values(3, VOCABULARY), comm, -1), np.full(3, 7)
    assert np.isnan(vocabulary_cross_entropy(logits, target, comm, ignore_index=7))
    near(vocabulary_cross_entropy(logits, target, comm, ignore_index=7, reduction="none"), np.zeros(3))


@pytest.mark.parametrize("compiled", [False, True])
def test_invalid_arguments_are_refused(comm: Any, compiled: bool) -> None:
    logits = scatter(values(3, VOCABULARY), comm, -1)

    def refused(match: str, target: Any = (0, 1, 2), **options: Any) -> None:
        def loss() -> Any:
            return vocabulary_cross_entropy(logits, np.array(target), comm, **options)

        with pytest.raises((UsageError, tf.errors.OpError), match=match):
            (tf.function(loss) if compiled else loss)()

    refused("token 11, expected 0 to 10", (0, 11, 1))
    refused("token -1", (0, -1, 1))
    refused("together 11, expected vocabulary=12", vocabulary=12)
    refused("probabilities", (0.0, 1.0, 0.0))
    refused("0 to 1", label_smoothing=2)
    refused("reduction is 'all'", reduction="all")
    refused("for a target of shape", ((0, 1),))
    refused("weight has 12 tokens, expected the 11", weight=np.ones(12))
    refused("expected a float for each token", weight=np.ones((11, 1)))


def test_a_padding_target_is_refused(comm: Any) -> None:
    """Keras' loss ignores no class by default. Regression: this one counted -100 as a row with zero loss."""
    with pytest.raises(UsageError, match="a target is token -100"):
        VocabularyCrossEntropy(comm)(np.array([1, -100, 2]), scatter(values(3, VOCABULARY), comm, -1))


def model() -> Any:
    given = keras.Input((5,), dtype="int32")
    x = L.Embedding(VOCABULARY, 6, name="words")(given)
    x = L.Dense(4, name="down")(L.Dense(7, "tanh", name="up")(x))
    return filled(keras.Model(given, L.Dense(VOCABULARY, name="head")(x)))


@pytest.mark.parametrize("ignored", [None, 2])
def test_fit(comm: Any, ignored: int | None) -> None:
    """fit with sample weights has the losses and weights of the plain model."""
    x, y = words(VOCABULARY, 12, 5), words(VOCABULARY, 12, 5, seed=1)
    weights = values(12, 5, seed=2) ** 2
    options = {"batch_size": 5, "epochs": 2, "shuffle": False, "verbose": 0, "sample_weight": weights}
    plain, own = model(), model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored)
    plain.compile(optimizer=keras.optimizers.Adam(0.1), loss=loss)
    expected = plain.fit(x, y, **options).history["loss"]
    plan = {"words": Vocabulary(), "up": Column(), "down": Row(), "head": Vocabulary()}
    parallelize(own, comm, plan)
    divided = VocabularyCrossEntropy(comm, ignore_index=ignored, vocabulary=VOCABULARY)
    own.compile(optimizer=keras.optimizers.Adam(0.1), loss=divided)
    near(own.fit(x, y, **options).history["loss"], expected)
    near(own.evaluate(x, y[..., np.newaxis], verbose=0), plain.evaluate(x, y, verbose=0))
    kernel = own.get_layer("head").kernel
    own_words = slice(*Sharding((VOCABULARY,), 0).spans(comm.rank, comm.size)[0])
    near(kernel, plain.get_layer("head").kernel.numpy()[:, own_words], 1e-9)
