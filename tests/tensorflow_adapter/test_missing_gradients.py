"""Missing gradients count as zeros if another rank has them, as in one process; without any they stay None."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import commlib_tensorflow as hvd
from commlib.errors import MismatchError, UsageError
from commlib_tensorflow.optimizer import DistributedOptimizer

from .keras_oracle import assert_close, assert_same_everywhere, state_of, weights

pytestmark = [pytest.mark.ranks(min=2), pytest.mark.filterwarnings("ignore:Gradients do not exist")]

MAKERS: dict[str, Any] = {
    "decay": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1),
    "clip": lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
    "state": lambda: keras.optimizers.Nadam(0.05, use_ema=True, ema_overwrite_frequency=2),
    "passes": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
    "scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0),
}


def gradients(rank: int, step: int) -> list[Any]:
    """Gradients of four variables: on all ranks, on rank 0, on no rank, and on every second rank in turn."""
    created = [tf.constant(np.random.default_rng([rank, step, place]).normal(size=3)) for place in range(4)]
    return [created[0], created[1] if rank == 0 else None, None, created[3] if (rank + step) % 2 else None]


def whole(ranks: int, step: int) -> list[Any]:
    """Return the means over all ranks, as in one process."""
    everyone = zip(*(gradients(rank, step) for rank in range(ranks)), strict=True)
    there = ([one for one in theirs if one is not None] for theirs in everyone)
    return [sum(theirs) / ranks if theirs else None for theirs in there]


def variables() -> list[Any]:
    return [keras.Variable(np.arange(3.0) + 1, dtype="float64") for _ in range(4)]


@pytest.mark.parametrize(
    ("kind", "graph"),
    [
        ("decay", False),
        *((kind, True) for kind in MAKERS),
        ("passes", False),
        ("scale", False),
    ],
)
def test_weights_match_one_process(comm: Any, kind: str, graph: bool) -> None:
    """Regression: MismatchError. Each rank lacks different gradients, in a graph by the traced path."""
    mine, alone = variables(), variables()
    traced: dict[Any, Any] = {}
    distributed, plain = MAKERS[kind](), MAKERS[kind]()
    DistributedOptimizer(distributed)
    distributed.build(mine)

    def applying(missing: tuple[bool, ...]) -> Any:
        given = lambda those: [None if lacks else one for one, lacks in zip(those, missing, strict=True)]  # noqa: E731
        return tf.function(lambda those: distributed.apply(given(those), mine), autograph=False)

    for step in range(4):
        own = [None if one is None else one * (4.0 if kind == "scale" else 1.0) for one in gradients(comm.rank, step)]
        if graph:
            missing = tuple(one is None for one in own)
            apply = traced.setdefault(missing, applying(missing))
            apply([tf.zeros(3, tf.float64) if one is None else one for one in own])
        else:
            distributed.apply(own, mine)
        plain.apply(
            [None if one is None else one * (4.0 if kind == "scale" else 1.0) for one in whole(comm.size, step)], alone
        )
    assert_close([one.numpy() for one in mine], [one.numpy() for one in alone])
    assert_close(state_of(distributed), state_of(plain), 1e-10)
    assert (mine[2].numpy() == np.arange(3.0) + 1).all() and (mine[1].numpy() != np.arange(3.0) + 1).all()


@pytest.mark.parametrize("eagerly", [False, True])
def test_fit_a_model_with_different_branches_on_ranks(comm: Any, eagerly: bool) -> None:
    class Branches(keras.Model):  # type: ignore[misc]
        def __init__(self, way: int | None) -> None:
            super().__init__()
            self.ways = [keras.layers.Dense(2, kernel_initializer="ones", dtype="float64") for _ in range(2)]
            self.way = way

        def build(self, shape: Any) -> None:
            for layer in self.ways:
                layer.build(shape)

        def call(self, x: Any) -> Any:
            if self.way is not None:
                return self.ways[self.way](x)
            parts = tf.split(x, comm.size)
            return tf.concat([self.ways[min(rank, 1)](part) for rank, part in enumerate(parts)], 0)

    x = np.random.default_rng(0).normal(size=(4 * comm.size, 3))
    mse = keras.losses.MeanSquaredError(dtype="float64")  # the function computes in float32, in which a third differs
    model, alone = Branches(min(comm.rank, 1)), Branches(None)
    for one, data, optimizer in (
        (model, x[4 * comm.rank : 4 * comm.rank + 4], DistributedOptimizer(MAKERS["decay"]())),
        (alone, x, MAKERS["decay"]()),
    ):
        one.compile(optimizer, mse, run_eagerly=eagerly)
        one.fit(data, data[:, :2], batch_size=len(data), epochs=3, shuffle=False, verbose=0)
    assert_close(model, alone)
    assert_same_everywhere(model)
    assert all((weight != first).all() for weight, first in zip(weights(model), [1, 0, 1, 0], strict=True))


def test_a_rank_without_any_gradient_takes_part(comm: Any) -> None:
    for graph in (False, True):
        (variable,) = [keras.Variable(np.ones(3), dtype="float64")]
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), name=f"none {graph}")
        optimizer.build([variable])
        apply = lambda: optimizer.apply([tf.ones(3, tf.float64) if comm.rank == 0 else None], [variable])  # noqa: B023, E731
        (tf.function(apply, autograph=False) if graph else apply)()
        np.testing.assert_allclose(variable.numpy(), 1 - 1 / comm.size)


def test_an_omitted_variable_does_not_count_as_zeros(comm: Any) -> None:
    """Ranks that update different parts of a model at the same time are out of step."""
    first, second = [keras.Variable(np.ones(2)), keras.Variable(np.ones(2))]
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([first, second])
    with pytest.raises(MismatchError, match=r"variable [01] is None on ranks"):
        optimizer.apply([tf.ones(2)], [first if comm.rank == 0 else second])


@pytest.mark.parametrize("graph", [False, True])
def test_sparse_gradients_must_exist_or_be_dense(comm: Any, graph: bool) -> None:
    """Regression: ranks diverged: a rank without the gradient was not updated."""
    rows = lambda: tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([3, 2]))  # noqa: E731
    tables = [keras.Variable(np.ones((3, 2))) for _ in range(2)]

    def step(optimizer: Any, given: Any) -> None:
        run = lambda: optimizer.apply([given(), tf.ones((3, 2))], tables)  # noqa: E731
        (tf.function(run, autograph=False) if graph else run)()

    sparse = DistributedOptimizer(keras.optimizers.SGD(1.0))
    sparse.build(tables)
    step(sparse, rows)
    lacking = rows if comm.rank == 0 else lambda: None
    with pytest.raises(MismatchError, match=r"variable 0 is None on ranks \[1.*sparse_as_dense=True"):
        step(sparse, lacking)
    dense = DistributedOptimizer(keras.optimizers.SGD(1.0), sparse_as_dense=True, name="dense")
    dense.build(tables)
    before = tables[0].numpy()
    step(dense, lacking)
    np.testing.assert_allclose(tables[0].numpy() - before, [[0, 0], [-1 / comm.size] * 2, [0, 0]], rtol=1e-6)


def test_keras_2_and_tapes_in_a_graph_give_advice(comm: Any) -> None:
    variable, other = tf.Variable(tf.ones(2)), tf.Variable(tf.ones(2))
    given = lambda: [tf.ones(2), tf.ones(2) if comm.rank == 0 else None]  # noqa: E731
    optimizer = DistributedOptimizer(tf_keras.optimizers.SGD(1.0))
    optimizer.apply_gradients(zip(given(), [variable, other], strict=True))
    np.testing.assert_allclose(other.numpy(), 1 - 1 / comm.size)

    def taped() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable * other if comm.rank == 0 else variable)
        return tape.gradient(loss, [variable, other])

    assert taped()[1] is not None
    with pytest.raises((MismatchError, tf.errors.OpError, UsageError), match=r"None on ranks \[1.*zeros"):
        tf.function(taped, autograph=False)()
