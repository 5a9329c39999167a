"""Keras models with experts, trained over replicas, stages and divided layers, match one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from commlib import Communicator, Mesh
from commlib.errors import UsageError
from commlib.expert import Experts
from commlib_tensorflow import (
    DistributedGradientTape,
    DistributedOptimizer,
    broadcast_variables,
    gather_weights,
    pipeline,
)
from commlib_tensorflow.expert import MoE, expertize, rebalance_experts
from commlib_tensorflow.keras.callbacks import BroadcastGlobalVariablesCallback
from commlib_tensorflow.tensor.state import set_weights

WIDTH, TOLERANCE = 8, 5e-5
PLAN = {"block_*/mlp": Experts(4, top_k=2, hidden=6, balance_weight=0.1)}


def single(comm: Communicator) -> Communicator:
    group = comm.split(comm.rank, name="alone")
    assert group is not None
    return group


class Block(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = keras.layers.LayerNormalization(name="norm")
        self.mlp = keras.Sequential([keras.layers.Dense(12, "gelu"), keras.layers.Dense(WIDTH)], name="mlp")

    def build(self, input_shape: Any) -> None:
        self.norm.build(input_shape)
        self.mlp.build(input_shape)

    def call(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


def model(ranks: Any, plan: Any = PLAN, functional: bool = False) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH), Block(name="block_0"), Block(name="block_1"), keras.layers.Dense(WIDTH)]
    if functional:
        x = inputs = keras.Input((3, WIDTH))
        for layer in layers:
            x = layer(x)
        built = keras.Model(inputs, x)
    else:
        built = keras.Sequential([keras.Input((3, WIDTH)), *layers])
    return built if ranks is None else expertize(built, ranks, plan)


def batch(rows: int, seed: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    return tuple(draw.normal(size=(rows, 3, WIDTH)).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)


def fit(built: Any, optimizer: Any, batches: Any) -> list[float]:
    built.compile(optimizer, "mse")
    return [float(built.train_on_batch(x, y)) for x, y in batches]


def own(each: Any, comm: Communicator) -> Any:
    return np.split(each, comm.size)[comm.rank]


def compare(comm: Communicator, built: Any, whole: Any) -> None:
    for got, expected, variable in zip(gather_weights(built), whole.get_weights(), whole.weights, strict=True):
        if variable.dtype == "float32":
            np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=variable.path)


@pytest.mark.parametrize(("functional", "copies"), [(True, True), (False, False), (True, False), (False, True)])
def test_fit_matches_one_process(comm: Communicator, functional: bool, copies: bool) -> None:
    """Experts, or copies of all of them, train in the loop that Keras compiles."""
    if comm.size == 3:
        pytest.skip("4 experts")
    ep = 1 if copies else min(comm.size, 2)
    mesh = Mesh(dp=-1).refactor({"dp": {"edp": -1, "ep": ep}})
    rows = 2 * comm.size
    batches = [batch(rows, number) for number in range(3)]
    whole = model(single(comm), functional=functional)
    expected = fit(whole, sgd(), batches)
    built = model(mesh, functional=functional)
    assert isinstance(built.get_layer("block_0").mlp, MoE)
    losses = fit(built, DistributedOptimizer(sgd(), mesh=mesh), [[own(each, comm) for each in one] for one in batches])
    mean = comm.all_reduce(np.array(losses), "mean")
    np.testing.assert_allclose(mean, expected, rtol=1e-4)
    compare(comm, built, whole)
    again = model(mesh, functional=functional)
    set_weights(again, gather_weights(built))
    compare(comm, again, whole)
    mesh.close()


def test_tape(comm: Communicator) -> None:
    if comm.size == 3:
        pytest.skip("4 experts")
    built, whole = model(comm), model(single(comm))
    x, y = batch(2 * comm.size, 0)

    def gradients(tape: Any, model: Any, x: Any, y: Any) -> Any:
        with tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2) + tf.add_n(model.losses)
        return tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    for variable, gradient in zip(built.trainable_variables, [None] * len(built.trainable_variables), strict=True):
        assert gradient is None
        assert variable.trainable
    expected = gradients(tf.GradientTape(), whole, x, y)
    tape = DistributedGradientTape(tf.GradientTape())
    with tape:
        loss = tf.reduce_mean((built(own(x, comm), training=True) - own(y, comm)) ** 2) + tf.add_n(built.losses)
    got = tape.gradient(loss, built.trainable_variables)
    from commlib_tensorflow._shards import shard_of

    for variable, one, other in zip(built.trainable_variables, got, expected, strict=True):
        shard = shard_of(variable)
        other = other.numpy() if shard is None else shard.own(other.numpy())
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, err_msg=variable.path)


def test_copies_compute_what_the_dense_model_did(comm: Communicator) -> None:
    plain = model(None)
    built = model(comm, {"block_*/mlp": Experts(2 * comm.size, top_k=2, copy=True)})
    x, _ = batch(2, comm.rank)
    np.testing.assert_allclose(built(x), plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("gated", [False, True])
def test_divided_experts(comm: Communicator, gated: bool) -> None:
    """Experts are divided along one axis; the ranks along another, which have the same tokens, divide each expert."""
    if comm.size == 3:
        pytest.skip("4 experts")
    plan = {"block_*/mlp": Experts(4, top_k=2, hidden=7, gated=gated, activation="silu", shared=1)}
    mesh = Mesh(dp=-1, tp=2)
    dp = mesh["dp"]
    batches = [batch(2 * dp.size, number) for number in range(2)]
    whole = model(single(comm), plan)
    fit(whole, sgd(), batches)
    built = model(mesh, plan)
    fit(built, DistributedOptimizer(sgd(), mesh=mesh), [[own(each, dp) for each in one] for one in batches])
    compare(comm, built, whole)
    mesh.close()


def test_invalid_arguments_are_refused(comm: Communicator) -> None:
    plain = model(None)
    with pytest.raises(UsageError, match=r"no layer is called 'block_\*/mpl'"):
        expertize(plain, comm, {"block_*/mpl": Experts(4)})
    with pytest.raises(UsageError, match="expected an MLP"):
        expertize(plain, comm, {"block_*/norm": Experts(4)})
    with pytest.raises(UsageError, match="copy=True or hidden="):
        expertize(plain, comm, {"block_*/mlp": Experts(4, copy=True, hidden=3)})
    assert plain.layers[1].mlp.built


@pytest.mark.long  # in the usual run test_moe_again.py and test_moe_accumulation.py have stages
@pytest.mark.ranks(min=2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_stages(comm: Communicator, schedule: Any) -> None:
    """Router losses do not depend on the number of stages and microbatches."""
    if comm.size == 3:
        pytest.skip("4 experts")
    mesh = Mesh(pp=2, dp=comm.size // 2)
    dp = mesh["dp"]
    rows = 5 * dp.size
    batches = [batch(rows, number) for number in range(2)]
    whole = model(single(comm), functional=True)
    expected = fit(whole, sgd(), batches)
    pipe = pipeline(model(mesh, functional=True), mesh["pp"], schedule=schedule, microbatches=4)
    pipe.compile(DistributedOptimizer(sgd(), mesh=mesh), "mse")
    x, y = (np.concatenate([own(one[at], dp) for one in batches]) for at in (0, 1))
    history = pipe.fit(x, y, batch_size=5, shuffle=False, verbose=0).history
    loss = comm.all_reduce(np.array(history["loss"]), "mean")
    np.testing.assert_allclose(loss, [np.mean(expected)], rtol=1e-4)
    for got, wanted, variable in zip(pipe.gather_weights(), whole.get_weights(), whole.weights, strict=True):
        if variable.dtype == "float32":
            np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE, err_msg=variable.path)
    pipe.close()
    mesh.close()


@pytest.mark.ranks(min=2)
def test_training_continues_after_experts_move(comm: Communicator) -> None:
    """Weights and moments move with them, and the compiled loop finds their new places."""
    plan = {"block_*/mlp": Experts(2 * comm.size, top_k=2, hidden=6)}
    rows = 2 * comm.size
    batches = [batch(rows, number) for number in range(4)]
    whole = model(single(comm), plan)
    fit(whole, sgd(), batches)
    built, optimizer = model(comm, plan), DistributedOptimizer(sgd())
    built.compile(optimizer, "mse")
    for number, (x, y) in enumerate(batches):
        if number == 2:
            for block in ("block_0", "block_1"):
                mixture = built.get_layer(block).mlp.mixture
                mixture.stats()
                mixture.counted.numbers[:] = [90, 80, *range(2 * comm.size - 2), 300, 0, 0]
            rebalance_experts(built, optimizer)
            assert mixture.placement.owners[0] != mixture.placement.owners[1]
        built.train_on_batch(own(x, comm), own(y, comm))
    compare(comm, built, whole)


@pytest.mark.ranks(min=2)
def test_a_broadcast_does_not_change_experts(comm: Communicator) -> None:
    """Ranks have different experts: those of the root, and their moments, must not replace them."""
    built = model(comm, {"block_*/mlp": Experts(2 * comm.size, hidden=4)})
    built.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)  # to create its moments
    built.train_on_batch(*batch(2, comm.rank))
    built.layers[0].kernel.assign_add(np.full((WIDTH, WIDTH), comm.rank, np.float32))
    layer = built.get_layer("block_0").mlp
    moments = [each for each in built.optimizer.variables if each.shape == layer.stacks[0].shape]
    before = [each.numpy() for each in (*layer.stacks, *moments)]
    assert len(moments) >= 4
    broadcast_variables(built.variables, root_rank=0)
    callback = BroadcastGlobalVariablesCallback(0)
    callback.set_model(built)
    callback.on_train_batch_end(0)
    for each, value in zip((*layer.stacks, *moments), before, strict=True):
        np.testing.assert_array_equal(each, value)
    for each in (
        built.layers[0].kernel,
        *built.optimizer.variables[2:4],
    ):  # after steps and rate: moments of the kernel
        text = comm.all_gather_object(each.numpy().tolist())
        assert all(one == text[0] for one in text)


def test_files_and_second_gradients_are_refused(comm: Communicator, tmp_path: Path) -> None:
    """A file would have one rank's experts; a second gradient would lack the path through experts."""
    built = model(comm)
    if comm.size in (2, 4):
        with pytest.raises(UsageError, match="has a shard of this model"):
            built.save_weights(tmp_path / "own.weights.h5")
    if comm.size == 3:
        return
    x = tf.constant(batch(2, 0)[0])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(built(x) ** 2)
        total = tf.reduce_sum(tape.gradient(y, x) ** 2)
    with pytest.raises(UsageError, match="no gradients of gradients"):
        outer.gradient(total, x)


