"""A model that is called with each rank's part of a sequence: what it does along that before any divided layer.

One process is the oracle: another model with the same weights, called with the whole.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import ops

import commlib
from commlib.errors import UsageError
from commlib.tensor_parallel import Column, Plan, Row, Sequence
from commlib_tensorflow.tensor import parallelize, scatter
from commlib_tensorflow.tensor.sequences import shard_sequence
from tests.inputs.keras_pipelines import filled
from tests.tensorflow_adapter.tensor_oracle import in_float64, near, values

__all__ = ["in_float64"]

L = keras.layers
PLAN: Plan = {"up": Column(sequence=1), "down": Row(sequence=1)}
Before = Callable[[Any, Any], Any]

pytestmark = pytest.mark.ranks(min=2)


class Block(keras.Model):  # type: ignore[misc]
    def __init__(self, before: Before) -> None:
        super().__init__()
        self.before, self.norm = before, L.LayerNormalization(name="norm")
        self.up, self.down = L.Dense(16, "gelu", name="up"), L.Dense(8, name="down")
        self.scale = self.add_weight(shape=(8,), name="scale")

    def call(self, x: Any, other: Any = None) -> Any:
        if not self.built:
            self.norm(x)
        x = self.before(self, x) if other is None else x * ops.tanh(other)
        return x + self.down(self.up(x))


def made(before: Before, x: Any) -> Any:
    model = Block(before)
    model(x)
    return filled(model)


def functional(before: Before) -> Any:
    given = keras.Input((None, 8))
    x = before(None, given)
    return filled(keras.Model(given, x + L.Dense(8, name="down")(L.Dense(16, "gelu", name="up")(x))))


def shifted(m: Any, x: Any) -> Any:
    return x + tf.pad(x, [[0, 0], [1, 0], [0, 0]])[:, :-1]


def swapped(m: Any, x: Any) -> Any:
    return ops.concatenate(ops.split(x, 2, 1)[::-1], 1)


WRONG: dict[str, Before] = {
    "a mean": lambda m, x: x - ops.mean(x, 1, keepdims=True),
    "softmax": lambda m, x: ops.softmax(x, 1),
    "a running sum": lambda m, x: ops.cumsum(x, 1),
    "a shift": shifted,
    "the first": lambda m, x: x + x[:, :1],
    "halves": swapped,
    "attention": lambda m, x: ops.matmul(ops.softmax(ops.matmul(x, ops.swapaxes(x, 1, 2))), x),
    "pooled": lambda m, x: ops.average_pool(x, 3, 1, "same"),
    "positions": lambda m, x: x + ops.sin(ops.cast(ops.arange(x.shape[1]), x.dtype))[:, None],
    "the length": lambda m, x: x / x.shape[1],
    "the length of tensors": lambda m, x: x / tf.cast(tf.shape(x)[1], x.dtype),
    "a norm that is whole": lambda m, x: m.norm(x),
    "a weight": lambda m, x: x * m.scale,
    "one after another": lambda m, x: tf.stack(
        [tf.add_n(tf.unstack(x, axis=1)[: at + 1]) for at in range(x.shape[1])], 1
    ),
}
RIGHT: dict[str, Before] = {
    "nothing": lambda m, x: x,
    "one element at a time": lambda m, x: ops.tanh(x) * 2 - 1,
    "features": lambda m, x: x * ops.mean(x, -1, keepdims=True),
    "transposed": lambda m, x: ops.transpose(ops.softmax(ops.transpose(x, (1, 0, 2))), (1, 0, 2)),
    "heads": lambda m, x: ops.reshape(ops.softmax(ops.reshape(x, (2, -1, 2, 4))), (2, -1, 8)),
    "as rows": lambda m, x: ops.reshape(ops.tanh(ops.reshape(x, (-1, 8))), ops.shape(x)),
    "split and joined": lambda m, x: tf.stack([ops.tanh(one) for one in tf.unstack(x, axis=1)], 1),
}
FUNCTIONAL = {
    "a mean": WRONG["a mean"],
    "an average": lambda m, x: x + L.GlobalAveragePooling1D(keepdims=True)(x),
    "softmax": lambda m, x: L.Softmax(axis=1)(x),
    "attention": lambda m, x: L.Attention()([x, x]),
    "pooled": lambda m, x: L.AveragePooling1D(3, 1, "same")(x),
}
SOME = ("a mean", "softmax", "halves", "the length", "positions", "nothing", "features", "split and joined")


def some(cases: Any) -> Any:
    return [name if name in SOME else pytest.param(name, marks=pytest.mark.long) for name in cases]


def whole(comm: Any) -> Any:
    return tf.constant(values(2, 4 * comm.size, 8))


@pytest.mark.parametrize("name", some(WRONG))
def test_what_needs_the_whole_sequence_is_refused(comm: Any, name: str) -> None:
    x = whole(comm)
    divided = parallelize(made(WRONG[name], x), comm, PLAN)
    with pytest.raises(
        UsageError, match=r"plan: .*(by the caller|differs from the unsharded|gathers a sequence takes)"
    ):
        divided(scatter(x, comm, 1))


@pytest.mark.parametrize("name", some(FUNCTIONAL))
def test_so_it_is_of_functional_models(comm: Any, name: str) -> None:
    """These are checked when they are divided, or when they are called, with any numbers."""
    with pytest.raises(UsageError, match=r"plan: .*(by the caller|differs from the unsharded)"):
        parallelize(functional(FUNCTIONAL[name]), comm, PLAN)(scatter(whole(comm), comm, 1))


@pytest.mark.parametrize("name", some(RIGHT))
def test_what_goes_by_positions_is_right(comm: Any, name: str) -> None:
    x = whole(comm)
    expected = made(RIGHT[name], x)(x)
    divided = parallelize(made(RIGHT[name], x), comm, PLAN)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = divided(scatter(x, comm, 1))
    near(got, scatter(expected, comm, 1), 1e-12, name)
    assert not [one for one in told if "plan:" in str(one.message)], name


def test_functional_models_that_are_right(comm: Any) -> None:
    x, before = whole(comm), lambda m, x: L.Activation("tanh")(x)
    divided = parallelize(functional(before), comm, PLAN)
    near(divided(scatter(x, comm, 1)), scatter(functional(before)(x), comm, 1))


def test_an_example_that_is_whole_tells_too(comm: Any) -> None:
    """With it the first call is not looked at any more."""
    x = whole(comm)
    for name in ("the length", "halves"):
        with pytest.raises(UsageError, match=r"plan: "):
            parallelize(made(WRONG[name], x), comm, PLAN, example=x)
    divided = parallelize(made(RIGHT["features"], x), comm, PLAN, example=x)
    near(divided(scatter(x, comm, 1)), scatter(made(RIGHT["features"], x)(x), comm, 1))


def test_two_parts_that_meet(comm: Any) -> None:
    """One of them comes to no divided layer by itself."""
    x, other = whole(comm), tf.constant(values(1, 4 * comm.size, 1, seed=2))
    divided = parallelize(made(RIGHT["nothing"], x), comm, PLAN)
    got = divided(scatter(x, comm, 1), scatter(other, comm, 1))
    near(got, scatter(made(RIGHT["nothing"], x)(x, other), comm, 1))


def test_within_a_graph(comm: Any) -> None:
    """What has no numbers yet gets others on each rank, or what is a mean of one part would be that of all."""
    x = whole(comm)
    divided = parallelize(made(WRONG["halves"], x), comm, PLAN)
    with pytest.raises(Exception, match=r"plan: .*differs from the unsharded"):  # AutoGraph has one of its own
        tf.function(divided)(scatter(x, comm, 1))


def test_a_norm_in_the_plan(comm: Any) -> None:
    x = whole(comm)
    divided = parallelize(made(WRONG["a norm that is whole"], x), comm, {**PLAN, "norm": Sequence(1)})
    near(divided(scatter(x, comm, 1)), scatter(made(WRONG["a norm that is whole"], x)(x), comm, 1))


def test_features_that_come_in_parts(comm: Any) -> None:
    """A Row alone takes what its caller has divided: what comes before must go by single features."""

    class Last(keras.Model):  # type: ignore[misc]
        def __init__(self, before: Callable[[Any], Any]) -> None:
            super().__init__()
            self.before, self.down = before, L.Dense(8, name="down")

        def call(self, x: Any) -> Any:
            return self.down(self.before(x))

    x = tf.constant(values(2, 3, 4 * comm.size))

    def last(before: Callable[[Any], Any]) -> Any:
        model = Last(before)
        model(x)
        return filled(model)

    divided = parallelize(last(ops.tanh), comm, {"down": Row()})
    near(divided(scatter(x, comm, 2)), last(ops.tanh)(x))
    wrong = parallelize(last(ops.softmax), comm, {"down": Row()})
    with pytest.raises(UsageError, match=r"by the caller"):
        wrong(scatter(x, comm, 2))


@pytest.mark.parametrize("divided_first", [True, False])
def test_balanced_parts_are_warned_of(comm: Any, divided_first: bool) -> None:
    """Layers put them together in the order of the ranks: attention saw tokens in another one."""
    axis, x = commlib.Mesh(tp=comm.size)["tp"], whole(comm)
    model = parallelize(made(RIGHT["nothing"], x), axis, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if divided_first:
            model(scatter(x, axis, 1))
        part = shard_sequence(x, axis)
        for _ in range(2):
            model(part)
    said = [str(one.message) for one in caught if "in the layout 'balanced'" in str(one.message)]
    assert len(said) == (comm.rank == 0), said
