"""Models called with each rank's part of a sequence: operations along the sequence before any divided layer.

The oracle is one process: another model with the same weights, called with the whole.
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


def build(before: Before, x: Any) -> Any:
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


def whole(comm: Any) -> Any:
    return tf.constant(values(2, 4 * comm.size, 8))


@pytest.mark.parametrize("name", WRONG)
def test_operations_on_the_whole_sequence_are_refused(comm: Any, name: str) -> None:
    x = whole(comm)
    divided = parallelize(build(WRONG[name], x), comm, PLAN)
    with pytest.raises(
        UsageError, match=r"plan: .*(by the caller|differs from the unsharded|gathers a sequence takes)"
    ):
        divided(scatter(x, comm, 1))


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_models_refuse_such_operations(comm: Any, name: str) -> None:
    """They are checked when divided or when called, on arbitrary numbers."""
    with pytest.raises(UsageError, match=r"plan: .*(by the caller|differs from the unsharded)"):
        parallelize(functional(FUNCTIONAL[name]), comm, PLAN)(scatter(whole(comm), comm, 1))


@pytest.mark.parametrize("name", RIGHT)
def test_operations_on_single_positions_pass(comm: Any, name: str) -> None:
    x = whole(comm)
    expected = build(RIGHT[name], x)(x)
    divided = parallelize(build(RIGHT[name], x), comm, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = divided(scatter(x, comm, 1))
    near(got, scatter(expected, comm, 1), 1e-12, name)
    assert not [one for one in caught if "plan:" in str(one.message)], name


def test_valid_functional_models_pass(comm: Any) -> None:
    x, before = whole(comm), lambda m, x: L.Activation("tanh")(x)
    divided = parallelize(functional(before), comm, PLAN)
    near(divided(scatter(x, comm, 1)), scatter(functional(before)(x), comm, 1))


def test_a_whole_example_is_checked_too(comm: Any) -> None:
    """It replaces the check of the first call."""
    x = whole(comm)
    for name in ("the length", "halves"):
        with pytest.raises(UsageError, match=r"plan: "):
            parallelize(build(WRONG[name], x), comm, PLAN, example=x)
    divided = parallelize(build(RIGHT["features"], x), comm, PLAN, example=x)
    near(divided(scatter(x, comm, 1)), scatter(build(RIGHT["features"], x)(x), comm, 1))


def test_two_parts_may_be_combined(comm: Any) -> None:
    """One of them enters no divided layer directly."""
    x, other = whole(comm), tf.constant(values(1, 4 * comm.size, 1, seed=2))
    divided = parallelize(build(RIGHT["nothing"], x), comm, PLAN)
    got = divided(scatter(x, comm, 1), scatter(other, comm, 1))
    near(got, scatter(build(RIGHT["nothing"], x)(x, other), comm, 1))


def test_within_a_graph(comm: Any) -> None:
    """Symbolic tensors get different numbers on each rank; otherwise a part's mean would equal that of the whole."""
    x = whole(comm)
    divided = parallelize(build(WRONG["halves"], x), comm, PLAN)
    with pytest.raises(Exception, match=r"plan: .*differs from the unsharded"):  # AutoGraph has one of its own
        tf.function(divided)(scatter(x, comm, 1))


def test_a_norm_in_the_plan(comm: Any) -> None:
    x = whole(comm)
    divided = parallelize(build(WRONG["a norm that is whole"], x), comm, {**PLAN, "norm": Sequence(1)})
    near(divided(scatter(x, comm, 1)), scatter(build(WRONG["a norm that is whole"], x)(x), comm, 1))


def test_features_divided_by_the_caller(comm: Any) -> None:
    """A Row without a Column takes features divided by its caller; earlier operations must treat them one by one."""

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
    """Regression: layers joined them in rank order, so that attention saw tokens in a different order."""
    axis, x = commlib.Mesh(tp=comm.size)["tp"], whole(comm)
    model = parallelize(build(RIGHT["nothing"], x), axis, PLAN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if divided_first:
            model(scatter(x, axis, 1))
        part = shard_sequence(x, axis)
        for _ in range(2):
            model(part)
    messages = [str(one.message) for one in caught if "in the layout 'balanced'" in str(one.message)]
    assert len(messages) == (comm.rank == 0), messages