def test_a_whole_file_is_read(comm: Communicator, tmp_path: Path) -> None:
    """It was written by a single process: each rank takes its experts."""
    if comm.size == 3:
        pytest.skip("4 experts")
    whole = model(single(comm))
    path = comm.broadcast_object(str(tmp_path / "whole.weights.h5"))
    if comm.rank == 0:
        whole.save_weights(path)
    comm.barrier()
    built = model(comm)
    for variable in built.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    built.load_weights(path)
    compare(comm, built, whole)


def test_floatx_of_float64(comm: Communicator) -> None:
    """Regression: the router's float32 loss met float64 losses, which Keras does not add: `fit` raised TypeError."""
    x = np.random.default_rng(comm.rank).standard_normal((4, WIDTH))
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        inputs = keras.Input((WIDTH,))
        experts = Experts(2 * comm.size, hidden=6, balance_weight=0.1)
        built = keras.Model(inputs, keras.layers.Dense(1)(MoE(experts, Mesh(dp=-1))(inputs)))
        built.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
        out = built(x, training=True).numpy()
        expected = np.mean((out - x[:, :1]) ** 2) + sum(float(loss) for loss in built.losses)
        result = built.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0).history["loss"][0]
    finally:
        keras.config.set_floatx(before)
    assert abs(result - expected) < 1e-6
