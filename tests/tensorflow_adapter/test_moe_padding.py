"""Padding is not sent, whatever its values; router losses cover all rows, however ranks divide them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator
from commlib.errors import MismatchError, UsageError
from commlib.expert import Experts
from commlib_tensorflow.expert import MoE

WIDTH = 6
LENGTHS = (5, 2, 0, 4, 3, 5, 2, 4)


def build_model(comm: Communicator, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    layer = MoE(Experts(4, **{"hidden": 4, "top_k": 2, **options}), comm, name="mixture")
    layer.build((None, 5, WIDTH))
    return layer


def batch(comm: Communicator) -> tuple[Any, Any, slice]:
    """Return the rows of all ranks, a mask without padding, and this rank's rows."""
    count = 2 * comm.size
    x = np.random.default_rng(0).normal(size=(count, 5, WIDTH)).astype(np.float32)
    return x, np.arange(5) < np.array(LENGTHS)[:count, None], slice(2 * comm.rank, 2 * comm.rank + 2)


def gradients(layer: Any, x: Any, mask: Any) -> list[Any]:
    """Return the outputs, and the gradients of inputs and weights."""
    given = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(given)
        y = layer(given, training=True, mask=mask)
        loss = tf.reduce_sum(tf.where(mask[..., None], y, 0.0) ** 2) + tf.add_n(layer.losses)
    return [y, *tape.gradient(loss, [given, *(variable.value for variable in layer.trainable_variables)])]


def test_padding_gives_zeros(comm: Communicator) -> None:
    """Regression: shared experts computed an output for it, and its NaN reached the router's gradient."""
    x, mask, own = batch(comm)
    layer, results = build_model(comm, shared=1, z_weight=0.1), []
    for padding in (0.0, 7.0, np.nan):
        results.append(gradients(layer, np.where(mask[..., None], x, padding)[own].astype(np.float32), mask[own]))
    for zeros, *others in zip(*results, strict=True):
        for other in others:
            np.testing.assert_array_equal(other, zeros)
    y, of_x, *_ = results[0]
    assert not np.any(y.numpy()[~mask[own]]) and not np.any(of_x.numpy()[~mask[own]])
    assert np.all(np.any(y.numpy()[mask[own]], -1))


def test_masks_of_keras(comm: Communicator) -> None:
    """An Embedding creates the mask in a compiled model."""
    keras.utils.set_random_seed(1)
    given = keras.Input((5,), dtype="int32")
    layer: Any = MoE(Experts(4, hidden=4, shared=1), comm)
    model = keras.Model(given, layer(keras.layers.Embedding(9, WIDTH, mask_zero=True)(given)))
    _, mask, own = batch(comm)
    words = np.where(mask[own], 1 + np.arange(5), 0)
    y = model.predict_on_batch(words)
    assert not np.any(y[words == 0]) and np.all(np.any(y[words != 0], -1))
    assert layer.stats().tokens == mask.sum()


def test_a_mask_of_another_shape_is_refused(comm: Communicator) -> None:
    """Regression: a mask with as many elements was accepted."""
    x, mask, own = batch(comm)
    with pytest.raises(UsageError, match=r"a mask \[5, 2\] for inputs \[2, 5, 6\], expected \[2, 5\]"):
        build_model(comm)(x[own], mask=mask[own].T)


def losses(layer: Any, x: Any, mask: Any, sequences: bool) -> tuple[float, float]:
    """Return the balance loss and z-loss of rows by the documented formula, computed by numpy."""
    logits = x.astype(np.float64) @ layer.router.numpy().T.astype(np.float64)
    exp = np.exp(logits)
    shares, z = exp / exp.sum(-1, keepdims=True), np.log(exp.sum(-1)) ** 2
    chosen = np.argsort(np.argsort(-logits, -1), -1) < 2
    if not sequences:
        logits, shares, chosen, z, mask = (one[None] for one in (logits, shares, chosen, z, mask))
    results = []
    for p, c, own_z, here in zip(shares, chosen, z, mask, strict=True):
        if here.any():
            results.append((4 / 2 * (c[here].mean(0) * p[here].mean(0)).sum(), own_z[here].mean()))
        else:
            results.append((0.0, 0.0))
    return tuple(np.mean(results, 0))


@pytest.mark.parametrize("dimensions", [2, 3])
def test_router_losses_cover_all_rows(comm: Communicator, dimensions: int) -> None:
    """Regression: a sequence was weighted by its share of the rank's tokens; rows without sequences were one."""
    x, mask, own = batch(comm)
    expected = losses(build_model(comm), *((x, mask, True) if dimensions == 3 else (x[:, 0], mask[:, 0], False)))
    layer = build_model(comm, balance_weight=1.0, z_weight=10.0)
    x, mask = (x[own], mask[own]) if dimensions == 3 else (x[own, 0], mask[own, 0])
    layer(x, training=True, mask=mask)
    mean = comm.all_reduce(np.array([float(layer.losses[0])]), "mean")
    np.testing.assert_allclose(mean, expected[0] + 10 * expected[1], rtol=1e-5)


@pytest.mark.ranks(min=2)
def test_rows_with_different_dimensions_on_ranks(comm: Communicator) -> None:
    """Only ranks with rows that are no sequences communicate about their loss."""
    x, _, own = batch(comm)
    with pytest.raises(MismatchError, match="sequences: "):
        build_model(comm)(x[own, 0] if comm.rank else x[own], training=True)


@pytest.mark.parametrize("policy", ["bfloat16", "float16", "float64", "mixed_bfloat16"])
def test_updates_of_a_bias_are_not_rounded(comm: Communicator, policy: str) -> None:
    """Regression: half precision rounded small steps of a large bias; a kernel refused pure half policies."""
    layer: Any = MoE(Experts(4, hidden=4, bias_rate=0.001, balance="none"), comm, dtype=policy)
    layer.build((None, 5, WIDTH))
    layer.expert_bias.assign(np.ones(4))
    optimizer = keras.optimizers.SGD(0.0)
    x, _, own = batch(comm)
    given = tf.cast(x[own], layer.compute_dtype)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(given, training=True))
    optimizer.apply_gradients([(tape.gradient(loss, layer.router.value), layer.router)])
    load = np.array(layer.stats().load)
    np.testing.assert_allclose(layer.expert_bias, 1 + 0.001 * np.sign(np.round(load.mean() - load, 9)), rtol=1e-6)
