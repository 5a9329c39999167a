"""A mixture of experts over several ranks matches the same layer on one rank that has all tokens."""

from __future__ import annotations

import random
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator
from commlib.errors import PeerError
from commlib.expert import Experts
from commlib_tensorflow._shards import shard_of
from commlib_tensorflow.expert import MoE, expert_stats

WIDTH = 12
TOLERANCE = 2e-5
"""Gates are float32, and made of products of another number of rows: some roundings of 6e-8, summed over tokens."""


def single(comm: Communicator) -> Communicator:
    group = comm.split(comm.rank, name="alone")
    assert group is not None
    return group


def tokens(comm: Communicator, rows: list[int] | None) -> list[Any]:
    draw = np.random.default_rng(0)
    counts = list(rows or [3] * comm.size)[: comm.size]
    return [draw.normal(size=(count, 5, WIDTH)).astype(np.float32) for count in counts]


def build_model(options: Any, ranks: Any, **kwargs: Any) -> Any:
    random.seed(1)
    layer = MoE(options, ranks, name="mixture", **kwargs)
    layer.build((None, 5, WIDTH))
    return layer


def step(layer: Any, x: Any, auxiliary: float, compiled: bool) -> tuple[Any, Any, Any, list[Any]]:
    """Return the outputs, the auxiliary loss, and the gradients of inputs and weights."""

    def run(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.add_n(layer.losses) if layer.losses else tf.constant(0.0)
            total = tf.cast(tf.reduce_sum(y * tf.sin(3 * x)), tf.float32) + auxiliary * loss
        weights = [variable.value for variable in layer.trainable_variables]
        of_x, *of_weights = tape.gradient(total, [x, *weights])
        return y, loss, of_x, of_weights

    result: tuple[Any, Any, Any, list[Any]] = (tf.function(run) if compiled else run)(tf.constant(x))
    return result


def near(got: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def check(
    comm: Communicator, options: Any, rows: list[int] | None = None, compiled: bool = True, **kwargs: Any
) -> None:
    xs = tokens(comm, rows)
    layer, whole = build_model(options, comm, **kwargs), build_model(options, single(comm), **kwargs)
    y, loss, of_x, of_weights = step(layer, xs[comm.rank], 1.0, compiled)
    # The loss of one process is a mean over all tokens; those of ranks are means over their own, summed here.
    expected, whole_loss, of_all, of_all_weights = step(whole, np.concatenate(xs), float(comm.size), compiled)
    first = sum(len(x) for x in xs[: comm.rank])
    mine = slice(first, first + len(xs[comm.rank]))
    near(y, expected[mine], "outputs")
    if rows is None:
        near(comm.all_reduce(np.array([float(loss)]), "mean"), [float(whole_loss)], "auxiliary loss")
    near(of_x, of_all[mine], "gradient of the inputs")
    for variable, got, of_variable in zip(layer.trainable_variables, of_weights, of_all_weights, strict=True):
        shard = shard_of(variable)
        if shard is None:
            near(comm.all_reduce(got.numpy()), of_variable, variable.path)
        else:
            near(got, shard.own(of_variable.numpy()), variable.path)


OPTIONS: dict[str, Any] = {
    "top-1": {"top_k": 1},
    "top-2": {"top_k": 2},
    "gated": {"top_k": 3, "gated": True, "activation": "silu", "bias": False, "scores": "sigmoid"},
    "shared": {"top_k": 1, "shared": 2, "z_weight": 0.1},
    "global": {"top_k": 2, "balance": "global"},
    "capacity": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "capacity_over": "all"},
    "probable": {"top_k": 2, "capacity_factor": 0.5, "min_capacity": 1, "capacity_over": "all", "drop": "probability"},
    "parts": {"top_k": 2, "chunks": 3},
    "expert choice": {"top_k": 2, "choice": "expert", "capacity_over": "all", "balance": "none"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_one_rank(comm: Communicator, name: str) -> None:
    check(comm, Experts(6, hidden=10, **OPTIONS[name]))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_ranks_may_have_different_numbers_of_tokens(comm: Communicator, compiled: bool, chunks: int) -> None:
    """A rank without tokens still takes part, eagerly and in a graph."""
    options = Experts(6, hidden=10, balance="none", chunks=chunks)
    check(comm, options, rows=[4, 0, 1, 2], compiled=compiled)


def own() -> Any:
    return keras.Sequential(
        [keras.layers.LayerNormalization(), keras.layers.Dense(7, "tanh"), keras.layers.Dense(WIDTH)]
    )


def test_any_layer(comm: Communicator) -> None:
    check(comm, Experts(6, top_k=2), expert=own)


def pooling() -> Any:
    layers = keras.layers
    into = [layers.Dense(16), layers.Reshape((4, 4, 1)), layers.MaxPooling2D(2), layers.Conv2D(2, 2, padding="same")]
    return keras.Sequential([*into, layers.Flatten(), layers.Dense(WIDTH)])


def test_experts_that_reject_empty_batches(comm: Communicator) -> None:
    """Regression: without rows a convolution returned another shape, and pooling aborted the process in backward."""
    check(comm, Experts(8, top_k=1, balance="none"), rows=[1, 0, 1, 0], expert=pooling)


class Raises(keras.layers.Layer):  # type: ignore[misc]
    on = -1
    """The rank on which it does."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm, self.inner = comm, keras.layers.Dense(WIDTH)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        if Raises.on == self.comm.rank:
            raise ArithmeticError("no memory")
        return self.inner(x)


def test_an_error_of_an_expert_reaches_all_ranks(comm: Communicator) -> None:
    """Regression: the others waited. Now all continue with the next call."""
    model = [MoE(Experts(2 * comm.size), comm, expert=lambda: Raises(comm), name=f"mixture_{n}") for n in range(2)]
    x = tf.ones((3, WIDTH))
    before = model[1](model[0](x))
    for rank in range(2 if comm.size > 1 else 0):
        Raises.on = rank
        with pytest.raises(ArithmeticError if comm.rank == rank else PeerError) as caught:
            model[0](x)
        if comm.rank != rank:
            text = f"mixture_0: experts of rank {rank} of .* raised ArithmeticError: .*no memory"
            assert re.search(text, str(caught.value), re.DOTALL)
        Raises.on = -1
        near(model[1](model[0](x)), before, "outputs")


@pytest.mark.parametrize("compiled", [False, True])
def test_balance_without_a_loss(comm: Communicator, compiled: bool) -> None:
    """After each step the bias for choosing experts moves towards even load, identically on all ranks."""
    keras.utils.set_random_seed(0)
    layer: Any = MoE(Experts(6, top_k=1, hidden=4, balance="none", bias_rate=0.05), comm, name="one")
    model = keras.Sequential([keras.Input((5, WIDTH)), layer])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=not compiled)
    x = tokens(comm, None)[comm.rank]
    layer.router.assign_add(np.eye(6, 1, dtype=np.float32) * x.mean((0, 1)))  # many tokens prefer this one
    loads = []
    for _ in range(60 if compiled else 3):
        before = layer.expert_bias.numpy()
        model.train_on_batch(x, x)
        load = np.array(layer.stats().load)
        expected = before + 0.05 * np.sign(np.round(load.mean() - load, 9))
        near(layer.expert_bias, expected, "bias")
        loads.append(load.max() / load.mean())
    if compiled:
        assert np.mean(loads[-20:]) < np.mean(loads[:5])
    assert expert_stats(model)["one"].tokens == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_balance_covers_several_passes(comm: Communicator, compiled: bool) -> None:
    """Regression: a compiled step of two passes used the load before the second one, which was counted in the next."""
    keras.utils.set_random_seed(0)
    layer: Any = MoE(Experts(6, top_k=1, hidden=4, balance="none", bias_rate=0.05), comm, name="one")
    model = keras.Sequential([keras.Input((5, WIDTH)), layer])
    optimizer = keras.optimizers.SGD(0.0, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse", run_eagerly=not compiled)
    draw = np.random.default_rng(comm.rank)
    for _ in range(3):
        before = layer.expert_bias.numpy()
        for number in range(2):
            near(layer.expert_bias, before, f"bias before pass {number}")
            x = draw.normal(size=(3, 5, WIDTH)) + 3 * draw.normal(size=WIDTH)  # each pass prefers a different one
            model.train_on_batch(x, x)
        load = np.array(layer.stats().load)
        near(layer.expert_bias, before + 0.05 * np.sign(np.round(load.mean() - load, 9)), "bias")


def test_masked_tokens_are_not_sent(comm: Communicator) -> None:
    layer = build_model(Experts(6, hidden=4), comm)
    x = tf.constant(tokens(comm, None)[comm.rank])
    mask = tf.sequence_mask([3] * 3, 5)
    y = layer(x, training=True, mask=mask)
    loss = float(layer.losses[0])
    assert not np.any(y[:, 3:])
    near(y[:, :3], layer(x[:, :3], training=True), "outputs")
    near(loss, layer.losses[0], "loss")
    assert layer.stats().tokens == 2 * 9 * comm.size


@pytest.mark.usefixtures("mixed_float16")
def test_mixed_precision(comm: Communicator) -> None:
    """The router always computes in float32."""
    layer = build_model(Experts(6, hidden=16, gated=True, activation="silu"), comm)
    y, _, of_x, of_weights = step(layer, tokens(comm, None)[comm.rank].astype(np.float16), 1.0, True)
    assert y.dtype == of_x.dtype == tf.float16
    assert {gradient.dtype for gradient in of_weights} == {tf.float32}
    keras.config.set_dtype_policy("float32")
    expected, *_ = step(
        build_model(Experts(6, hidden=16, gated=True, activation="silu"), comm),
        tokens(comm, None)[comm.rank],
        1.0,
        True,
    )
    np.testing.assert_allclose(y, expected, rtol=0.05, atol=0.02)
